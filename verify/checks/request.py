"""Did each request run as it was asked: seed, steps, forwards, layout of the document?"""

from __future__ import annotations

from config.record import Layout, RequestEnd, RequestStart, Step, Timing
from config.schema import Span
from verify.derive import of_sample
from verify.findings import AS_WRITTEN, Scribe
from verify.reader import ArmEvidence, Record

RERUN = "run the benchmark again without changing the request"


def asked(record: Record, say: Scribe) -> None:
    """Seed and steps of every sample are the lock's; timing, driver and each worker agree on them."""
    request, warmup = record.target.request, record.target.warmup
    for arm in record.arms.values():
        for sample, timing in arm.timings.items():
            where = f"{arm.folder}sample-{sample}/timing.json"
            wanted = warmup if timing.phase == "warmup" else request
            if timing.sample != sample:
                say.invalid(f"it says sample {timing.sample}", AS_WRITTEN, where)
            for name in ("seed", "num_inference_steps"):
                if getattr(timing, name) != getattr(wanted, name):
                    say.fail(f"{name} {getattr(timing, name)}; needed: {getattr(wanted, name)}", RERUN, where)
            _starts_agree(say, arm, sample, timing)
        _warmup_first(say, arm)
    say.conclude(
        f"measured with seed {request.seed}, {request.num_inference_steps} steps; "
        f"warmed up with seed {warmup.seed}, {warmup.num_inference_steps} steps"
    )


def _starts_agree(say: Scribe, arm: ArmEvidence, sample: int, timing: Timing) -> None:
    for rank in arm.events:
        starts = of_sample(arm, rank, sample, RequestStart)
        sources = sorted(start.source for start in starts)
        if sources != (["driver", "worker"] if rank == 0 else ["worker"]):
            say.invalid(
                f"sample {sample} was started by {', '.join(sources) or 'nobody'}", AS_WRITTEN, _file(arm, rank)
            )
        for start in starts:
            names = ("phase", "seed", "num_inference_steps")
            if any(getattr(start, name) != getattr(timing, name) for name in names):
                say.invalid(
                    f"the {start.source} ran sample {sample} otherwise than timing.json says",
                    AS_WRITTEN,
                    _file(arm, rank),
                )


def _warmup_first(say: Scribe, arm: ArmEvidence) -> None:
    for session in arm.sessions:
        phases = [event.phase for event in session if isinstance(event, RequestStart) and event.source == "driver"]
        if phases and (phases[0] != "warmup" or "warmup" in phases[1:]):
            say.invalid("a process of the arm did not begin with its one warm-up", AS_WRITTEN, _file(arm, 0))


def _file(arm: ArmEvidence, rank: int) -> str:
    return f"{arm.folder}events-rank{rank}.jsonl"


def forwards(record: Record, say: Scribe) -> None:
    """Every rank ran each forward once, in order, as many as the steps ask for, and no timestep falls."""
    for arm in record.arms.values():
        for sample, timing in arm.timings.items():
            wanted = timing.num_inference_steps - 1  # the sigma grid ends in 0
            for rank in arm.events:
                steps = of_sample(arm, rank, sample, Step)
                where = _file(arm, rank)
                if [event.step for event in steps] != list(range(wanted)):
                    say.fail(f"sample {sample}: {len(steps)} forwards; needed: 0..{wanted - 1} in order", RERUN, where)
                ends = [event for event in of_sample(arm, rank, sample, RequestEnd) if event.source == "worker"]
                if [event.forwards for event in ends] != [len(steps)]:
                    say.invalid(
                        f"sample {sample}: the worker's end does not count its {len(steps)} forwards", AS_WRITTEN, where
                    )
                times = [event.timestep for event in steps]
                if any(later < earlier - 1e-6 for earlier, later in zip(times, times[1:], strict=False)):
                    say.fail(
                        f"sample {sample}: a timestep falls", "two requests may have run into one; run again", where
                    )
    say.conclude(f"{record.target.request.forwards} forwards a measured sample")


def layout(record: Record, say: Scribe) -> None:
    """The packed document is text, condition, audio, video without a gap; sink and dense rows are the policy's; all
    agree.
    """
    policy = record.target.sol_attn
    seen = set()
    for arm in record.arms.values():
        for rank in arm.events:
            found = {event.sample: event for event in arm.of(rank, Layout)}
            for sample in arm.timings:
                where = _file(arm, rank)
                if sample not in found:
                    say.invalid(f"sample {sample} has no layout", AS_WRITTEN, where)
                    continue
                event = found[sample]
                seen.add(event.model_dump_json(exclude={"t", "seq", "sample"}))
                fault = _tiling(event)
                if fault:
                    say.invalid(f"sample {sample}: {fault}", AS_WRITTEN, where)
                for name, span in (("sink", policy.sink), ("dense_rows", policy.dense_rows)):
                    if getattr(event, name) != _span(event, span):
                        say.fail(f"sample {sample}: {name} {getattr(event, name)}; policy {span!r}", RERUN, where)
    if len(seen) > 1:
        say.fail(f"{len(seen)} different layouts in one record", "one prompt and one size give one layout", "arms/")
    say.conclude("one layout, without gaps, with the policy's sink and dense rows")


def _tiling(event: Layout) -> str:
    position = 0
    for name in ("text", "condition", "audio", "video"):
        span = getattr(event, name)
        if span is not None:
            if span[0] != position or span[1] < span[0]:
                return f"{name} {span} does not follow row {position}"
            position = span[1]
    if position != event.live_tokens or event.live_tokens > event.total_tokens:
        return f"the parts end at row {position} of {event.live_tokens} live and {event.total_tokens} rows"
    if event.cu_seqlens[:2] != (0, event.live_tokens):
        return f"segments {event.cu_seqlens} do not begin with the live rows"
    return ""


def _span(event: Layout, span: Span) -> tuple[int, int]:
    return {"prefix": (0, event.video[0]), "text": event.text, "none": (0, 0)}[span]
