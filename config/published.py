"""What others published about the targets: claims with source and tolerance, the arithmetic between them, and remarks.

The claims are not ours. `verify` compares a result with them; nothing else reads them.
"""

from __future__ import annotations

import math
import tomllib
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from config.lock import load_target, target_names
from config.schema import ArmName, GitSha, Name, Setting

FILE = Path(__file__).resolve().parent / "published.toml"
Kind = Literal["time", "ratio", "density", "count", "gate", "memory"]
Identifier = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$")]

METRICS: dict[str, tuple[Kind, str]] = {
    "seconds": ("time", "s"),
    "live_tokens": ("count", "tokens"),
    "prefix_tokens": ("count", "tokens"),
    "cache.calls": ("count", "forwards"),
    "cache.compute": ("count", "forwards"),
    "cache.reuse": ("count", "forwards"),
    "cache.reuse_rate": ("count", "share"),
    "sparse_forwards": ("count", "forwards"),
    "density.first": ("density", "share"),
    "density.mean": ("density", "share"),
    "warmup.density.first": ("density", "share"),
    "gate.max_abs": ("gate", "absolute"),
    "gate.mean_abs": ("gate", "absolute"),
    "gate.rel_l2": ("gate", "share"),
    "peak_memory_mib": ("memory", "MiB"),
}
"""Metric to kind and unit. Each is read from `config.record.ArmResult` of the claim's arm:

`live_tokens`, `prefix_tokens`: as they stand; `cache.*`, `sparse_forwards`, `density.*` and `peak_memory_mib` (the
record's `peak_reserved_mib`): of every measured sample; `warmup.density.first`: of the warm-up; `gate.*`: of the gate
summary (worst rank). `seconds` is not the record's series but SGLang's own duration of every measured request
(`config.record.Timing.sglang_total_ms`), which ends before the video is encoded: it is what was published. `ratio:A/B`
is how many times as fast arm A was as arm B: the median of B's over that of A's, of the same durations.
"""


class Stack(Setting):
    """The software on which a claim was measured."""

    cuda: str
    torch: str
    triton: str
    sglang_commit: GitSha


class Tolerance(Setting):
    """How far an observation may lie from a claim: the larger of a share of the value and an absolute amount."""

    relative: float = Field(ge=0)
    absolute: float = Field(ge=0)

    def margin(self, value: float) -> float:
        """The allowed distance from `value`, in its unit."""
        return max(self.relative * abs(value), self.absolute)


class Claim(Setting):
    """One published figure. `stack` and `tolerance` are filled in from the file's tables."""

    id: Identifier
    target: Name
    arm: ArmName
    metric: str
    kind: Kind
    value: float
    printed: str = Field(min_length=1, description="the figure as its source prints it")
    relation: Literal["equal", "at_most"] = "equal"
    origin: Literal["published", "derived"] = "published"
    tolerance: Tolerance
    source: str = Field(min_length=1)
    stack: Stack
    note: str = ""

    @property
    def unit(self) -> str:
        """Unit of `value`."""
        return "" if self.kind == "ratio" else METRICS[self.metric][1]

    @property
    def ratio(self) -> tuple[str, str] | None:
        """(arm, baseline) of a `ratio:A/B` metric."""
        if not self.metric.startswith("ratio:"):
            return None
        arm, _, baseline = self.metric.removeprefix("ratio:").partition("/")
        return arm, baseline

    @model_validator(mode="after")
    def _metric_is_known(self) -> Claim:
        if self.ratio is None and (self.metric not in METRICS or METRICS[self.metric][0] != self.kind):
            raise ValueError(f"{self.id}: metric {self.metric!r} is unknown or not of kind {self.kind!r}")
        if (self.ratio is not None) != (self.kind == "ratio"):
            raise ValueError(f"{self.id}: a ratio has a metric of the form ratio:ARM/BASELINE")
        if self.ratio is not None and self.ratio[0] != self.arm:
            raise ValueError(f"{self.id}: the arm of {self.metric!r} is not {self.arm!r}")
        return self


