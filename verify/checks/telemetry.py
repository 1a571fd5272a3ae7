"""Was the machine undisturbed while it was measured?

Judged are the measured requests alone, on the machine's monotonic clock, which the driver's arm_start and every
session of telemetry name. Throttling, other people's work, a lost GPU or a hole in the evidence make a record INVALID:
its times then say something about the disturbance.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from config.record import ArmStart, Memory, RequestEnd, RequestStart
from config.telemetry import (
    POWER_CAP,
    SLOWDOWN,
    TELEMETRY,
    GpuLost,
    GpuSample,
    HostSample,
    TelemetryEnd,
    TelemetryStart,
    Xid,
)
from verify.findings import AS_WRITTEN, Scribe
from verify.reader import ArmEvidence, Record
from verify.strictjson import parse, validate

THROTTLED_SHARE = 0.01
"""Of the samples during measured requests; more than that is throttled (field report 25)."""
IDLE_SHARE = 0.1
"""Of the samples during measured requests that tell who computes; more of them without the arm's process are of a GPU
that the arm did not use. It holds its GPU from loading to its end: the H200's records have no such sample.
"""
GAP_SECONDS = 5.0
"""Longest time of a measured request without a sample; three intervals where that is more."""
AGAIN = "find what disturbed the machine, then run the arm again"


@dataclass(frozen=True)
class Session:
    """One session of a telemetry file."""

    start: TelemetryStart
    lines: tuple[Any, ...]


def telemetry(record: Record, say: Scribe) -> None:
    """A GPU's throttling, users, errors and loss; the host's memory; and whether all of it was watched."""
    gpus = record.target.hardware.gpu_count
    for arm in record.arms.values():
        spans = list(measured(arm))
        if gpus and not spans and any(timing.phase == "measured" for timing in arm.timings.values()):
            say.invalid("the events name no clock, so telemetry cannot be held against them", AGAIN, arm.folder)
        for gpu in range(gpus):
            _gpu(record, say, arm, gpu, spans)
        _host(record, say, arm, spans, covered=gpus > 0)
    say.conclude("undisturbed while it was measured")


def measured(arm: ArmEvidence) -> Iterator[tuple[int, float, float]]:
    """Sample number, begin and end of each measured request on the machine's clock."""
    clock, begun = None, dict[int, float]()
    for event in arm.events.get(0, ()):
        if event.source != "driver":
            continue
        if isinstance(event, ArmStart):
            clock, begun = event.clock, {}
        elif isinstance(event, RequestStart) and event.phase == "measured" and clock is not None:
            begun[event.sample] = clock + event.t
        elif isinstance(event, RequestEnd) and event.sample in begun and clock is not None:
            yield event.sample, begun.pop(event.sample), clock + event.t


def read_sessions(data: bytes, name: str, say: Scribe) -> list[Session]:
    """The sessions of one file; what does not fit the schema or runs backwards is said.

    Raises:
        InvalidRecord: a line does not fit the schema.
    """
    lines = data.split(b"\n")
    if lines.pop() != b"":
        say.warn("the last line is torn: the sampler was killed while it wrote", AGAIN, name)
    parsed = [
        validate(TELEMETRY, parse(line, f"{name}, line {n}"), f"{name}, line {n}") for n, line in enumerate(lines, 1)
    ]
    parts: list[list[Any]] = []
    for line in parsed:
        if isinstance(line, TelemetryStart):
            parts.append([])
        elif not parts:
            say.invalid("the first line is not a telemetry_start", AS_WRITTEN, name)
            return []
        elif parts[-1] and line.t < parts[-1][-1].t:
            say.invalid(f"time runs backwards at {line.t:g} s", AS_WRITTEN, name)
        parts[-1].append(line)
    return [Session(part[0], tuple(part[1:])) for part in parts]


def _gpu(record: Record, say: Scribe, arm: ArmEvidence, gpu: int, spans: list[tuple[int, float, float]]) -> None:
    name = f"{arm.folder}telemetry-gpu{gpu}.jsonl"
    if name not in record.files:
        say.invalid("the file is missing: throttling and foreign load cannot be excluded", "run the arm again", name)
        return
    sessions = read_sessions(record.files.read(name), name, say)
    known = {found.index: found.uuid_sha256 for found in record.environment.gpus}
    for session in sessions:
        # Not even without a name: a sampler that cannot name its GPU has lost it, and says so in its next line.
        if session.start.gpu != gpu or session.start.uuid_sha256 != known.get(gpu):
            say.invalid(f"a session is of another GPU than environment.json's GPU {gpu}, or of none", AS_WRITTEN, name)
        for line in session.lines:
            if isinstance(line, Xid):
                say.invalid(f"the driver reported Xid {line.number} at {line.t:g} s", AGAIN, name)
            elif isinstance(line, GpuLost):
                say.invalid(f"the GPU was lost at {line.t:g} s: {line.reason}", AGAIN, name)
    samples = _covered(say, name, sessions, GpuSample, spans)
    if not samples:
        return
    _users(say, name, samples, record.target.parallel.num_gpus)
    slowed = [sample for sample in samples if (sample.reasons or 0) & SLOWDOWN]
    if len(slowed) > THROTTLED_SHARE * len(samples):
        seconds, share = f"{len(slowed)} of {len(samples)} samples", len(slowed) / len(samples)
        hottest = max((sample.temperature_c or 0 for sample in samples), default=0)
        say.invalid(f"throttled in {seconds} ({share:.1%}), up to {hottest} °C", "cool the GPU, then run again", name)
    if all(sample.reasons is None for sample in samples):
        say.warn("the board does not tell why its clocks are what they are", "nothing to do on this board", name)
    _peaks(say, arm, name, samples, gpu)
    say.conclude(_summary(samples), name)


