"""From a record directory to typed evidence, with errors that name file and line."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from config.errors import InvalidRecord
from config.hold import held, pid_namespace, started
from config.lock import Lock, Recipe
from config.record import (
    BENCHMARK,
    ENVIRONMENT,
    EVENT,
    LOCK,
    STATUS,
    ArmEnd,
    ArmStart,
    Attention,
    Benchmark,
    Environment,
    GateReport,
    Layout,
    Status,
    Timing,
)
from config.schema import ARMS, Arm, ArmName, Target
from verify.files import Files
from verify.findings import AS_WRITTEN
from verify.strictjson import parse, parse_model, validate

MAX_FORWARDS = MAX_LAYERS = 10_000
MAX_TOKENS = 100_000_000
MAX_GPUS = 1_000
"""Sizes beyond any run's. A number in a record must not be able to make its reader count to it."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ArmEvidence:
    """The raw files of one arm, parsed.

    events: by rank. gates: by file name; a process that was started later to add samples keeps its gate with its own
    warm-up. timings: by sample number. torn: events files whose last line was cut.
    """

    name: ArmName
    events: dict[int, tuple[Any, ...]]
    gates: dict[str, GateReport]
    timings: dict[int, Timing]
    torn: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The arm's folder in the record, with a trailing slash."""
        return f"arms/{self.name}/"

    @property
    def end(self) -> ArmEnd | None:
        """The last arm_end of rank 0, which says how the arm ended; None when it was cut."""
        ends = [event for event in self.events.get(0, ()) if isinstance(event, ArmEnd)]
        return ends[-1] if ends else None

    @property
    def complete(self) -> bool:
        """Whether the arm ended as it should."""
        return self.end is not None and self.end.outcome == "complete"

    @property
    def sessions(self) -> list[list[Any]]:
        """Rank 0's events cut at each start of a driver: one list a process of the arm, in order."""
        parts: list[list[Any]] = []
        for event in self.events.get(0, ()):
            if not parts or (isinstance(event, ArmStart) and event.source == "driver"):
                parts.append([])
            parts[-1].append(event)
        return parts

    def of(self, rank: int, *kinds: type[Any]) -> list[Any]:
        """The rank's events of these kinds, in the order in which they were written."""
        return [event for event in self.events.get(rank, ()) if isinstance(event, kinds)]


@dataclass(frozen=True)
class Record:
    """A run record, parsed. `withheld` names the detachable files that an attestation lists and the directory lacks."""

    files: Files
    status: Status
    lock: Lock
    environment: Environment
    arms: dict[ArmName, ArmEvidence]
    benchmark: Benchmark | None
    withheld: frozenset[str] = field(default=frozenset())

    @cached_property
    def target(self) -> Target:
        """The lock's values as a typed target.

        Raises:
            InvalidRecord: they are not those of a target.
        """
        try:
            target = self.lock.resolved
        except (ValidationError, KeyError, TypeError, ValueError) as error:
            raise InvalidRecord(
                f"{LOCK}: the values are not those of a target: {str(error).splitlines()[0]}",
                remedy="a lock of a newer release needs a newer `sol verify`",
            ) from None
        if max(target.parallel.num_gpus, target.hardware.gpu_count) > MAX_GPUS:
            raise InvalidRecord(f"{LOCK}: more than {MAX_GPUS} GPUs", remedy=AS_WRITTEN)
        return target

    @cached_property
    def recipe(self) -> Recipe:
        """The image recipe that the lock's digest covers.

        Raises:
            InvalidRecord: the lock has none.
        """
        try:
            return self.lock.recipe
        except (ValidationError, KeyError):
            raise InvalidRecord(f"{LOCK}: it has no recipe", remedy="take lock.json as it was written") from None

    @property
    def open(self) -> bool:
        """Whether the run differs from its target, and so can verify no published claim."""
        return bool(self.lock.overrides or self.environment.differences)

    def policy(self, arm: ArmName) -> Arm | None:
        """What the lock says about an arm; None when it knows no such arm."""
        return self.target.arms.get(arm)

    def sparse_arms(self) -> list[ArmEvidence]:
        """The arms of the record whose policy has Sol-Attn."""
        return [arm for arm in self.arms.values() if self.lookup(arm).sparse != "none"]

    def lookup(self, arm: ArmEvidence) -> Arm:
        """What the lock says about an arm that must be in it.

        Raises:
            InvalidRecord: the lock has no such arm.
        """
        policy = self.policy(arm.name)
        if policy is None:
            raise InvalidRecord(f"{arm.folder} is an arm that the lock does not have", remedy=AS_WRITTEN)
        return policy


def read_status(files: Files, host_hash: str | None = None) -> Status:
    """The record's status. A run that says running while its process is gone reads as aborted.

    Whoever holds the lock on the record's directory is writing it, in whichever container. Where nobody does, the
    process in `status` is looked for: earlier releases, and file systems without locks, have nothing else.

    Args:
        files: the record.
        host_hash: what stands for this machine's boot; computed when None.

    Raises:
        InvalidRecord: the file is missing or does not fit its schema.
    """
    status: Status = parse_model(Status, files.read(STATUS), STATUS)
    if status.state != "running":
        return status
    locked = held(files.root)
    if locked:
        return status
    if status.host_hash != (boot_hash() if host_hash is None else host_hash):
        reason = "it says running, but the machine has restarted since or is another one"
    elif _going_on(status, certain=locked is not None):
        return status
    else:
        reason = f"it says running, but its process {status.pid} is gone"
    return status.model_copy(update={"state": "aborted", "reason": reason})


