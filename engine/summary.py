"""benchmark.json from the raw files of a record. The judging side derives the same with code of its own and
compares."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config.lock import Lock
from config.record import (
    ENVIRONMENT,
    LOCK,
    ArmResult,
    Benchmark,
    CacheCounts,
    Density,
    Environment,
    GateReport,
    GateSummary,
    LatentDistance,
    Latents,
    LatentTensor,
    Outcome,
    Ratio,
    SampleResult,
    Series,
    TensorDistance,
    Timing,
)
from config.schema import ARMS, ArmName

Events = list[dict[str, Any]]
RATIOS: tuple[tuple[ArmName, ArmName], ...] = (
    *((arm, "dense") for arm in ARMS if arm != "dense"),
    ("cache", "lossless"),
    ("fullopt", "lossless"),
    ("fullopt", "cache"),
)
"""(arm, baseline): every arm over dense, and the published steps between the controlled arms."""


def summarise(record: Path) -> Benchmark:
    """Derive benchmark.json.

    Raises:
        OSError, pydantic.ValidationError: a file of the record is absent or not of its model.
    """
    lock = Lock.model_validate_json((record / LOCK).read_bytes())
    environment = Environment.model_validate_json((record / ENVIRONMENT).read_bytes())
    folders = {arm: record / "arms" / arm for arm in ARMS if (record / "arms" / arm).is_dir()}
    arms = {arm: summarise_arm(folder) for arm, folder in folders.items()}
    return Benchmark(
        target=lock.target,
        lock_digest=lock.digest,
        locked=lock.digest == lock.base_digest and not environment.differences,
        weights=environment.checkpoint.kind,
        arms=arms,
        ratios=tuple(ratios(arms)),
        latents=tuple(latent_distances({arm: latents_of(folder, arms[arm]) for arm, folder in folders.items()})),
    )


def summarise_arm(folder: Path) -> ArmResult:
    """One arm from its events and timings."""
    by_rank = [read_events(path) for path in sorted(folder.glob("events-rank*.jsonl"))]
    events = by_rank[0] if by_rank else []
    ends = of_kind(events, "arm_end")
    outcome: Outcome = ends[-1]["outcome"] if ends else "aborted"
    reason = ends[-1]["reason"] if ends else "the events have no end"
    layouts, loads = of_kind(events, "layout"), of_kind(events, "load_end")
    numbers = sorted(int(path.parent.name.removeprefix("sample-")) for path in folder.glob("sample-*/timing.json"))
    gated_out = outcome == "gate_failed"
    peaks = {} if gated_out else nvml_peaks(folder, events)
    results = [] if gated_out else [summarise_sample(folder, number, by_rank, peaks.get(number)) for number in numbers]
    measured = [result for result in results if result.phase == "measured"]
    return ArmResult(
        outcome=outcome,
        reason=reason,
        live_tokens=layouts[0]["live_tokens"] if layouts else None,
        prefix_tokens=layouts[0]["video"][0] if layouts else None,
        load_seconds=loads[0]["seconds"] if loads else None,
        gate=summarise_gate(folder),
        warmup=next((result for result in results if result.phase == "warmup"), None),
        samples=tuple(measured),
        seconds=series(result.seconds for result in measured),
        denoise_seconds=series(result.denoise_seconds for result in measured),
    )


def summarise_gate(folder: Path) -> GateSummary | None:
    """The worst of each statistic over all gates of the arm."""
    reports = [GateReport.model_validate_json(path.read_bytes()) for path in sorted(folder.rglob("gate-rank*.json"))]
    if not reports:
        return None
    return GateSummary(
        passed=all(report.passed for report in reports),
        ranks=len({report.rank for report in reports}),
        max_abs=max(report.against_sdpa.max_abs for report in reports),
        mean_abs=max(report.against_sdpa.mean_abs for report in reports),
        rel_l2=max(report.against_sdpa.rel_l2 for report in reports),
    )


def summarise_sample(folder: Path, number: int, by_rank: Sequence[Events], peak_nvml_mib: float | None) -> SampleResult:
    """One finished sample."""
    timing = Timing.model_validate_json((folder / f"sample-{number}" / "timing.json").read_bytes())
    every = [event for events in by_rank for event in events if event.get("sample") == number]
    rank0 = [event for event in by_rank[0] if event.get("sample") == number]
    ends = [event for event in of_kind(rank0, "request_end") if event["source"] == "worker"]
    steps, memory = of_kind(rank0, "step"), of_kind(every, "memory")
    attention = of_kind(every, "attention")
    sparse = [event for event in attention if event["mode"] == "sparse"]
    return SampleResult(
        sample=number,
        phase=timing.phase,
        seed=timing.seed,
        seconds=timing.seconds,
        denoise_seconds=ends[-1]["seconds"],
        forwards=ends[-1]["forwards"],
        step_seconds=tuple(event["seconds"] for event in steps),
        sparse_forwards=len({event["step"] for event in sparse}),
        dense_backends=names(event for event in attention if event["mode"] == "dense"),
        sparse_backends=names(sparse),
        cache=cache_counts(of_kind(rank0, "cache_decision")),
        density=density(sparse),
        file_sha256=timing.media.file_sha256 if timing.media else None,
        frames_sha256=timing.media.frames_sha256 if timing.media else None,
        video_sha256=timing.output.video.sha256 if timing.output else None,
        audio_sha256=timing.output.audio.sha256 if timing.output else None,
        unmuxed=timing.output.reason if timing.output else "",
        peak_rss_mib=max(event["rss_mib"] for event in memory),
        peak_reserved_mib=max(event["reserved_mib"] for event in memory),
        peak_nvml_mib=peak_nvml_mib,
    )


def nvml_peaks(folder: Path, events: Events) -> dict[int, float]:
    """By sample number, the most memory in use that NVML saw on any GPU during a request, MiB."""
    clock, begun, spans = None, dict[int, float](), dict[int, tuple[float, float]]()
    for event in events:
        if event["source"] != "driver":
            continue
        if event["event"] == "arm_start":
            clock = event["clock"]
        elif event["event"] == "request_start" and clock is not None:
            begun[event["sample"]] = clock + event["t"]
        elif event["event"] == "request_end" and event["sample"] in begun:
            spans[event["sample"]] = (begun[event["sample"]], clock + event["t"])
    out: dict[int, float] = {}
    for path in sorted(folder.glob("telemetry-gpu*.jsonl")):
        before, session_clock = 0.0, 0.0
        for line in read_events(path):
            if line["event"] == "telemetry_start":
                session_clock = line["clock"]
                before = session_clock
            elif line["event"] == "gpu_sample":
                now = session_clock + line["t"]
                for number, (begin, end) in spans.items():
                    # The look that covers the request's last moments comes after its end; the one before it did not.
                    if begin < now and before < end:
                        out[number] = max(out.get(number, 0.0), line["memory_peak_mib"])
                before = now
    return out


def cache_counts(decisions: Events) -> CacheCounts | None:
    """Counts of compute and reuse; none where no cache decided."""
    if not decisions:
        return None
    pattern = "".join("C" if event["action"] == "compute" else "R" for event in decisions)
    reuse = pattern.count("R")
    return CacheCounts(
        calls=len(pattern), compute=len(pattern) - reuse, reuse=reuse, reuse_rate=reuse / len(pattern), pattern=pattern
    )


def density(sparse: Events) -> Density | None:
    """Exact density of each sparse call: routed blocks over all ranks' heads, divided by heads times blocks squared."""
    calls: dict[tuple[int, int], tuple[int, int]] = {}
    for event in sparse:
        for layer in event["layers"]:
            routed, total = calls.get((event["step"], layer), (0, 0))
            heads = len(event["routed"])
            calls[event["step"], layer] = (routed + sum(event["routed"]), total + heads * event["blocks"] ** 2)
    if not calls:
        return None
    values = [routed / total for _, (routed, total) in sorted(calls.items())]
    return Density(
        calls=len(values), first=values[0], mean=statistics.fmean(values), minimum=min(values), maximum=max(values)
    )


