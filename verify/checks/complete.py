"""Is everything there that a finished run leaves behind?"""

from __future__ import annotations

from config.record import BENCHMARK, STATUS, ArmEnd, ArmStart
from verify.files import is_known
from verify.findings import AS_WRITTEN, Scribe
from verify.reader import ArmEvidence, Record

RERUN = "run the benchmark again; what was finished stays in the record"


def status(record: Record, say: Scribe) -> None:
    """The run came to its end."""
    found = record.status
    if found.state == "running":
        say.invalid("the run is still going on", "wait for its end", STATUS)
    elif found.state == "aborted":
        reason = found.reason or "no reason given"
        say.invalid(f"the run was aborted: {reason}", "`sol benchmark --resume` adds what is missing", STATUS)
    say.conclude("the run came to its end")


def files(record: Record, say: Scribe) -> None:
    """Each file has a place in a record, and each arm and sample has its files."""
    for name in record.files:
        if not is_known(name):
            say.invalid("a record has no place for this file", "remove it", name)
    if not record.arms:
        say.invalid("there is no arm", "run the benchmark with at least one arm", "arms/")
    if record.benchmark is None:
        say.invalid("the summary is missing", RERUN, BENCHMARK)
    for arm in record.arms.values():
        for name in _expected(record, arm):
            if name not in record.files and name not in record.withheld:
                say.invalid("the file is missing", RERUN, name)
        for sample, timing in arm.timings.items():
            video = f"{arm.folder}sample-{sample}/out.mp4"
            if timing.media is None and (video in record.files or video in record.withheld):
                say.invalid("timing.json says that this sample was not muxed", AS_WRITTEN, video)
    say.conclude(f"every file of {len(record.arms)} arms is there")


def _expected(record: Record, arm: ArmEvidence) -> list[str]:
    ranks = range(record.target.parallel.num_gpus)
    names = [f"{arm.folder}events-rank{rank}.jsonl" for rank in ranks]
    for gate in arm.gates:
        names.append(gate.removesuffix(".json") + ".safetensors")
    names += [f"{arm.folder}sample-{sample}/out.mp4" for sample, timing in arm.timings.items() if timing.media]
    return names


def events(record: Record, say: Scribe) -> None:
    """No line of an events file is torn, missing or from elsewhere, and each process of an arm said how it ended."""
    for arm in record.arms.values():
        for name in arm.torn:
            say.invalid("the last line is torn: the file was cut while it was written", RERUN, name)
        for rank, lines in arm.events.items():
            name = f"{arm.folder}events-rank{rank}.jsonl"
            for source in ("driver", "worker"):
                _sequence(say, name, [event.seq for event in lines if event.source == source], source)
            starts = [event for event in lines if isinstance(event, ArmStart)]
            if any((event.arm, event.rank) != (arm.name, rank) for event in starts):
                say.invalid("an arm_start names another arm or rank", AS_WRITTEN, name)
            if not any(event.source == "worker" for event in starts):
                say.invalid("no worker started", RERUN, name)
        for session in arm.sessions:
            first, last = session[0], session[-1]
            if not (isinstance(first, ArmStart) and first.source == "driver"):
                say.invalid("the first line is not a driver's arm_start", RERUN, f"{arm.folder}events-rank0.jsonl")
            if not isinstance(last, ArmEnd):
                say.invalid("a process of the arm has no arm_end: it was cut", RERUN, f"{arm.folder}events-rank0.jsonl")
    say.conclude(
        f"{sum(len(lines) for arm in record.arms.values() for lines in arm.events.values())} events, none missing"
    )


def _sequence(say: Scribe, name: str, numbers: list[int], source: str) -> None:
    for expected, found in enumerate(numbers):
        if found != expected:
            say.invalid(f"line {expected} of the {source} has number {found}", AS_WRITTEN, name)
            return


def outcomes(record: Record, say: Scribe) -> None:
    """Every arm ended as it should, with at least one measured sample, and no sample was left half done."""
    for arm in record.arms.values():
        end = arm.end
        if end is None:
            say.invalid("the arm has no end", RERUN, arm.folder)
            continue
        if end.outcome != "complete":
            report = say.invalid if end.outcome == "ungated" else say.fail
            report(f"the arm ended as {end.outcome}: {end.reason or 'no reason given'}", RERUN, arm.folder)
            continue
        if not any(timing.phase == "measured" for timing in arm.timings.values()):
            say.invalid("the arm is complete without a measured sample", RERUN, arm.folder)
        if not any(timing.phase == "warmup" for timing in arm.timings.values()):
            say.invalid("the arm has no warm-up", RERUN, arm.folder)
        for session in arm.sessions:
            done = isinstance(session[-1], ArmEnd) and session[-1].outcome == "complete"
            for sample in sorted({event.sample for event in session if hasattr(event, "sample")} - set(arm.timings)):
                report = say.invalid if done else say.warn
                report(f"sample {sample} was begun and has no timing.json", RERUN, f"{arm.folder}sample-{sample}/")
        say.conclude(f"complete, {len(arm.timings)} samples", arm.folder)