def _going_on(status: Status, *, certain: bool) -> bool:
    """Whether the process of a status of this boot is there; `certain`: nobody holds the record's lock."""
    if not 0 < status.pid < 1 << 31:
        return False
    if not status.pid_namespace:  # an earlier release, or a kernel that does not tell
        return Path(f"/proc/{status.pid}").exists()
    if status.pid_namespace != pid_namespace():  # its number means nothing here, and only the lock can tell
        return not certain
    return started(status.pid) == status.started != 0


def boot_hash() -> str:
    """First 16 hex digits of the SHA-256 of this boot's id: a pid of `status` means something under the same value
    only.
    """
    try:
        return hashlib.sha256(BOOT_ID.read_text("ascii").strip().encode()).hexdigest()[:16]
    except OSError:
        return ""


def read_record(root: Path, withheld: frozenset[str] = frozenset(), files: Files | None = None) -> Record:
    """Parse a record directory.

    A torn last line of an events file is left out and named in `ArmEvidence.torn`: a run may be killed while it
    writes. Whether that is acceptable is for the check of completeness to say.

    Raises:
        InvalidRecord: a file is missing, unreadable, or does not fit its schema.
    """
    files = Files(root) if files is None else files
    status = read_status(files)
    lock: Lock = parse_model(Lock, files.read(LOCK), LOCK)
    environment: Environment = parse_model(Environment, files.read(ENVIRONMENT), ENVIRONMENT)
    present = {name.split("/")[1] for name in files if name.startswith("arms/") and name.count("/") > 1}
    arms = {arm: _read_arm(files, arm) for arm in ARMS if arm in present}
    benchmark = parse_model(Benchmark, files.read(BENCHMARK), BENCHMARK) if BENCHMARK in files else None
    record = Record(files, status, lock, environment, arms, benchmark, withheld)
    _ = record.target, record.recipe  # what every check relies on fails here, once
    _own_ranks(record)
    return record


def _own_ranks(record: Record) -> None:
    """No file is of a rank or a GPU that the lock does not have: figures are taken over all of an arm's files.

    Raises:
        InvalidRecord: one is, or has a number that is not written the shortest way, or a gate's report is of another
        rank or warm-up than its name says.
    """
    target = record.target
    for name in sorted({*record.files, *record.withheld}):
        match = re.fullmatch(r"arms/\w+/(?:sample-\d+/)?(?:(?:events|gate)-rank|(telemetry-gpu))(\d+)\.\w+", name)
        if match:
            count = target.hardware.gpu_count if match[1] else target.parallel.num_gpus
            if str(int(match[2])) != match[2] or int(match[2]) >= count:
                raise InvalidRecord(
                    f"{name} has number {match[2]}", needed=f"one below {count}, as lock.json says", remedy=AS_WRITTEN
                )
    for arm in record.arms.values():
        for name, report in arm.gates.items():
            place = arm.folder + (f"sample-{report.sample}/" if report.sample else "")
            if name != f"{place}gate-rank{report.rank}.json":
                raise InvalidRecord(
                    f"{name} holds the gate of rank {report.rank}, warm-up {report.sample}",
                    needed="the rank and the warm-up that its name says",
                    remedy=AS_WRITTEN,
                )


def _read_arm(files: Files, arm: ArmName) -> ArmEvidence:
    folder = re.escape(f"arms/{arm}/")
    events: dict[int, tuple[Any, ...]] = {}
    torn = []
    for rank, name in _numbered(files, folder + r"events-rank(\d+)\.jsonl"):
        lines, was_torn = read_events(files.read(name), name)
        events[rank] = lines
        torn += [name] if was_torn else []
    gates = {
        name: parse_model(GateReport, files.read(name), name)
        for name in files
        if re.fullmatch(folder + r"(?:sample-\d+/)?gate-rank\d+\.json", name)
    }
    timings = {
        sample: parse_model(Timing, files.read(name), name)
        for sample, name in _numbered(files, folder + r"sample-(\d+)/timing\.json")
    }
    for sample, timing in timings.items():
        if timing.num_inference_steps > MAX_FORWARDS:
            raise InvalidRecord(
                f"arms/{arm}/sample-{sample}/timing.json: {timing.num_inference_steps} steps", remedy=AS_WRITTEN
            )
    return ArmEvidence(arm, events, gates, timings, tuple(torn))


def _numbered(files: Files, pattern: str) -> Iterator[tuple[int, str]]:
    found: dict[int, str] = {}
    for name in files:
        match = re.fullmatch(pattern, name)
        if match:
            number = int(match[1])
            if number in found or str(number) != match[1]:
                raise InvalidRecord(f"{name} has a number that is not written the shortest way", remedy=AS_WRITTEN)
            found[number] = name
    yield from sorted(found.items())


def read_events(data: bytes, name: str) -> tuple[tuple[Any, ...], bool]:
    """The events of one file, and whether its last line was torn (cut before its newline).

    Raises:
        InvalidRecord: a line does not fit the schema.
    """
    lines = data.split(b"\n")
    torn = lines.pop() != b""
    return tuple(_event(line, f"{name}, line {number}") for number, line in enumerate(lines, 1)), torn


def _event(line: bytes, where: str) -> Any:
    event = validate(EVENT, parse(line, where), where)
    if isinstance(event, Attention) and not all(0 <= layer < MAX_LAYERS for layer in event.layers):
        raise InvalidRecord(f"{where}: a layer that no model has", remedy=AS_WRITTEN)
    if isinstance(event, Layout) and max(event.total_tokens, event.live_tokens) > MAX_TOKENS:
        raise InvalidRecord(f"{where}: {event.total_tokens} rows", remedy=AS_WRITTEN)
    if getattr(event, "step", 0) not in range(MAX_FORWARDS):
        raise InvalidRecord(f"{where}: forward {event.step}", remedy=AS_WRITTEN)
    return event
