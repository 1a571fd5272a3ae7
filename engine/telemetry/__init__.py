"""What GPUs and host did while an arm ran: a process beside it that looks once a second."""

from engine.telemetry.sampler import Sampler

__all__ = ["Sampler"]
