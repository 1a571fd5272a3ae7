"""Does a record reproduce what was published? One verdict a claim, none of them better than the record allows."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from config.errors import UsageError
from config.lock import read_recipe, recipes_root
from config.published import Claim, published
from config.record import ArmResult, Benchmark, SampleResult
from verify.reader import Record
from verify.stats import Interval, interval, place, ratio_interval

Verdict = Literal["reproduced", "faster", "slower", "differs", "inconclusive", "not comparable", "not measured"]
OF_AN_ARM = ("live_tokens", "prefix_tokens", "gate.", "warmup.")
"""Metrics that an arm has once, however many requests were measured."""
RELATIVE = 1e-9
"""What two roundings of the same figure may differ by, beside the claim's own tolerance."""


@dataclass(frozen=True)
class ClaimVerdict:
    """What a record says about a claim.

    `differs` is for figures that are not a speed (a density, a count, a gate statistic, memory) and lie outside the
    tolerance. measured: the figure of the record that was compared, None when there is none. reason: one sentence, or
    empty.
    """

    claim: str
    verdict: Verdict
    another_stack: bool
    printed: str
    measured: float | None
    unit: str
    n: int
    reason: str

    @property
    def text(self) -> str:
        """The verdict in words, with its suffix."""
        judged = self.verdict not in ("not comparable", "not measured")
        return self.verdict + (" on another stack" if self.another_stack and judged else "")

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "text": self.text}


@dataclass(frozen=True)
class Figure:
    """A metric as the record has it: the figure to show, all values, and their interval where repeats matter."""

    shown: float
    values: tuple[float, ...]
    spread: Interval | None


def judge_claims(
    record: Record, benchmark: Benchmark, sound: bool, claims: Iterable[Claim] | None = None
) -> list[ClaimVerdict]:
    """Compare a record with every published claim about its target.

    Args:
        record: the record.
        benchmark: its figures, as they were derived again.
        sound: whether its own result is PASSED. Nothing of another record is compared.
        claims: instead of the shipped ones.
    """
    about = published().for_target(record.lock.target) if claims is None else claims
    reason = _incomparable(record, sound)
    return [_judge(claim, record, benchmark, reason) for claim in about]


def _incomparable(record: Record, sound: bool) -> str:
    if not sound:
        return "the record's own result is not PASSED"
    if record.open:
        return "the run is open: it differs from the target"
    if record.environment.checkpoint.kind != "hub":
        return "the weights are synthetic"
    return ""


def _judge(claim: Claim, record: Record, benchmark: Benchmark, incomparable: str) -> ClaimVerdict:
    figure = figure_of(claim, record, benchmark)
    stack = another_stack(claim, record)
    if figure is None:
        return _verdict(claim, "not measured", stack, None, f"no complete measurement of {claim.metric} in {claim.arm}")
    if incomparable:
        return _verdict(claim, "not comparable", stack, figure, incomparable)
    if claim.kind in ("time", "ratio"):
        return _judge_speed(claim, stack, figure, record.target.measure.min_samples)
    margin = claim.tolerance.margin(claim.value) + RELATIVE * abs(claim.value)
    low = float("-inf") if claim.relation == "at_most" else claim.value - margin
    outside = [value for value in figure.values if not low <= value <= claim.value + margin]
    if outside:
        return _verdict(claim, "differs", stack, figure, f"{outside[0]:g} is outside {claim.value:g} +- {margin:g}")
    # One request may contradict a claim; to reproduce it takes as many as for a time.
    needed = max(record.target.measure.min_samples, 2)
    if not claim.metric.startswith(OF_AN_ARM) and len(figure.values) < needed:
        return _verdict(claim, "inconclusive", stack, figure, f"n = {len(figure.values)}, at least {needed} needed")
    return _verdict(claim, "reproduced", stack, figure, "")


def _judge_speed(claim: Claim, stack: bool, figure: Figure, needed: int) -> ClaimVerdict:
    # One value has no interval, whatever a target's min_samples says.
    if figure.spread is None or len(figure.values) < needed:
        return _verdict(
            claim, "inconclusive", stack, figure, f"n = {len(figure.values)}, at least {max(needed, 2)} needed"
        )
    where = place(figure.spread, claim.value, claim.tolerance.margin(claim.value))
    shown = f"95 % interval {figure.spread.low:.4g} to {figure.spread.high:.4g}"
    if where == "overlaps":
        return _verdict(claim, "inconclusive", stack, figure, f"{shown} overlaps an end of the tolerance")
    faster = {"below": claim.kind == "time", "above": claim.kind == "ratio"}.get(where)
    if faster is None:
        return _verdict(claim, "reproduced", stack, figure, shown)
    if claim.relation == "at_most" and where == "below":
        return _verdict(claim, "reproduced", stack, figure, shown)
    return _verdict(claim, "faster" if faster else "slower", stack, figure, shown)