class Arithmetic(Setting):
    """A printed figure, and how others give it. It holds when the result rounds to the printed digits."""

    id: Identifier
    statement: str
    operation: Literal["quotient", "sum", "percentage"]
    terms: tuple[float, ...] = Field(min_length=2, strict=False)
    printed: Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?$")]
    holds: bool = Field(description="as we found it; `agrees` recomputes it")
    note: str = ""

    @property
    def computed(self) -> float:
        """What the terms give."""
        if self.operation == "sum":
            return math.fsum(self.terms)
        first, second = self.terms
        return first / second * (100 if self.operation == "percentage" else 1)

    @property
    def agrees(self) -> bool:
        """Whether the computed value, rounded half up to the printed number of digits, is the printed one."""
        printed = Decimal(self.printed)
        return Decimal(repr(self.computed)).quantize(printed, rounding=ROUND_HALF_UP) == printed


class Remark(Setting):
    """What a reader of the published material should know and no metric can test."""

    id: Identifier
    targets: tuple[Name, ...] = Field(strict=False, description="empty: no target of ours")
    text: str
    consequence: str


class Published(Setting):
    """Everything in published.toml."""

    schema_version: Literal[1]
    claims: tuple[Claim, ...] = Field(strict=False, min_length=1)
    arithmetic: tuple[Arithmetic, ...] = Field(strict=False, min_length=1)
    remarks: tuple[Remark, ...] = Field(strict=False, min_length=1)

    @model_validator(mode="after")
    def _names_are_known(self) -> Published:
        ids = [entry.id for table in (self.claims, self.arithmetic, self.remarks) for entry in table]
        repeated = sorted({name for name in ids if ids.count(name) > 1})
        if repeated:
            raise ValueError(f"ids stand twice: {', '.join(repeated)}")
        named = {claim.target for claim in self.claims}.union(*(remark.targets for remark in self.remarks))
        if unknown := sorted(named - set(target_names())):
            raise ValueError(f"unknown targets: {', '.join(unknown)}")
        for claim in self.claims:
            arms = load_target(claim.target).arms
            if any(arm not in arms for arm in (claim.arm, *(claim.ratio or ()))):
                raise ValueError(f"{claim.id}: target {claim.target!r} has no such arm")
        return self

    def for_target(self, target: str) -> tuple[Claim, ...]:
        """The claims about one target, in the order of the file."""
        return tuple(claim for claim in self.claims if claim.target == target)


@cache
def published() -> Published:
    """The shipped claims.

    Raises:
        pydantic.ValidationError: the file is not what the models ask for; a test keeps the shipped one valid.
    """
    return parse(FILE.read_text("utf-8"))


def parse(text: str) -> Published:
    """Read the TOML form: named stacks and default tolerances are put into each claim."""
    raw: dict[str, Any] = tomllib.loads(text)
    stacks, tolerances = raw.pop("stacks"), raw.pop("tolerances")
    for claim in raw["claims"]:
        claim["stack"] = stacks[claim["stack"]]
        claim.setdefault("tolerance", tolerances[claim["kind"]])
    return Published.model_validate(raw)


def claims_table(target: str) -> str:
    """The claims about one target as a Markdown table; docs/published-claims.md holds it."""
    rows = [
        f"| `{claim.arm}` | `{claim.metric}` | {claim.printed} | {claim.origin} | {_allowed(claim)} | {claim.source} |"
        for claim in published().for_target(target)
    ]
    return "\n".join(["| arm | figure | printed | origin | tolerance | source |", "|---|---|---:|---|---|---|", *rows])


def _allowed(claim: Claim) -> str:
    tolerance, unit = claim.tolerance, f" {claim.unit}".rstrip()
    if claim.relation == "at_most":
        return f"at most {claim.value + tolerance.margin(claim.value):g}{unit}"
    shares = [f"{100 * tolerance.relative:g} %"] if tolerance.relative else []
    amounts = [f"{tolerance.absolute:g}{unit}"] if tolerance.absolute else []
    return " or ".join(shares + amounts) or "exact"


def arithmetic_table() -> str:
    """The published table against itself, recomputed now, as a Markdown table; docs/published-claims.md holds it."""
    rows = [
        f"| {entry.statement} | {entry.printed} | {entry.computed:.6g} | {'yes' if entry.agrees else '**no**'} |"
        for entry in published().arithmetic
    ]
    return "\n".join(["| statement | printed | computed | holds |", "|---|---:|---:|---|", *rows])


def main() -> None:
    """Print the tables of docs/published-claims.md."""
    for name in ("rtx4090", "h100x4", "a100x4"):
        print(f"{claims_table(name)}\n")
    print(arithmetic_table())


if __name__ == "__main__":
    main()
