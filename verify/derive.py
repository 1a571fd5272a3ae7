"""The second derivation of benchmark.json: every figure of it, from the raw files alone.

The rules are the docstrings of `config.record` (SampleResult, Density, ArmResult, Ratio, ...); the side that ran
derives the same figures with code of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median, stdev
from typing import Any

from config.record import (
    ArmResult,
    ArmStart,
    Attention,
    Benchmark,
    CacheCounts,
    CacheDecision,
    Density,
    GateSummary,
    LatentDistance,
    Latents,
    LatentTensor,
    Layout,
    LoadEnd,
    Memory,
    Ratio,
    RequestEnd,
    RequestStart,
    SampleResult,
    Series,
    Step,
    TensorDistance,
)
from config.schema import ARMS, ArmName
from config.telemetry import TELEMETRY, GpuSample, TelemetryStart
from verify.files import Files
from verify.reader import ArmEvidence, Record
from verify.strictjson import parse, validate

CONTROLLED: tuple[tuple[ArmName, ArmName], ...] = (("cache", "lossless"), ("fullopt", "lossless"), ("fullopt", "cache"))
"""Ratios beside those over `dense`: the published controlled arms."""
PAIRS = (*((arm, ARMS[0]) for arm in ARMS[1:]), *CONTROLLED)
RELATIVE = 1e-9


def derive(record: Record) -> Benchmark:
    """benchmark.json as the raw files give it."""
    arms = {name: derive_arm(arm, record.files) for name, arm in record.arms.items()}
    return Benchmark(
        target=record.lock.target,
        lock_digest=record.lock.digest,
        locked=not record.open,
        weights=record.environment.checkpoint.kind,
        arms=arms,
        ratios=tuple(_ratios(arms)),
        latents=tuple(_latents(record, arms)),
    )


def derive_arm(arm: ArmEvidence, files: Files) -> ArmResult:
    """One arm's results. `files`: the record's, for the telemetry of the arm."""
    end = arm.end
    outcome = end.outcome if end else "aborted"
    seen = _looks(arm, files) if outcome != "gate_failed" else []
    every = [_sample(arm, number, seen) for number in arm.timings] if outcome != "gate_failed" else []
    results = [result for result in every if result is not None]
    warmups = [result for result in results if result.phase == "warmup"]
    measured = tuple(result for result in results if result.phase == "measured")
    layouts = arm.of(0, Layout)
    loads = arm.of(0, LoadEnd)
    return ArmResult(
        outcome=outcome,
        reason=end.reason if end else "the events have no end",
        live_tokens=layouts[0].live_tokens if layouts else None,
        prefix_tokens=layouts[0].video[0] if layouts else None,
        load_seconds=loads[0].seconds if loads else None,
        gate=_gate(arm),
        warmup=warmups[0] if warmups else None,
        samples=measured,
        seconds=series([result.seconds for result in measured]),
        denoise_seconds=series([result.denoise_seconds for result in measured]),
    )


def denoise_seconds(arm: ArmEvidence, sample: int) -> float | None:
    """Seconds of the denoising loop: what rank 0's worker says at the end of the request."""
    ends = [event for event in of_sample(arm, 0, sample, RequestEnd) if event.source == "worker"]
    return ends[-1].seconds if ends else None


def of_sample(arm: ArmEvidence, rank: int, sample: int, *kinds: type[Any]) -> list[Any]:
    """A rank's events of these kinds within one sample."""
    return [event for event in arm.of(rank, *kinds) if event.sample == sample]


def series(values: Sequence[float]) -> Series | None:
    """The figures that follow from all values of one kind; None without values."""
    if not values:
        return None
    return Series(
        values=tuple(values),
        n=len(values),
        median=median(values),
        mean=fmean(values),
        minimum=min(values),
        maximum=max(values),
        stdev=stdev(values) if len(values) > 1 else None,
    )


def call_densities(arm: ArmEvidence, sample: int) -> list[float]:
    """Density of each sparse call of a sample in the order (step, layer): routed blocks of all ranks' heads over
    heads x blocks^2.
    """
    totals: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in arm.events:
        for call in of_sample(arm, rank, sample, Attention):
            if call.mode == "sparse" and call.blocks > 0:
                for layer in call.layers:
                    routed, possible = totals.get((call.step, layer), (0, 0))
                    possible += len(call.routed) * call.blocks**2
                    totals[call.step, layer] = (routed + sum(call.routed), possible)
    return [routed / possible for _, (routed, possible) in sorted(totals.items()) if possible]


