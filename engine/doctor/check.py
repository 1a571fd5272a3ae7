"""One check's outcome, in the form in which the doctor's table and its JSON show it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from config.schema import Model


class Severity(StrEnum):
    """ok; a warning is recorded and the run goes on; an error refuses the run."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Check(Model):
    """What was found, what was needed, and what to do when they differ."""

    name: str
    severity: Severity
    found: str
    needed: str
    remedy: str = ""
    fix: tuple[str, ...] = Field(default=(), strict=False, description="commands to type; `--fix-hints` prints them")


def judged(
    name: str,
    good: bool,
    found: str,
    needed: str,
    remedy: str,
    *,
    bad: Severity = Severity.ERROR,
    fix: tuple[str, ...] = (),
) -> Check:
    """A check that is ok or `bad`; remedy and commands are shown only where there is something to mend."""
    if good:
        return Check(name=name, severity=Severity.OK, found=found, needed=needed)
    return Check(name=name, severity=bad, found=found, needed=needed, remedy=remedy, fix=fix)
