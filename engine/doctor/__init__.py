"""Doctor: what a target needs of the machine, checked before anything long or large is begun."""

from engine.doctor.check import Check, Severity
from engine.doctor.run import examine, require_healthy

__all__ = ["Check", "Severity", "examine", "require_healthy"]