def _looks(arm: ArmEvidence, files: Files) -> list[list[tuple[float, float]]]:
    """A list for each session of each GPU: the machine's clock at its start, with 0 MiB, and at each look, with the
    most memory in use since the one before.
    """
    sessions: list[list[tuple[float, float]]] = []
    for name in files:
        if name.startswith(f"{arm.folder}telemetry-gpu"):
            zero = 0.0
            for number, data in enumerate(files.read(name).split(b"\n")[:-1], 1):
                line = validate(TELEMETRY, parse(data, f"{name}, line {number}"), f"{name}, line {number}")
                if isinstance(line, TelemetryStart):
                    zero = line.clock
                    sessions.append([(zero, 0.0)])
                elif isinstance(line, GpuSample) and sessions:
                    sessions[-1].append((zero + line.t, line.memory_peak_mib))
    return sessions


def _span(arm: ArmEvidence, sample: int) -> tuple[float, float] | None:
    """When a request began and ended on the machine's clock, by the driver."""
    for session in arm.sessions:
        own = [event for event in session if event.source == "driver"]
        clocks = [event.clock for event in own if isinstance(event, ArmStart) and event.clock is not None]
        begins = [event.t for event in own if isinstance(event, RequestStart) and event.sample == sample]
        ends = [event.t for event in own if isinstance(event, RequestEnd) and event.sample == sample]
        if clocks and begins and ends:
            return clocks[-1] + begins[-1], clocks[-1] + ends[-1]
    return None


def _nvml_peak(span: tuple[float, float] | None, sessions: list[list[tuple[float, float]]]) -> float | None:
    """The largest look of a request: those after its beginning up to the first at or after its end."""
    if span is None:
        return None
    begin, end = span
    found = [
        peak
        for looks in sessions
        for (before, _), (when, peak) in itertools.pairwise(looks)
        if when > begin and before < end
    ]
    return max(found, default=None)


def _sample(arm: ArmEvidence, sample: int, looks: list[list[tuple[float, float]]]) -> SampleResult | None:
    timing, denoise = arm.timings[sample], denoise_seconds(arm, sample)
    if denoise is None:
        return None
    steps = sorted(of_sample(arm, 0, sample, Step), key=lambda event: event.step)
    attention = [event for rank in arm.events for event in of_sample(arm, rank, sample, Attention)]
    memory = [event for rank in arm.events for event in of_sample(arm, rank, sample, Memory)]
    media, tensors = timing.media, timing.output
    return SampleResult(
        sample=sample,
        phase=timing.phase,
        seed=timing.seed,
        seconds=timing.seconds,
        denoise_seconds=denoise,
        forwards=len(steps),
        step_seconds=tuple(event.seconds for event in steps),
        sparse_forwards=len({event.step for event in attention if event.mode == "sparse"}),
        dense_backends=tuple(sorted({event.backend for event in attention if event.mode == "dense"})),
        sparse_backends=tuple(sorted({event.backend for event in attention if event.mode == "sparse"})),
        cache=_cache(of_sample(arm, 0, sample, CacheDecision)),
        density=_density(call_densities(arm, sample)),
        file_sha256=media.file_sha256 if media else None,
        frames_sha256=media.frames_sha256 if media else None,
        video_sha256=tensors.video.sha256 if tensors else None,
        audio_sha256=tensors.audio.sha256 if tensors else None,
        unmuxed=tensors.reason if tensors else "",
        peak_rss_mib=max((event.rss_mib for event in memory), default=0.0),
        peak_reserved_mib=max((event.reserved_mib for event in memory), default=0.0),
        peak_nvml_mib=_nvml_peak(_span(arm, sample), looks),
    )


def _cache(decisions: list[CacheDecision]) -> CacheCounts | None:
    if not decisions:
        return None
    pattern = "".join(
        "C" if decision.action == "compute" else "R" for decision in sorted(decisions, key=lambda event: event.step)
    )
    reuse = pattern.count("R")
    return CacheCounts(
        calls=len(pattern),
        compute=len(pattern) - reuse,
        reuse=reuse,
        reuse_rate=reuse / len(pattern),
        pattern=pattern,
    )


def _density(densities: list[float]) -> Density | None:
    if not densities:
        return None
    return Density(
        calls=len(densities),
        first=densities[0],
        mean=fmean(densities),
        minimum=min(densities),
        maximum=max(densities),
    )


