"""One check's outcome, in the form in which the doctor's table and its JSON show it."""

from __future__ import annotations

from enum import StrEnum

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


def judged(name: str, good: bool, found: str, needed: str, remedy: str, *, bad: Severity = Severity.ERROR) -> Check:
    """A check that is ok or `bad`; the remedy is shown only where there is something to mend."""
    severity = Severity.OK if good else bad
    return Check(name=name, severity=severity, found=found, needed=needed, remedy="" if good else remedy)
