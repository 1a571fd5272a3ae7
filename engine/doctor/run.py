"""All checks of a target, and the refusal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from config.errors import EnvironmentRefused
from config.schema import Target
from engine.doctor.check import Check, Severity
from engine.doctor.gpu import check_gpus
from engine.doctor.host import check_host
from engine.doctor.media import check_media
from engine.doctor.software import check_software


def examine(target: Target, out: Path) -> list[Check]:
    """Every check of the target, cheapest refusals first. `out` is where the record would go."""
    checks = list(check_gpus(target)) if target.hardware.kind == "cuda" else []
    return [*checks, *check_host(target, out), *check_media(), *check_software(target)]


def require_healthy(checks: Sequence[Check]) -> None:
    """Refuse on errors.

    Raises:
        EnvironmentRefused: at least one check is an error; all of them are named.
    """
    errors = [check for check in checks if check.severity is Severity.ERROR]
    if errors:
        raise EnvironmentRefused(
            "; ".join(f"{check.name}: {check.found}" for check in errors),
            needed="; ".join(f"{check.name}: {check.needed}" for check in errors),
            remedy="; ".join(dict.fromkeys(check.remedy for check in errors)),
        )