def _gate(arm: ArmEvidence) -> GateSummary | None:
    reports = list(arm.gates.values())
    if not reports:
        return None
    return GateSummary(
        passed=all(report.passed for report in reports),
        ranks=len({report.rank for report in reports}),
        max_abs=max(report.against_sdpa.max_abs for report in reports),
        mean_abs=max(report.against_sdpa.mean_abs for report in reports),
        rel_l2=max(report.against_sdpa.rel_l2 for report in reports),
    )


def _ratios(arms: dict[ArmName, ArmResult]) -> Iterator[Ratio]:
    for arm, baseline in PAIRS:
        ours, base = arms.get(arm), arms.get(baseline)
        if not (ours and base and ours.outcome == base.outcome == "complete"):
            continue
        if ours.seconds and base.seconds and ours.denoise_seconds and base.denoise_seconds:
            if min(ours.seconds.median, ours.denoise_seconds.median) > 0:
                yield Ratio(
                    arm=arm,
                    baseline=baseline,
                    seconds=base.seconds.median / ours.seconds.median,
                    denoise_seconds=base.denoise_seconds.median / ours.denoise_seconds.median,
                )


def _latents(record: Record, results: dict[ArmName, ArmResult]) -> Iterator[LatentDistance]:
    for arm, baseline in PAIRS:
        if arm in results and baseline in results:
            bases = _told(record.arms[baseline], results[baseline])
            for sample, request, latents in _told(record.arms[arm], results[arm]):
                match = next(((number, base) for number, asked, base in bases if asked == request), None)
                if match is not None:
                    yield LatentDistance(
                        arm=arm,
                        sample=sample,
                        baseline=baseline,
                        baseline_sample=match[0],
                        video=tensor_distance(latents.video, match[1].video),
                        audio=tensor_distance(latents.audio, match[1].audio),
                    )


def _told(arm: ArmEvidence, result: ArmResult) -> list[tuple[int, tuple[int, int], Latents]]:
    """Number, request and latents of each measured sample that told them."""
    out = []
    for sample in result.samples:
        events, timing = of_sample(arm, 0, sample.sample, Latents), arm.timings[sample.sample]
        if events:
            out.append((sample.sample, (timing.seed, timing.num_inference_steps), events[-1]))
    return out


def tensor_distance(tensor: LatentTensor, base: LatentTensor) -> TensorDistance:
    """The rules of `TensorDistance`, with correctly rounded norms."""
    error: float | None = None
    ratio: float | None = None
    pairs = [(x, y) for x, y in zip(tensor.values, base.values, strict=False) if x is not None and y is not None]
    if tensor.shape == base.shape and len(pairs) == len(tensor.values) == len(base.values):
        size = math.hypot(*(y for _, y in pairs))
        error = math.hypot(*(x - y for x, y in pairs)) / size if size else None
    if not (tensor.not_finite or base.not_finite) and tensor.sum_squares and base.sum_squares:
        ratio = math.sqrt(tensor.sum_squares) / math.sqrt(base.sum_squares)
    return TensorDistance(
        equal=all(getattr(tensor, key) == getattr(base, key) for key in ("sha256", "dtype", "shape")),
        rel_l2=None if error is None or not math.isfinite(error) else error,
        norm_ratio=None if ratio is None or not math.isfinite(ratio) else ratio,
        sampled=len(tensor.values),
        elements=math.prod(tensor.shape),
    )


def differences(found: Any, derived: Any, place: str = "") -> Iterator[str]:
    """Where two JSON values differ, one sentence each; floats may differ by 1e-9 of their size, nothing else may."""
    if isinstance(found, dict) and isinstance(derived, dict):
        for key in sorted({*found, *derived}):
            yield from differences(found.get(key), derived.get(key), f"{place}.{key}" if place else str(key))
    elif isinstance(found, list) and isinstance(derived, list) and len(found) == len(derived):
        for index, (left, right) in enumerate(zip(found, derived, strict=True)):
            yield from differences(left, right, f"{place}[{index}]")
    elif isinstance(found, float) and isinstance(derived, float):
        if not math.isclose(found, derived, rel_tol=RELATIVE, abs_tol=0.0):
            yield f"{place} is {found!r}, the raw files give {derived!r}"
    elif found != derived:
        yield f"{place} is {found!r}, the raw files give {derived!r}"
