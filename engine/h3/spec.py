"""What one arm's process is asked to do, as the parent writes it down for the process and for SGLang's spawned
workers."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from config.lock import Lock
from config.record import Phase
from config.schema import Arm, ArmName, Model

SPEC_VARIABLE = "SOL_ARM_SPEC"
"""Names the spec file in the environment: a spawned worker inherits that, and nothing else that we could set."""


class RequestSpec(Model):
    """One request of the process, in order."""

    sample: int = Field(ge=0)
    phase: Phase
    seed: int
    num_inference_steps: int


class ArmSpec(Model):
    """One arm's process: load once, run the requests, stop."""

    record: str = Field(description="the record's directory, absolute")
    arm: ArmName
    lock: Lock
    checkpoint: str = Field(description="directory whose subfolder is the partition, absolute")
    requests: tuple[RequestSpec, ...] = Field(strict=False, min_length=1)

    @property
    def folder(self) -> Path:
        """The arm's folder in the record."""
        return Path(self.record) / "arms" / self.arm

    @property
    def policy(self) -> Arm:
        """What the arm switches on."""
        return self.lock.resolved.arms[self.arm]

    def gate_folder(self) -> Path:
        """Where this process leaves its gate: beside the events, or, where an earlier process did so already, with
        its warm-up."""
        first = self.requests[0].sample
        return self.folder if first == 0 else self.folder / f"sample-{first}"


def spec_from_environment() -> ArmSpec:
    """The spec that the parent left.

    Raises:
        KeyError: this process was not started as an arm.
    """
    return ArmSpec.model_validate_json(Path(os.environ[SPEC_VARIABLE]).read_bytes())
