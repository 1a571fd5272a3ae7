"""Do the times of a record fit into each other?"""

from __future__ import annotations

from typing import Any

from config.record import ArmStart, RequestEnd, RequestStart, Step
from verify.derive import of_sample
from verify.findings import Scribe
from verify.reader import ArmEvidence, Record

AS_WRITTEN = "take the record as it was written"
SLACK = 0.02  # seconds: event times are rounded, and a line is written a moment after what it tells of


def nested(record: Record, say: Scribe) -> None:
    """Forwards fit into the denoising loop, the loop into the request, each within the time that passed between its
    events.
    """
    for arm in record.arms.values():
        for sample, timing in arm.timings.items():
            for rank in arm.events:
                where = f"{arm.folder}events-rank{rank}.jsonl"
                steps = sum(event.seconds for event in of_sample(arm, rank, sample, Step))
                loop = _between(say, arm, rank, sample, "worker")
                if loop is not None and not 0 <= steps <= loop + SLACK:
                    say.invalid(
                        f"sample {sample}: forwards take {steps:.3f} s, their loop {loop:.3f} s", AS_WRITTEN, where
                    )
                if loop is not None and loop > timing.seconds + SLACK:
                    say.invalid(
                        f"sample {sample}: the loop takes {loop:.3f} s, the request {timing.seconds:.3f} s",
                        AS_WRITTEN,
                        where,
                    )
                if any(event.seconds < 0 for event in of_sample(arm, rank, sample, Step)):
                    say.invalid(f"sample {sample}: a forward of less than no time", AS_WRITTEN, where)
            request = _between(say, arm, 0, sample, "driver")
            if request is not None and request != timing.seconds:
                where = f"{arm.folder}sample-{sample}/timing.json"
                say.invalid(f"{timing.seconds} s; the driver's event says {request} s", AS_WRITTEN, where)
    say.conclude("forwards, loops and requests fit into each other")


def _between(say: Scribe, arm: ArmEvidence, rank: int, sample: int, source: str) -> float | None:
    """Seconds that the end of a request states, checked against the time between its two events."""
    pair = [event for event in of_sample(arm, rank, sample, RequestStart, RequestEnd) if event.source == source]
    where = f"{arm.folder}events-rank{rank}.jsonl"
    if [type(event) for event in pair] != [RequestStart, RequestEnd]:
        say.invalid(f"sample {sample}: the {source} has no start and end of it", AS_WRITTEN, where)
        return None
    start, end = pair
    seconds: float = end.seconds
    if not 0 < seconds <= end.t - start.t + SLACK:
        say.invalid(
            f"sample {sample}: {source} says {seconds:.3f} s, {end.t - start.t:.3f} s passed", AS_WRITTEN, where
        )
    return seconds


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