def _users(say: Scribe, name: str, samples: list[Any], ranks: int) -> None:
    """The arm computes on the GPU, and nobody else. Where a container hides processes, as many as ranks are its own."""
    foreign = max((sample.foreign_processes or 0 for sample in samples), default=0)
    if foreign:
        say.invalid(f"{foreign} foreign process(es) computed on the GPU while it was measured", AGAIN, name)
    hidden = max(((s.hidden_processes or 0) - (0 if s.own_processes else ranks) for s in samples), default=0)
    if hidden > 0:
        say.invalid(f"{hidden} process(es) from outside the container computed on the GPU meanwhile", AGAIN, name)
    told = [sample for sample in samples if sample.own_processes is not None]
    idle = sum(1 for sample in told if not sample.own_processes and not sample.hidden_processes)
    if idle > IDLE_SHARE * len(told):
        text = f"in {idle} of {len(told)} samples nothing of the arm computed on the GPU; needed: the GPU that it used"
        say.invalid(text, "watch the arm's own GPU: run the arm again", name)
    if not told:
        say.warn("the driver does not tell who computes on the GPU", "run where NVML lists processes", name)


def _peaks(say: Scribe, arm: ArmEvidence, name: str, samples: list[Any], gpu: int) -> None:
    """Two sources of the peak: the allocator's own count, and what NVML saw in use ten times a second."""
    numbers = {timing.sample for timing in arm.timings.values() if timing.phase == "measured"}
    reserved = [event.reserved_mib for event in arm.of(gpu, Memory) if event.sample in numbers]
    seen = max(sample.memory_peak_mib for sample in samples)
    if reserved and max(reserved) > seen:
        text = f"the allocator reserved {max(reserved):.0f} MiB at most, and NVML saw no more than {seen:.0f}"
        say.warn(text, "take the larger figure: a short peak falls between two looks", name)


def _summary(samples: list[Any]) -> str:
    def most(values: list[float]) -> str:
        return f"{max(values):.0f}" if values else "unknown"

    capped = sum(1 for sample in samples if (sample.reasons or 0) & POWER_CAP) / len(samples)
    return (
        f"{len(samples)} samples, peak {most([s.memory_peak_mib for s in samples])} MiB, "
        f"{most([s.power_w for s in samples if s.power_w is not None])} W, "
        f"{most([s.temperature_c for s in samples if s.temperature_c is not None])} °C, "
        f"at the power limit {capped:.0%} of the time"
    )


def _host(
    record: Record, say: Scribe, arm: ArmEvidence, spans: list[tuple[int, float, float]], *, covered: bool
) -> None:
    name = f"{arm.folder}telemetry-host.jsonl"
    if name not in record.files:
        say.invalid("the file is missing", "run the arm again", name)
        return
    sessions = read_sessions(record.files.read(name), name, say)
    for session in sessions:
        for line in session.lines:
            if isinstance(line, TelemetryEnd) and line.oom_kills and not arm.complete:
                say.invalid(f"the kernel killed {line.oom_kills} process(es) for memory: not a crash", AGAIN, name)
    samples = _covered(say, name, sessions, HostSample, spans, required=covered)
    if samples:
        busiest = max(sample.busy_cores - sample.arm_cores for sample in samples)
        pressed = max((sample.pressure or 0.0 for sample in samples), default=0.0)
        if pressed > 10:
            say.warn(f"memory was short for {pressed:.0f} % of ten seconds", "give the run more memory", name)
        resident = max(sample.rss_mib for sample in samples)
        say.conclude(f"{len(samples)} samples, {resident:.0f} MiB resident, others up to {busiest:.1f} cores", name)


def _covered(
    say: Scribe,
    name: str,
    sessions: list[Session],
    kind: type[Any],
    spans: list[tuple[int, float, float]],
    *,
    required: bool = True,
) -> list[Any]:
    """All samples of the measured requests; a request with a hole in them is said."""
    found = sorted(
        (
            (session.start.clock + line.t, line)
            for session in sessions
            for line in session.lines
            if isinstance(line, kind)
        ),
        key=lambda pair: pair[0],
    )
    times = [time for time, _ in found]
    allowed = max([GAP_SECONDS, *(3 * session.start.interval for session in sessions)])
    out: list[Any] = []
    for sample, begin, end in spans:
        first, last = bisect_left(times, begin), bisect_right(times, end)
        marks = [begin, *times[first:last], end]
        gap = max(later - earlier for earlier, later in zip(marks, marks[1:], strict=False))
        if gap > allowed:
            report = say.invalid if required else say.warn
            remedy = "run the arm again, and leave its sampler alone"
            report(f"sample {sample} went unwatched for {gap:.1f} s", remedy, name)
        out += [line for _, line in found[first:last]]
    return out
