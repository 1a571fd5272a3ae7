"""What a record's forwards and stages took, beside their floors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean, median

from config.record import Attention, CacheDecision, OffloadLoads, RequestStart, Step
from config.record import Layout as LayoutEvent
from config.record import Stage as StageEvent
from config.schema import ArmName
from verify.derive import denoise_seconds, of_sample
from verify.reader import ArmEvidence, Record
from verify.roofline.dit import Cache, Model
from verify.roofline.plan import Assumed, Plan, plan_of
from verify.roofline.work import HALF, Stage, floor

TEXT_STAGE, DECODE_STAGE = "MiniMaxH3TextEncodingStage", "MiniMaxH3DecodingStage"
"""SGLang's stages that have a floor beside denoising; decoding is video and audio."""


@dataclass(frozen=True)
class Reached:
    """All measured pieces of one kind in one arm.

    count: how many. seconds: their median. flops: of one GPU, of the median piece's floor. floor_seconds: mean. share:
    sum of the floors over sum of the seconds. Both are None without ceilings. tflops: of one GPU, achieved. density:
    mean over the sparse calls of all these forwards; None where there were none.
    """

    kind: str
    count: int
    seconds: float
    flops: float
    tflops: float
    floor_seconds: float | None
    share: float | None
    density: float | None = None


@dataclass(frozen=True)
class Loads:
    """Layers of the DiT that one request fetched over PCIe, as counted in the run, and their bytes."""

    sample: int
    layers: int
    bytes: int


@dataclass(frozen=True)
class ArmReached:
    """One arm of a record."""

    arm: ArmName
    samples: int
    kinds: tuple[Reached, ...]
    loads: tuple[Loads, ...]


@dataclass(frozen=True)
class _Piece:
    kind: str
    stages: tuple[Stage, ...]
    seconds: float
    densities: tuple[float, ...] = ()


def plan_of_record(record: Record, *, density: float | None = None, computed: int | None = None) -> Plan:
    """The plan of a record's own lock: GPU, document, mean density and computed forwards as its runs found them, the
    last two unless they are given.

    Raises:
        UsageError: no run of it has begun and the prompt's tokens are not known, or a figure is out of its range.
    """
    layouts = [event for arm in record.arms.values() for event in arm.of(0, LayoutEvent)]
    gpus = record.environment.gpus
    plan = plan_of(
        record.target,
        gpu=gpus[0].name if gpus else "",
        layout=layouts[0] if layouts else None,
        density=density,
        computed=computed,
    )
    if density is None and (seen := _seen_density(record)):
        plan = replace(plan, density=seen)
    if computed is None and (counted := _seen_count(record)):
        plan = replace(plan, computed=counted)
    return plan


def measured_samples(arm: ArmEvidence) -> list[int]:
    """Samples of an arm that began and were no warm-up."""
    return sorted({event.sample for event in arm.of(0, RequestStart) if event.phase == "measured"})


def _seen_density(record: Record) -> Assumed | None:
    for arm in record.arms.values():
        calls = [
            density
            for sample in measured_samples(arm)
            for layers in layer_densities(arm, sample).values()
            for density in layers.values()
        ]
        if calls:
            return Assumed(fmean(calls), f"measured, mean of {len(calls)} calls of arm {arm.name}")
    return None


def _seen_count(record: Record) -> Assumed | None:
    for arm in record.arms.values():
        for sample in measured_samples(arm):
            decisions = of_sample(arm, 0, sample, CacheDecision)
            if len(decisions) == record.target.request.forwards:
                steps = tuple(sorted(event.step for event in decisions if event.action == "compute"))
                return Assumed(len(steps), f"measured, arm {arm.name}, sample {sample}", steps)
    return None


def reached(record: Record, plan: Plan) -> list[ArmReached]:
    """Every arm of a record with measured samples."""
    found = []
    for arm in record.arms.values():
        samples = measured_samples(arm)
        pieces = [piece for sample in samples for piece in _pieces(record, plan, arm, sample)]
        kinds = list(dict.fromkeys(piece.kind for piece in pieces))
        found.append(
            ArmReached(
                arm=arm.name,
                samples=len(samples),
                kinds=tuple(_reached(plan, kind, [piece for piece in pieces if piece.kind == kind]) for kind in kinds),
                loads=tuple(entry for sample in samples for entry in _loads(plan, arm, sample)),
            )
        )
    return found


