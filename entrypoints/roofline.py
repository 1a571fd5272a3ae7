"""`sol roofline`: what a target's request must compute and move, the least time for it, and what a record reached."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column

from config.ceilings import Ceilings
from config.errors import UsageError
from config.lock import resolve
from entrypoints.console import make_console, make_table
from verify.reader import Record, read_record
from verify.roofline.observed import ArmReached, plan_of_record, reached
from verify.roofline.plan import Plan, Total, plan_of, totals
from verify.roofline.work import Stage, floor

NOT_KNOWN = "-"


def show_roofline(
    target: str,
    overrides: list[str],
    record: Path | None,
    *,
    density: float | None,
    computed: int | None,
    as_json: bool,
) -> None:
    """Print a target's roofline.

    Raises:
        UsageError: no such target, key or value, a figure out of its range, a record of another target, or overrides
            beside a record, which has its own.
        InvalidRecord: the record cannot be read.
    """
    lock = resolve(target, overrides)
    found = None if record is None else read_record(record)
    if overrides and found is not None:
        raise UsageError("--set beside --record", needed="the record's own values", remedy="leave one of the two out")
    if found is None:
        plan = plan_of(lock.resolved, density=density, computed=computed)
    elif found.lock.target != target:
        raise UsageError(
            f"{record} is a record of target {found.lock.target!r}", remedy=f"sol roofline {found.lock.target}"
        )
    else:
        plan = plan_of_record(found, density=density, computed=computed)
    shares = [] if found is None else reached(found, plan)
    console = make_console()
    if as_json:
        console.file.write(json.dumps(as_data(plan, found, shares), indent=1) + "\n")
        return
    print_plan(console, plan)
    if found is not None:
        console.print(
            f"\n{record}: as it stands; whether it is signed and sound is not judged here, but by `sol verify`"
        )
    for arm in shares:
        print_arm(console, plan, arm)


def print_plan(console: Console, plan: Plan) -> None:
    """The request, the ceilings, every stage with its parts, and what each arm comes to."""
    document, request, gpus = plan.document, plan.target.request, plan.machine.gpus
    console.print(
        f"{plan.target.name}: {plan.architecture.name}; {document.live:,} tokens ({document.text} text, "
        f"{document.audio} audio, {document.video:,} video) in {document.total:,} rows; {request.forwards} forwards"
    )
    print_ceilings(console, plan)
    console.print(f"FLOPs, bytes and times of one GPU{f' of {gpus}' if gpus > 1 else ''}. {describe_assumptions(plan)}")
    stages = plan.stages()
    shown = columns(plan, stages)
    table = make_table("stage", *(Column(name, justify="right") for name in shown))
    for stage in stages:
        table.add_row(stage.name, *figures(stage, plan.ceilings, shown), style="bold")
        for name, part in grouped(stage).items():
            table.add_row(f"  {name}", *figures(part, plan.ceilings, shown))
    console.print(table)
    print_totals(console, plan, totals(plan))


def print_ceilings(console: Console, plan: Plan) -> None:
    """Which ceilings there are, each with where it is from."""
    if plan.ceilings is None:
        console.print(f"no ceiling known for {plan.gpu or 'a CPU'}: FLOPs and bytes, no floor")
        return
    machine = plan.ceilings.machine
    where = (
        f"; measured on {machine.device}, driver {machine.driver}, {machine.software}, {machine.date}"
        if machine
        else ""
    )
    console.print(f"ceilings of {plan.gpu}{where}:")
    for name, figure in plan.ceilings.all.items():
        unit = "TFLOP/s" if name.startswith("tflops") else "GB/s"
        console.print(f"  {name} {figure.value:g} {unit} ({figure.origin}): {figure.source}")


def describe_assumptions(plan: Plan) -> str:
    """Where density and number of computed forwards are from."""
    density = "no density is published for this target: --density gives one"
    if plan.density is not None:
        density = f"density {plan.density.value:.2%} ({plan.density.source})"
    computed = "how many forwards the cache computes is not published: --computed gives it"
    if plan.computed is not None:
        computed = f"{plan.computed.value:.0f} forwards computed with the cache ({plan.computed.source})"
    return f"{density[:1].upper()}{density[1:]}; {computed}."


def grouped(stage: Stage) -> dict[str, Stage]:
    """A stage's parts for the table: attention and linear layers by name, everything else as one."""
    shown = {name: part for (kind, name), part in stage.parts.items() if kind != "rest"}
    rest = tuple(entry for entry in stage.operations if entry.kind == "rest")
    return {**shown, "rest": Stage("rest", rest, gpus=stage.gpus)} if rest else shown


def columns(plan: Plan, stages: list[Stage]) -> list[str]:
    """The columns that say something about this target."""
    names = ["FLOP", "bytes"]
    names += ["PCIe"] if any(stage.traffic.host for stage in stages) else []
    names += ["NVLink"] if any(stage.traffic.gathered + stage.traffic.exchanged for stage in stages) else []
    if plan.ceilings is None:
        return names
    return [*names, "floor", "bound by", *(["at attention's rate"] if plan.ceilings.tflops.attention else [])]


