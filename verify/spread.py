"""What the choice of a replayed list is worth: a record's own forward times, summed over other lists of the same count.

How many forwards a published cache computed is known; which ones is not. The first `sol_attn.dense_steps` forwards are
dense where they are computed, later ones sparse and cheaper: of two lists of one count, the earlier is the slower. This
sums, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

from config.errors import InvalidRecord
from config.record import ArmResult, Benchmark
from config.schema import ARMS, ArmName, FirstBlockCache, Target, TeaCache
from verify.reader import MAX_FORWARDS

Kind = Literal["dense", "sparse", "reused"]
KINDS: tuple[Kind, ...] = ("dense", "sparse", "reused")


@dataclass(frozen=True)
class Pattern:
    """One list of computed forwards and what it takes.

    counts: forwards of each kind. seconds: of the denoising loop, by the medians of the record; None where the record
    measured no forward of a kind that the list needs. ratio: the baseline's denoising seconds over these; None also
    without a baseline.
    """

    name: str
    steps: tuple[int, ...]
    counts: dict[Kind, int]
    seconds: float | None
    ratio: float | None


@dataclass(frozen=True)
class Spread:
    """A cached arm of a record: its median forward of each kind in seconds (kinds that it ran), the seconds of its loop
    outside the forwards, and the list that it ran between the earliest and the latest of that count.
    """

    arm: ArmName
    forwards: int
    forward_seconds: dict[Kind, float]
    rest_seconds: float
    patterns: tuple[Pattern, ...]


def spreads(benchmark: Benchmark, target: Target) -> Iterator[Spread]:
    """The spread of each complete arm whose cache replayed a list, in the order of the arms; none without a list.

    Args:
        benchmark: of the record.
        target: the record's lock, resolved.

    Raises:
        InvalidRecord: the lock has more forwards than any request.
    """
    listed = target.cache.replay
    if target.request.forwards > MAX_FORWARDS:
        raise InvalidRecord(
            f"the lock has {target.request.forwards} forwards; any request has at most {MAX_FORWARDS}",
            remedy="ask for the record as it was written",
        )
    dense = benchmark.arms.get("dense")
    base = dense.denoise_seconds.median if dense and dense.outcome == "complete" and dense.denoise_seconds else None
    for name in (name for name in ARMS if name in benchmark.arms):
        arm = benchmark.arms[name]
        policy = target.arms.get(name)
        if listed and policy and policy.cache and arm.outcome == "complete" and arm.samples:
            yield _spread(name, arm, target, base)


def possible(cache: TeaCache | FirstBlockCache, forwards: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The earliest and the latest list of `count` forwards that the cache could have computed.

    Both hold what the cache computes by its own rules: TeaCache its first `retain_steps` and last `cooldown_steps`,
    FirstBlockCache the first forward. Fewer than these are no list of the cache's; then the first alone is kept.
    """
    forced = {0}
    if isinstance(cache, TeaCache):
        forced |= {step for step in range(forwards) if step < cache.retain_steps}
        forced |= {step for step in range(forwards) if step >= forwards - cache.cooldown_steps}
    if len(forced) > count:
        forced = {0}
    free = [step for step in range(forwards) if step not in forced]
    more = count - len(forced)
    return tuple(sorted({*forced, *free[:more]})), tuple(sorted({*forced, *free[len(free) - more :]}))


def _spread(name: ArmName, arm: ArmResult, target: Target, base: float | None) -> Spread:
    forwards = target.request.forwards
    sparse_from = target.sol_attn.dense_steps if target.arms[name].sparse != "none" else forwards
    seconds: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    for sample in arm.samples:
        for step, (taken, action) in enumerate(
            zip(sample.step_seconds, sample.cache.pattern if sample.cache else "", strict=False)
        ):
            seconds[_kind(step, action == "C", sparse_from)].append(taken)
    typical = {kind: median(values) for kind, values in seconds.items() if values}
    rest = median(sample.denoise_seconds - sum(sample.step_seconds) for sample in arm.samples)
    listed = target.cache.replay
    earliest, latest = possible(target.cache, forwards, len(listed))
    patterns = []
    for what, steps in (("earliest", earliest), ("as run", listed), ("latest", latest)):
        kinds = [_kind(step, step in steps, sparse_from) for step in range(forwards)]
        counts = {kind: kinds.count(kind) for kind in KINDS}
        known = all(kind in typical for kind in set(kinds))
        loop = rest + sum(typical[kind] for kind in kinds) if known else None
        ratio = base / loop if base is not None and loop else None
        patterns.append(Pattern(what, steps, counts, loop, ratio))
    return Spread(name, forwards, typical, rest, tuple(patterns))


def _kind(step: int, computed: bool, sparse_from: int) -> Kind:
    if not computed:
        return "reused"
    return "dense" if step < sparse_from else "sparse"
