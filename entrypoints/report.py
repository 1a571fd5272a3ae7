"""`sol report`: what a record measured, in tables. It re-derives nothing and judges nothing."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from config.errors import InvalidRecord, UsageError
from config.record import BENCHMARK, ArmResult, Benchmark, TensorDistance
from entrypoints.console import make_console, make_table
from entrypoints.spread import print_spreads
from verify.files import LIMITS
from verify.findings import plain
from verify.strictjson import parse_model

MAX_BYTES = LIMITS[".json"]
REMEDY = "name a directory that `sol benchmark` made"
HEADS = "arm", "outcome", "gate", "n", "seconds\n(median)", "denoise\ns", "computed", "density"
PEAK = "peak MiB\n(allocator /\nNVML)"


def show_report(record: Path, *, as_json: bool) -> None:
    """Print benchmark.json.

    Raises:
        UsageError: not a directory.
        InvalidRecord: there is no such file, or it is not of its model.
    """
    if not record.is_dir():
        raise UsageError(f"{record} is not a directory", remedy=REMEDY)
    path = record / BENCHMARK
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise InvalidRecord(f"{path} is no file of at most {MAX_BYTES >> 20} MiB", remedy=REMEDY)
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRecord(f"{path}: {error.strerror}", remedy=REMEDY) from error
    benchmark: Benchmark = parse_model(Benchmark, data, BENCHMARK)
    console = make_console()
    if as_json:
        console.file.write(data.decode())
        return
    print_benchmark(console, benchmark)
    print_spreads(console, record, benchmark)


def print_benchmark(console: Console, benchmark: Benchmark) -> None:
    """Arms, times and ratios of a benchmark."""
    kind = "locked" if benchmark.locked else "open"
    console.print(
        f"target {benchmark.target}, lock {benchmark.lock_digest[:12]} ({kind}), weights: {benchmark.weights}"
    )
    console.print(table_of(benchmark))
    print_unmuxed(console, benchmark)
    for ratio in benchmark.ratios:
        times = f"{ratio.seconds:.3f}x end to end, {ratio.denoise_seconds:.3f}x denoising"
        console.print(f"{ratio.arm} over {ratio.baseline}: {times}")
    print_latents(console, benchmark)
    if benchmark.weights == "synthetic":
        console.print("Synthetic weights: no figure here stands beside a published one.")


def print_unmuxed(console: Console, benchmark: Benchmark) -> None:
    """Which arms left tensors and no video, and why."""
    arms: dict[str, list[str]] = {}
    for name, arm in benchmark.arms.items():
        for reason in dict.fromkeys(sample.unmuxed for sample in arm.samples if sample.unmuxed):
            arms.setdefault(plain(reason), []).append(name)
    for reason, names in arms.items():
        text = f"not muxed ({reason}): no video, and no copy to the host and no encoding in the seconds"
        console.print(f"{', '.join(names)}: {text}")


def print_latents(console: Console, benchmark: Benchmark) -> None:
    """What the arms change numerically: how far the latents that their loops leave are from another arm's."""
    pairs: dict[tuple[str, str], list[tuple[TensorDistance, TensorDistance]]] = {}
    for found in benchmark.latents:
        pairs.setdefault((found.arm, found.baseline), []).append((found.video, found.audio))
    for (arm, baseline), distances in pairs.items():
        video, audio = (tensor_words(tensors) for tensors in zip(*distances, strict=True))
        worst = f" (the largest of {len(distances)} samples)" if len(distances) > 1 else ""
        console.print(f"{arm} against {baseline}: latents {video} (video), {audio} (audio){worst}")


def tensor_words(distances: tuple[TensorDistance, ...]) -> str:
    """How far the tensors of some samples are from their baselines, the worst of them."""
    if all(distance.equal for distance in distances):
        return "equal bit for bit"
    errors = [distance.rel_l2 for distance in distances]
    if None in errors:
        return "not comparable"
    largest = max(error for error in errors if error is not None)
    estimate = f"estimated from {distances[0].sampled:,} of {distances[0].elements:,} elements"
    return f"rel L2 {largest:.2g}, {estimate}" if largest else f"not equal, rel L2 0 {estimate}"


def table_of(benchmark: Benchmark) -> Table:
    """One row an arm."""
    # with lines between them the columns would not fit into 80
    table = make_table(*HEADS, PEAK, box=SIMPLE, padding=(0, 1, 0, 0))
    for name, arm in benchmark.arms.items():
        table.add_row(name, arm.outcome, *columns(arm))
    return table


def columns(arm: ArmResult) -> list[str]:
    """An arm's cells; what was not measured says so."""
    last = arm.samples[-1] if arm.samples else None
    gate = "-" if arm.gate is None else ("green" if arm.gate.passed else "RED")
    seconds = f"{arm.seconds.median:.2f}" if arm.seconds else "not measured"
    denoise = f"{arm.denoise_seconds.median:.2f}" if arm.denoise_seconds else "not measured"
    computed = f"{last.cache.compute} of {last.cache.calls}" if last and last.cache else "-"
    density = f"{last.density.mean:.2%}" if last and last.density else "-"
    return [gate, str(len(arm.samples)), seconds, denoise, computed, density, peaks(arm)]


def peaks(arm: ArmResult) -> str:
    """Peak memory of the measured samples: on a GPU by the allocator and by NVML, else the process's resident set."""
    if not arm.samples:
        return "not measured"
    reserved = max(sample.peak_reserved_mib for sample in arm.samples)
    seen = [sample.peak_nvml_mib for sample in arm.samples if sample.peak_nvml_mib is not None]
    if not reserved and not seen:
        return f"{max(sample.peak_rss_mib for sample in arm.samples):.0f} host"
    return f"{reserved:.0f} / {f'{max(seen):.0f}' if seen else 'not seen'}"