def ratios(arms: dict[ArmName, ArmResult]) -> Iterable[Ratio]:
    """Ratios of medians, where both arms are complete and measured."""
    for arm, baseline in RATIOS:
        if arm not in arms or baseline not in arms:
            continue
        ours, theirs = arms[arm], arms[baseline]
        if ours.outcome != "complete" or theirs.outcome != "complete":
            continue
        if ours.seconds and theirs.seconds and ours.denoise_seconds and theirs.denoise_seconds:
            yield Ratio(
                arm=arm,
                baseline=baseline,
                seconds=theirs.seconds.median / ours.seconds.median,
                denoise_seconds=theirs.denoise_seconds.median / ours.denoise_seconds.median,
            )


class SampleLatents(NamedTuple):
    """What the loop of a measured sample left, and what it was asked for."""

    sample: int
    asked: tuple[int, int]
    latents: Latents


def latents_of(folder: Path, arm: ArmResult) -> list[SampleLatents]:
    """The latents of an arm's measured samples, in order; samples that told none are left out."""
    path = folder / "events-rank0.jsonl"
    events = of_kind(read_events(path), "latents") if arm.samples else []
    told = {event["sample"]: event for event in events}
    out = []
    for number in (result.sample for result in arm.samples if result.sample in told):
        timing = Timing.model_validate_json((folder / f"sample-{number}" / "timing.json").read_bytes())
        latents = Latents.model_validate(told[number])
        out.append(SampleLatents(number, (timing.seed, timing.num_inference_steps), latents))
    return out


