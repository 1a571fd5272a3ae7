"""All checks of a target, and the refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from config.errors import EnvironmentRefused
from config.schema import Target
from engine.doctor.check import Check, Severity
from engine.doctor.collective import check_collective
from engine.doctor.gpu import check_gpus
from engine.doctor.host import check_host
from engine.doctor.image import check_image
from engine.doctor.media import check_media
from engine.doctor.memory import check_memory
from engine.doctor.software import check_software
from engine.doctor.toolchain import check_toolchain

Family = tuple[str, Callable[[], Iterable[Check]]]


def families(target: Target, out: Path) -> list[Family]:
    """Everything but the NCCL smoke, cheapest refusals first. `out` is where the record would go."""
    weight = Severity.ERROR if target.output == "mp4" else Severity.WARNING
    found: list[Family] = [
        ("memory", lambda: check_memory(target)),
        ("host", lambda: check_host(target, out)),
        ("media", lambda: check_media(weight)),
        ("toolchain", lambda: check_toolchain(target)),
        ("software", lambda: check_software(target)),
        ("image", check_image),
    ]
    return [("gpus", lambda: check_gpus(target)), *found] if target.hardware.kind == "cuda" else found


def examine(target: Target, out: Path) -> list[Check]:
    """Every check of the target. `out` is where the record would go.

    The NCCL smoke comes last, and only on GPUs that are the target's: elsewhere its minute would say nothing.
    """
    checks: list[Check] = []
    smoke = False
    for name, look in families(target, out):
        found = list(look())
        smoke = smoke or (name == "gpus" and all(check.severity is not Severity.ERROR for check in found))
        checks += found
    return [*checks, *check_collective(target)] if smoke else checks


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