def figures(stage: Stage, ceilings: Ceilings | None, shown: list[str]) -> list[str]:
    """A stage's cells by column."""
    traffic = stage.traffic
    exchanged = traffic.gathered + traffic.exchanged
    cells = {"FLOP": scaled(stage.flops), "bytes": f"{scaled(stage.bytes)}B"}
    for name, size, bandwidth in (
        ("PCIe", traffic.host, ceilings and ceilings.gb_s.host),
        ("NVLink", exchanged, ceilings and ceilings.gb_s.link),
    ):
        time = f", {duration(size / (1e9 * bandwidth.value))}" if bandwidth else ""
        cells[name] = f"{scaled(size)}B{time}" if size else ""
    if ceilings is not None:
        least = floor(stage, ceilings)
        slower = least.reachable is not None and least.reachable > least.seconds
        cells |= {"floor": duration(least.seconds), "bound by": least.bound}
        cells["at attention's rate"] = duration(least.reachable) if slower else ""
    return [cells[name] for name in shown]


def print_totals(console: Console, plan: Plan, rows: list[Total]) -> None:
    """One row for each set of switches."""
    names = ["dense", "sparse", "reused", "denoise FLOP"]
    names += ["denoise floor", "request floor", "over dense"] if plan.ceilings else ["request FLOP"]
    table = make_table("arms", *(Column(name, justify="right") for name in names))
    base = next((row for row in rows if not (row.sparse or row.reused)), None)
    for row in rows:
        note = f" ({row.note})" if row.note else ""
        cells = [*map(str, (row.dense, row.sparse, row.reused)), scaled(row.denoise_flops)]
        if row.denoise_seconds is None:
            cells.append(scaled(row.request_flops))
        else:
            ratio = f"{base.denoise_seconds / row.denoise_seconds:.2f}x" if base and base.denoise_seconds else NOT_KNOWN
            cells += [duration(row.denoise_seconds), duration(row.request_seconds), ratio]
        table.add_row(f"{', '.join(row.arms)}{note}", *cells)
    console.print(table)
    missing = [name for name in plan.target.arms if not any(name in row.arms for row in rows)]
    if missing:
        console.print(f"not added up, for want of the figures named above: {', '.join(missing)}")


def print_arm(console: Console, plan: Plan, arm: ArmReached) -> None:
    """What one arm of a record reached."""
    if not arm.kinds:
        console.print(f"arm {arm.arm}: not measured")
        return
    names = ["n", "density", "measured (median)", *(["floor (mean)", "share of the floor"] if plan.ceilings else [])]
    table = make_table("what", *(Column(name, justify="right") for name in [*names, "TFLOP/s reached"]))
    for entry in arm.kinds:
        cells = [str(entry.count), f"{entry.density:.2%}" if entry.density is not None else "", duration(entry.seconds)]
        if entry.share is not None:
            cells += [duration(entry.floor_seconds), f"{entry.share:.1%}"]
        table.add_row(entry.kind, *cells, f"{entry.tflops:.4g}")
    console.print(f"arm {arm.arm}, {arm.samples} measured sample(s):")
    console.print(table)
    for loads in arm.loads:
        console.print(
            f"sample {loads.sample}: {loads.layers} layers of the DiT fetched from the host, {scaled(loads.bytes)}B"
            + (f", {duration(loads.bytes / (1e9 * plan.ceilings.gb_s.host.value))} at least" if plan.ceilings else "")
        )


def scaled(value: float) -> str:
    """A number with four digits and an SI prefix."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.4g} {prefix}"
    return f"{value:.4g} "


def duration(seconds: float | None) -> str:
    """Seconds, or milliseconds below one; `-` for what is not known."""
    if seconds is None:
        return NOT_KNOWN
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def as_data(plan: Plan, record: Record | None, shares: list[ArmReached]) -> dict[str, Any]:
    """Everything as JSON: FLOPs, bytes and seconds, of one GPU."""
    ceilings = plan.ceilings
    return {
        "target": plan.target.name,
        "architecture": plan.architecture.name,
        "document": asdict(plan.document),
        "gpus": plan.machine.gpus,
        "gpu": plan.gpu,
        "ceilings": None if ceilings is None else ceilings.model_dump(mode="json"),
        "density": None if plan.density is None else asdict(plan.density),
        "computed": None if plan.computed is None else asdict(plan.computed),
        "stages": [stage_data(stage, ceilings) for stage in plan.stages()],
        "totals": [asdict(row) for row in totals(plan)],
        "record": None if record is None else [asdict(arm) for arm in shares],
    }


def stage_data(stage: Stage, ceilings: Ceilings | None) -> dict[str, Any]:
    """One stage as JSON."""
    least = None if ceilings is None else floor(stage, ceilings)
    return {
        "name": stage.name,
        "flops": stage.flops,
        "bytes": stage.bytes,
        "traffic_bytes": asdict(stage.traffic),
        "floor": None if least is None else asdict(least),
        "parts": [
            {
                "name": name,
                "kind": kind,
                "flops": part.flops,
                "bytes": part.bytes,
                "floor_seconds": None if ceilings is None else floor(part, ceilings).seconds,
            }
            for (kind, name), part in stage.parts.items()
        ],
    }
