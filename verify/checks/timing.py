"""Do the times of a record fit into each other, and into the time that passed between the events?

Stated seconds have a bound on both sides. From above: nothing takes longer than what it lies in. From below: of the
time that passed between two events, little may be left unstated. The most that the records in benchmarks/records (H200)
and fifty requests of the CPU targets left, some on overloaded cores, stands beside each bound (the CPU's by a script
that was not kept). The bounds are wider: an event that waits for a network file system makes no record false.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from config.record import ArmStart, RequestEnd, RequestStart, Stage, Step, Timing
from verify.derive import of_sample
from verify.findings import AS_WRITTEN, Scribe
from verify.reader import ArmEvidence, Record

SLACK = 0.02  # seconds: event times are rounded, and a line is written a moment after what it tells of
LOOP_UNSTATED = 2.0
"""Seconds between the worker's two events that its loop need not state: H200 0.0007, CPU 0.025. Lines are written."""
REQUEST_UNSTATED = 5.0
"""Seconds between the driver's two events that the request need not state: H200 2.57, CPU 2.84. Earlier releases
decoded or digested the output there, before they wrote the second event. Where the worker tells its stages, these bound
the request closer: it may not be shorter than them, and on the H200 was 0.03 s longer at most.
"""
FORWARD_UNSTATED, LOOP_REST, SHARE = 1.0, 2.0, 0.05
"""Seconds, and a share of the time on top, that may lie between two forwards (H200 0.003 s, CPU 0.42 of 7 s: scheduler,
events) and in a measured loop beside all of them (H200 0.24 of 63 s, CPU 0.76 of 8 s and 3.0 of 112 s).
"""


def nested(record: Record, say: Scribe) -> None:
    """Forwards fit into the denoising loop, the loop into the request, each within the time that passed between its
    events, and none leaves more of that time unstated than lies between such events.
    """
    for arm in record.arms.values():
        for sample, timing in arm.timings.items():
            for rank in arm.events:
                where = f"{arm.folder}events-rank{rank}.jsonl"
                loop = _between(say, arm, rank, sample, "worker", LOOP_UNSTATED)
                for fault in (*_forwards(arm, rank, timing, loop), *_stages(arm, rank, timing)):
                    say.invalid(f"sample {sample}: {fault}", AS_WRITTEN, where)
                if loop is not None and loop > timing.seconds + SLACK:
                    text = f"the loop takes {loop:.3f} s, the request {timing.seconds:.3f} s"
                    say.invalid(f"sample {sample}: {text}", AS_WRITTEN, where)
                for fault in _sglang(timing, loop) if rank == 0 else ():
                    say.invalid(fault, AS_WRITTEN, f"{arm.folder}sample-{sample}/timing.json")
            request = _between(say, arm, 0, sample, "driver", REQUEST_UNSTATED)
            if request is not None and request != timing.seconds:
                where = f"{arm.folder}sample-{sample}/timing.json"
                say.invalid(f"{timing.seconds} s; the driver's event says {request} s", AS_WRITTEN, where)
    say.conclude("forwards, loops and requests fit into each other, and into the time that passed")


def _between(say: Scribe, arm: ArmEvidence, rank: int, sample: int, source: str, unstated: float) -> float | None:
    """Seconds that the end of a request states, checked against the time between its two events."""
    pair = [event for event in of_sample(arm, rank, sample, RequestStart, RequestEnd) if event.source == source]
    where = f"{arm.folder}events-rank{rank}.jsonl"
    if [type(event) for event in pair] != [RequestStart, RequestEnd]:
        say.invalid(f"sample {sample}: the {source} has no start and end of it", AS_WRITTEN, where)
        return None
    start, end = pair
    seconds, passed = float(end.seconds), end.t - start.t
    if not 0 < seconds <= passed + SLACK or passed - seconds > unstated:
        text = f"{source} says {seconds:.3f} s, {passed:.3f} s passed"
        if passed > seconds:
            text += f", of which it may leave {unstated:g} s unstated"
        say.invalid(f"sample {sample}: {text}", AS_WRITTEN, where)
    return seconds


def _forwards(arm: ArmEvidence, rank: int, timing: Timing, loop: float | None) -> Iterator[str]:
    """What is impossible about the seconds of a request's forwards: one sentence each."""
    steps = of_sample(arm, rank, timing.sample, Step)
    total = sum(event.seconds for event in steps)
    if any(event.seconds < 0 for event in steps):
        yield "a forward of less than no time"
    for before, event in zip(steps, steps[1:], strict=False):
        passed = event.t - before.t
        if passed - event.seconds > FORWARD_UNSTATED + SHARE * passed:
            yield f"forward {event.step} says {event.seconds:.3f} s, {passed:.3f} s passed since the one before"
            break
    if loop is None:
        return
    if not 0 <= total <= loop + SLACK:
        yield f"forwards take {total:.3f} s, their loop {loop:.3f} s"
    # A warm-up compiles and tunes before its first forward: 19.5 s on the H200.
    if timing.phase == "measured" and loop - total > LOOP_REST + SHARE * loop:
        yield f"forwards take {total:.3f} s, which leaves too much of their loop's {loop:.3f} s unstated"


def _stages(arm: ArmEvidence, rank: int, timing: Timing) -> Iterator[str]:
    """A request lasts at least as long as its stages, from the begin of the first to the end of the last."""
    stages = of_sample(arm, rank, timing.sample, Stage)
    if stages:
        passed = stages[-1].t - (stages[0].t - stages[0].seconds)
        if passed > timing.seconds + SLACK:
            yield f"the worker's stages lasted {passed:.3f} s, the request {timing.seconds:.3f} s"
    if any(stage.seconds < 0 for stage in stages):
        yield "a stage of less than no time"


def _sglang(timing: Timing, loop: float | None) -> Iterator[str]:
    """SGLang's own total holds the loop and lies within the request, and so does each of its stages and steps."""
    total = timing.sglang_total_ms
    if total is not None and not (loop or 0.0) - SLACK <= total / 1000 <= timing.seconds + SLACK:
        yield f"SGLang's total is {total / 1000:.3f} s; needed: from the loop's to the request's {timing.seconds:.3f} s"
    for name, parts in (("stage", tuple(timing.sglang_stages_ms.values())), ("step", timing.sglang_steps_ms)):
        wrong = [part / 1000 for part in parts if not 0 <= part / 1000 <= timing.seconds + SLACK]
        if wrong:
            yield f"SGLang's own times have a {name} of {wrong[0]:.3f} s in a request of {timing.seconds:.3f} s"


def monotonic(record: Record, say: Scribe) -> None:
    """Within a process the clock never runs backwards."""
    for arm in record.arms.values():
        for rank, events in arm.events.items():
            last: dict[str, float] = {}
            for event in events:
                if isinstance(event, ArmStart):
                    last[event.source] = 0.0  # another process, another zero
                if event.t < last.get(event.source, 0.0):
                    _backwards(say, arm, rank, event)
                    break
                last[event.source] = event.t
    say.conclude("clocks run forwards")


def _backwards(say: Scribe, arm: ArmEvidence, rank: int, event: Any) -> None:
    where = f"{arm.folder}events-rank{rank}.jsonl"
    say.invalid(f"event {event.seq} of the {event.source} is earlier than the one before it", AS_WRITTEN, where)