def _verdict(claim: Claim, verdict: Verdict, stack: bool, figure: Figure | None, reason: str) -> ClaimVerdict:
    return ClaimVerdict(
        claim=claim.id,
        verdict=verdict,
        another_stack=stack,
        printed=claim.printed,
        measured=figure.shown if figure else None,
        unit=claim.unit,
        n=len(figure.values) if figure else 0,
        reason=reason,
    )


def figure_of(claim: Claim, record: Record, benchmark: Benchmark) -> Figure | None:
    """The claim's metric in a record (the metrics are those of `config.published.METRICS`); None where it was not
    measured.
    """
    times = _sglang_seconds(record, benchmark)
    if claim.ratio is not None:
        return _ratio(times, *claim.ratio)
    arm = benchmark.arms.get(claim.arm)
    if arm is None or arm.outcome != "complete":
        return None
    if claim.metric == "seconds":
        values = times.get(claim.arm)
        return _figure(values, median(values)) if values else None
    if claim.metric in ("live_tokens", "prefix_tokens"):
        return _figure([_dig(arm, claim.metric)])
    if claim.metric.startswith("gate."):
        return _figure([_dig(arm, claim.metric)])
    if claim.metric.startswith("warmup."):
        return _figure([_dig(arm, claim.metric)])
    if claim.metric == "peak_memory_mib":
        peaks = [sample.peak_reserved_mib for sample in arm.samples]
        return _figure(peaks, max(peaks)) if peaks else None
    return _figure([_dig(sample, claim.metric) for sample in arm.samples])


def _dig(value: ArmResult | SampleResult, path: str) -> float | None:
    found: Any = value
    for name in path.split("."):
        found = getattr(found, name, None)
    return None if found is None else float(found)


def _figure(values: Sequence[float | None], shown: float | None = None) -> Figure | None:
    known = tuple(value for value in values if value is not None)
    if not known or len(known) < len(values):
        return None
    return Figure(known[0] if shown is None else shown, known, interval(known))


def _sglang_seconds(record: Record, benchmark: Benchmark) -> dict[str, list[float]]:
    """SGLang's own duration of every measured request of each complete arm that has them all, seconds.

    This is what the published `inference_time_s` is (docs/published-claims.md): it ends before pixels are copied,
    encoded and muxed, which the stopwatch around the whole request holds.
    """
    found: dict[str, list[float]] = {}
    for name, result in benchmark.arms.items():
        totals = [record.arms[name].timings[sample.sample].sglang_total_ms for sample in result.samples]
        known = [total / 1000 for total in totals if total is not None]
        if result.outcome == "complete" and known and len(known) == len(totals):
            found[name] = known
    return found


def _ratio(times: dict[str, list[float]], arm: str, baseline: str) -> Figure | None:
    ours, base = times.get(arm), times.get(baseline)
    if not ours or not base or min(ours) <= 0:
        return None
    mine, theirs = interval(ours), interval(base)
    spread = ratio_interval(theirs, mine) if mine and theirs and mine.low > 0 else None
    return Figure(median(base) / median(ours), tuple(ours if len(ours) <= len(base) else base), spread)


def another_stack(claim: Claim, record: Record) -> bool:
    """Whether CUDA, PyTorch, Triton or SGLang of the run differ from those of the claim."""
    environment, stack = record.environment, claim.stack
    triton = next((package.version for package in environment.packages if package.name == "triton"), "")
    versions = ((environment.cuda, stack.cuda), (environment.torch, stack.torch), (triton, stack.triton))
    if any(not _is_version(found, claimed) for found, claimed in versions):
        return True
    return _sglang_commit(record) != stack.sglang_commit


def _is_version(found: str, claimed: str) -> bool:
    """Whether a version is the claimed, maybe less precise one: 2.11.0+cu128 is 2.11, and is not 2.11.0+cu130."""
    if "+" in claimed:
        return found == claimed
    ours, theirs = found.partition("+")[0].split("."), claimed.split(".")
    return ours[: len(theirs)] == theirs


def _sglang_commit(record: Record) -> str:
    """The pinned commit, from our copy of the recipe that the run was made in; empty where we have none."""
    recipe = record.recipe
    try:
        if read_recipe(recipe.image).sha256 != recipe.sha256:
            return ""
        raw = tomllib.loads((recipes_root() / recipe.image / "image.toml").read_text("utf-8"))
    except (UsageError, OSError):
        return ""
    return str(raw.get("sglang", {}).get("commit", ""))