def latent_distances(left: dict[ArmName, list[SampleLatents]]) -> Iterable[LatentDistance]:
    """How far each sample is from the first one of a baseline that was asked for the same."""
    for arm, baseline in RATIOS:
        first: dict[tuple[int, int], SampleLatents] = {}
        for sample in left.get(baseline, []):
            first.setdefault(sample.asked, sample)
        for ours in left.get(arm, []):
            if (theirs := first.get(ours.asked)) is not None:
                yield LatentDistance(
                    arm=arm,
                    sample=ours.sample,
                    baseline=baseline,
                    baseline_sample=theirs.sample,
                    video=tensor_distance(ours.latents.video, theirs.latents.video),
                    audio=tensor_distance(ours.latents.audio, theirs.latents.audio),
                )


def tensor_distance(ours: LatentTensor, theirs: LatentTensor) -> TensorDistance:
    """Equality by digest, the sampled relative L2 error, and the exact ratio of the norms."""
    rel_l2 = norm_ratio = None
    with np.errstate(all="ignore"):  # what is not a number is said to be none
        if ours.shape == theirs.shape and len(ours.values) == len(theirs.values):
            x, y = (np.array(tensor.values, np.float64) for tensor in (ours, theirs))  # null becomes NaN
            rel_l2 = finite(np.linalg.norm(x - y) / np.linalg.norm(y))
        if ours.not_finite == theirs.not_finite == 0 and ours.sum_squares > 0:
            norm_ratio = finite(np.sqrt(ours.sum_squares) / np.sqrt(theirs.sum_squares))
    return TensorDistance(
        equal=(ours.shape, ours.dtype, ours.sha256) == (theirs.shape, theirs.dtype, theirs.sha256),
        rel_l2=rel_l2,
        norm_ratio=norm_ratio,
        sampled=len(ours.values),
        elements=math.prod(ours.shape),
    )


def finite(value: Any) -> float | None:
    """A number, or none where it is not finite."""
    return float(value) if np.isfinite(value) else None


def series(values: Iterable[float]) -> Series | None:
    """All values and what follows from them; none of none."""
    numbers = tuple(values)
    if not numbers:
        return None
    return Series(
        values=numbers,
        n=len(numbers),
        median=statistics.median(numbers),
        mean=statistics.fmean(numbers),
        minimum=min(numbers),
        maximum=max(numbers),
        stdev=statistics.stdev(numbers) if len(numbers) > 1 else None,
    )


def names(events: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """The backends of some attention events, sorted, each once."""
    return tuple(sorted({event["backend"] for event in events}))


def of_kind(events: Iterable[dict[str, Any]], kind: str) -> Events:
    """The events of one kind, in order."""
    return [event for event in events if event["event"] == kind]


def read_events(path: Path) -> Events:
    """All whole lines of an events file."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
