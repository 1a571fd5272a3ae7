"""What a check says: a finding, with a stable name, a sentence, a remedy and where it was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from config.errors import SolError

if TYPE_CHECKING:
    from verify.reader import Record

AS_WRITTEN = "take the record as it was written"
"""The remedy where evidence is missing, changed or contradicts itself."""


class Status(StrEnum):
    """How a finding weighs. `fail`: the record is sound and what it shows is red. `invalid`: the record itself cannot
    be believed.
    """

    OK = "ok"
    SKIPPED = "skipped"
    WARN = "warn"
    FAIL = "fail"
    INVALID = "invalid"


def plain(text: str) -> str:
    """A text on one line, with a replacement character for each one that does not print."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


@dataclass(frozen=True)
class Finding:
    """One statement about a record.

    check: stable name of the check, lower case with hyphens. message: what was found, one sentence.
    remedy: what to do next; empty where nothing is to be done. where: file or folder inside the record.
    For a skipped check the message is the reason. Control characters in either text, which may come from a record, are
    replaced: a finding cannot steer a terminal.
    """

    check: str
    status: Status
    message: str
    remedy: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        for name in ("message", "where"):
            object.__setattr__(self, name, plain(getattr(self, name)))

    def as_json(self) -> dict[str, str]:
        """The finding as a JSON object, all values strings."""
        return {key: str(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Check:
    """A named question that is put to a record. `run` yields at least one finding, whatever the record holds."""

    name: str
    question: str
    run: Callable[[Record, Scribe], None]


class Scribe:
    """Collects the findings of one check; every method adds one finding."""

    def __init__(self, check: str) -> None:
        self.check = check
        self.findings: list[Finding] = []

    def add(self, status: Status, message: str, *, remedy: str = "", where: str = "") -> None:
        """Add a finding of any status."""
        self.findings.append(Finding(self.check, status, message, remedy, where))

    def ok(self, message: str, where: str = "") -> None:
        """What was asked holds."""
        self.add(Status.OK, message, where=where)

    def skip(self, reason: str, where: str = "", remedy: str = "") -> None:
        """The question was not put, for this reason."""
        self.add(Status.SKIPPED, reason, where=where, remedy=remedy)

    def warn(self, message: str, remedy: str, where: str = "") -> None:
        """It holds, but a reader should know this."""
        self.add(Status.WARN, message, remedy=remedy, where=where)

    def fail(self, message: str, remedy: str, where: str = "") -> None:
        """The run did not do what was asked of it."""
        self.add(Status.FAIL, message, remedy=remedy, where=where)

    def invalid(self, message: str, remedy: str, where: str = "") -> None:
        """The record is incomplete or contradicts itself."""
        self.add(Status.INVALID, message, remedy=remedy, where=where)

    def conclude(self, message: str, where: str = "") -> None:
        """Say that all is well, unless something about `where` (or, without it, anything) was found already."""
        if not any(found.where.startswith(where) and found.status != Status.OK for found in self.findings):
            self.ok(message, where)


def run_check(check: Check, record: Record) -> list[Finding]:
    """Put one question. A fault met on the way is a finding too: no record, however made, ends in a traceback."""
    scribe = Scribe(check.name)
    try:
        check.run(record, scribe)
    except SolError as error:
        scribe.invalid(error.found, error.remedy or "make the record again")
    except (
        Exception
    ) as error:  # a record is input from a stranger: what its author thought of and we did not is INVALID too
        scribe.invalid(
            f"could not be judged: {type(error).__name__}: {error}",
            "report this: no record should bring a check to this",
        )
    if not scribe.findings:
        scribe.invalid("the check said nothing", "report this: every check must come to a finding")
    return scribe.findings


def worst(findings: Iterable[Finding]) -> Status:
    """The heaviest status, in the order ok or skipped, warn, fail, invalid. No finding at all is `invalid`: nothing
    was checked.
    """
    order = (Status.OK, Status.SKIPPED, Status.WARN, Status.FAIL, Status.INVALID)
    ranks = [order.index(finding.status) for finding in findings if finding.status != Status.SKIPPED]
    return order[max(ranks)] if ranks else Status.INVALID


def names_by_outcome(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """Check names, sorted, as an attestation lists them: passedTests, warnedTests and failedTests. Skipped checks are
    in none.
    """
    by_name: dict[str, list[Finding]] = {}
    for finding in findings:
        by_name.setdefault(finding.check, []).append(finding)
    lists: dict[str, list[str]] = {"passedTests": [], "warnedTests": [], "failedTests": []}
    for name, found in sorted(by_name.items()):
        if all(finding.status == Status.SKIPPED for finding in found):
            continue
        key = {Status.OK: "passedTests", Status.WARN: "warnedTests"}.get(worst(found), "failedTests")
        lists[key].append(name)
    return lists


def of_status(findings: Iterable[Finding], status: Status) -> Iterator[Finding]:
    """The findings of one status, in order."""
    return (finding for finding in findings if finding.status == status)