def _reached(plan: Plan, kind: str, pieces: list[_Piece]) -> Reached:
    seconds = [piece.seconds for piece in pieces]
    flops = math.fsum(stage.flops for piece in pieces for stage in piece.stages)
    floors, densities = None, [density for piece in pieces for density in piece.densities]
    if plan.ceilings is not None:
        floors = [math.fsum(floor(stage, plan.ceilings).seconds for stage in piece.stages) for piece in pieces]
    total = math.fsum(seconds)
    return Reached(
        kind=kind,
        count=len(pieces),
        seconds=median(seconds),
        flops=flops / len(pieces),
        tflops=flops / total / 1e12,
        floor_seconds=None if floors is None else fmean(floors),
        share=None if floors is None else math.fsum(floors) / total,
        density=fmean(densities) if densities else None,
    )


def _pieces(record: Record, plan: Plan, arm: ArmEvidence, sample: int) -> Iterator[_Piece]:
    """The forwards of a sample, its denoising as a whole, and the stages beside it."""
    policy = record.lookup(arm)
    text, refiner = plan.before()
    forwards = list(_forwards(plan, arm, sample, cached=policy.cache))
    yield from forwards
    whole = denoise_seconds(arm, sample)
    if whole and whole > 0:  # a request that was cut has none
        yield _Piece("denoise", (refiner, *(stage for piece in forwards for stage in piece.stages)), whole)
    stages = {event.name: event.seconds for event in of_sample(arm, 0, sample, StageEvent)}
    for name, parts in ((TEXT_STAGE, [text]), (DECODE_STAGE, plan.after(resident=policy.vae_resident))):
        if stages.get(name, 0.0) > 0:
            yield _Piece({TEXT_STAGE: "text encoding", DECODE_STAGE: "decode"}[name], tuple(parts), stages[name])


def _forwards(plan: Plan, arm: ArmEvidence, sample: int, *, cached: bool) -> Iterator[_Piece]:
    kind: Cache = plan.target.cache.kind
    cache = kind if cached else None
    layouts = of_sample(arm, 0, sample, LayoutEvent)
    model = plan_model(plan, layouts[0]) if layouts else plan.model
    reuses = {event.step for event in of_sample(arm, 0, sample, CacheDecision) if event.action == "reuse"}
    calls = layer_densities(arm, sample)
    for event in of_sample(arm, 0, sample, Step):
        if event.seconds <= 0:
            continue
        densities = tuple(calls.get(event.step, {}).values())
        if event.step in reuses:
            stage = model.reused(kind, fmean(densities) if densities else None)
            yield _Piece("forward, reused", (stage,), event.seconds, densities)
        elif densities:
            stage = model.forward(fmean(densities), len(densities), cache)
            yield _Piece("forward, sparse", (stage,), event.seconds, densities)
        else:
            yield _Piece("forward, dense", (model.forward(cache=cache),), event.seconds)


def plan_model(plan: Plan, layout: LayoutEvent) -> Model:
    """The DiT with the document of one sample."""
    return Model(plan.architecture.dit, plan.document.found(layout), plan.machine)


def layer_densities(arm: ArmEvidence, sample: int) -> dict[int, dict[int, float]]:
    """Density of each sparse call by forward and layer: routed blocks of all ranks' heads over heads x blocks^2."""
    sums: dict[int, dict[int, tuple[int, int]]] = {}
    for rank in arm.events:
        for call in of_sample(arm, rank, sample, Attention):
            if call.mode == "sparse" and call.blocks > 0:
                for layer in call.layers:
                    routed, possible = sums.setdefault(call.step, {}).get(layer, (0, 0))
                    more = len(call.routed) * call.blocks**2
                    sums[call.step][layer] = (routed + sum(call.routed), possible + more)
    return {
        step: {layer: routed / possible for layer, (routed, possible) in sorted(layers.items()) if possible}
        for step, layers in sums.items()
    }


def _loads(plan: Plan, arm: ArmEvidence, sample: int) -> Iterator[Loads]:
    layer = plan.architecture.dit.block_parameters * HALF
    for event in of_sample(arm, 0, sample, OffloadLoads):
        if "blocks" in event.loads:
            yield Loads(sample, event.loads["blocks"], event.loads["blocks"] * layer)
