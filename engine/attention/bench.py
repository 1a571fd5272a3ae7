"""Sol-Attn's benchmark: the gate first, then the times, beside dense attention and beside peers.

    python -m engine.attention.bench --json FILE [--peer PATH ...] [--only published,rank,...]

Nothing is timed on a red gate (exit code 12). Times are medians of CUDA events over repeated calls after a warm-up, of
the whole call: summaries, thresholds, routes and attention. ``exact TFLOP/s`` counts only the blocks computed exactly;
the floor is what the best dense kernel would take for them and the block means: (density + 1/64) x its dense time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend

from config.errors import Exit, UsageError
from engine.attention import kernels, reference, sana
from engine.attention.call import SolAttentionOptions, ThreshType, TokenRange
from engine.attention.dense import sdpa_choice
from engine.attention.kernels.lists import route
from engine.attention.kernels.summaries import summarise
from engine.attention.peers import CONTIGUOUS, DENSE, Attention, dense, find_peers, ran
from engine.attention.routing import BLOCK, num_blocks

PUBLISHED = 38247, 56  # tokens and heads of the published document
PREFIX = 951  # its text and audio rows: the KV sink, and the query rows that attend densely
# The gate's limits: the relative L2 error against float64 on random data, and how much worse than cuDNN's own error the
# kernel may be when every block is routed; then the published gate's three against scaled_dot_product_attention, which
# every target's lock holds too (config/targets).
RELATIVE_L2, TIMES_CUDNN = 3e-3, 1.1
MAX_ABS, MEAN_ABS, SDPA_RELATIVE_L2 = 0.15, 0.002, 0.005

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_data(tokens: int, heads: int, seed: int = 0) -> Tensors:
    """Independent normal q, k, v [1, T, H, 128], views of one fused tensor as SGLang hands them over."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, 3, heads, 128, device="cuda", generator=generator, dtype=torch.bfloat16)
    q, k, v = (x[None, :, i] for i in range(3))
    return q, k, v


def correlated_data(tokens: int, heads: int, seed: int = 0) -> Tensors:
    """Like ``random_data``, plus one smooth signal in q and k: a random vector every 512 tokens, interpolated between.
    So neighbouring query blocks route alike, as neighbouring patches of a video do."""
    knot, amplitude = 512, 0.7
    q, k, v = random_data(tokens, heads, seed)
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    base = torch.randn(tokens // knot + 2, heads, 128, device="cuda", generator=generator)
    position = torch.arange(tokens, device="cuda") / knot
    left = position.long()
    share = (position - left)[:, None, None]
    signal = amplitude * torch.lerp(base[left], base[left + 1], share)
    q += signal.bfloat16()
    k += signal.bfloat16()
    return q, k, v


def unaligned_data(tokens: int, heads: int, seed: int = 0) -> Tensors:
    """``random_data`` at addresses that the memory accelerator cannot read: two bytes off, a head every 264 bytes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, 3, heads, 132, device="cuda", generator=generator, dtype=torch.bfloat16)
    q, k, v = (x[None, :, i, :, 1:129] for i in range(3))
    return q, k, v


DATA = {"random": random_data, "correlated": correlated_data}
ALL_DATA = {**DATA, "unaligned": unaligned_data}


def relative_l2(x: torch.Tensor, reference: torch.Tensor) -> float:
    """||x - reference|| / ||reference||, in float64."""
    return float((x.double() - reference.double()).norm() / reference.double().norm())


def native(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions) -> torch.Tensor:
    return kernels.attend(q, k, v, options).out


# ----------------------------------------------------------------------------------------------------- gate


def gate_small() -> Iterator[tuple[str, float, float]]:
    """(check, value, limit) on shapes where the whole output can be compared with the float64 reference."""
    cases: list[tuple[int, int, ThreshType, TokenRange, TokenRange, float]] = [
        (4095, 3, "diag", (0, 951), (0, 951), 1.0),
        (4095, 2, "exact", (1000, 1100), (900, 2000), 1.0),
        (65, 3, "diag", (0, 0), (3, 4), 1.0),
        (1, 1, "exact", (0, 1), (0, 1), 1.0),
        (1000, 14, "diag", (990, 1000), (0, 0), -1000.0),
    ]
    for tokens, heads, kind, sink, rows, tau in cases:
        q, k, v = random_data(tokens, heads)
        options = SolAttentionOptions(128**-0.5, tau, kind, sink, rows, return_lse=True)
        out = torch.full_like(q, float("nan"))
        ours = kernels.attend(q, k, v, options, out)
        oracle = reference.attend(q, k, v, options, precision="float64")
        name = f"T={tokens} H={heads} {kind} sink={sink} rows={rows} tau={tau}"
        yield f"relative L2 against float64, {name}", relative_l2(ours.out, oracle.out), RELATIVE_L2
        yield f"LSE, {name}", float((ours.lse - oracle.lse).abs().max()), 1e-4
        wrong = (ours.route_counts != oracle.route_counts).float().mean()
        yield f"share of differing route counts, {name}", float(wrong), 1e-3


def exact_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Dense attention of some query rows in float64, head by head. [rows, H, 128]."""
    heads = []
    for h in range(q.shape[2]):
        p = torch.softmax(q[0, rows, h].double() @ k[0, :, h].double().T * scale, dim=-1)
        heads.append(p @ v[0, :, h].double())
    return torch.stack(heads, dim=1)


def gate_published() -> Iterator[tuple[str, float, float]]:
    """(check, value, limit) at the published shape: everything routed against SDPA and float64; run to run."""
    tokens, heads = PUBLISHED
    q, k, v = random_data(tokens, heads)
    options = SolAttentionOptions(128**-0.5, -1000.0)
    ours, cudnn = native(q, k, v, options), dense(SDPBackend.CUDNN_ATTENTION)(q, k, v, options)
    difference = (ours - cudnn).abs()
    yield "everything routed, max |ours - SDPA|", float(difference.max()), MAX_ABS
    yield "everything routed, mean |ours - SDPA|", float(difference.float().mean()), MEAN_ABS
    yield "everything routed, relative L2 against SDPA", relative_l2(ours, cudnn), SDPA_RELATIVE_L2
    rows = torch.randint(tokens, (256,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    oracle = exact_rows(q, k, v, rows, options.scale)
    limit = TIMES_CUDNN * relative_l2(cudnn[0, rows], oracle)
    error = relative_l2(ours[0, rows], oracle)
    yield "everything routed, relative L2 against float64 (limit: 1.1 x cuDNN's)", error, limit
    del ours, cudnn, difference
    options = SolAttentionOptions(128**-0.5, 1.0, sink=(0, PREFIX), dense_rows=(0, PREFIX))
    first, second = kernels.attend(q, k, v, options), kernels.attend(q, k, v, options)
    same = torch.equal(first.out, second.out) and torch.equal(first.route_counts, second.route_counts)
    yield "run to run, differing", float(not same), 0.0
    rows = torch.arange(0, PREFIX, 16, device="cuda")
    oracle = exact_rows(q, k, v, rows, options.scale)
    yield "dense rows, relative L2 against float64", relative_l2(first.out[0, rows], oracle), RELATIVE_L2


# ---------------------------------------------------------------------------------------------------- times


def timed(calls: list[Callable[[], Any]], count: int) -> list[list[float]]:
    """Milliseconds of each call, ``count`` times, the calls taking turns."""
    events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls] for _ in range(count)]
    for turn in events:
        for call, (start, stop) in zip(calls, turn, strict=True):
            start.record()
            call()
            stop.record()
    torch.cuda.synchronize()
    return [[turn[i][0].elapsed_time(turn[i][1]) for turn in events] for i in range(len(calls))]


def measure(call: Callable[[], Any], budget_ms: float = 400.0) -> dict[str, Any]:
    """Median milliseconds of a call and all its samples: 3 to 15 of them, as fit in ``budget_ms``."""
    call()
    torch.cuda.synchronize()
    count = min(15, max(3, int(budget_ms / timed([call], 1)[0][0])))
    (samples,) = timed([call], count)
    return {"ms": sorted(samples)[count // 2], "samples_ms": [round(x, 4) for x in samples]}


def measure_on_top(call: Callable[[], Any], more: Callable[[], Any], count: int = 25) -> dict[str, Any]:
    """What ``more`` takes beyond ``call``: the median of the differences between neighbours that take turns.

    The clock follows temperature and power, and drifts by more within a second than two such calls differ; neighbours
    have the same. The first turns are a warm-up and do not count.
    """
    timed([call, more], 5)
    base, longer = timed([call, more], count)
    differences = [b - a for a, b in zip(base, longer, strict=True)]
    return {"ms": sorted(differences)[count // 2], "samples_ms": [round(x, 4) for x in differences]}


def extra_mib(call: Callable[[], Any]) -> float:
    """Peak memory of a call beyond its inputs and its output (of q's size), in MiB."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()) / 2**20


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    group: str
    tokens: int
    heads: int
    data: str = "random"
    tau: float = 1.0
    thresh_type: ThreshType = "diag"
    sink: int = PREFIX
    dense_rows: int = 0


def cases() -> list[Case]:
    tokens, heads = PUBLISHED
    listed = []
    for data in DATA:
        listed += [
            Case("published", tokens, heads, data),
            Case("published", tokens, heads, data, dense_rows=PREFIX),
            Case("published", tokens, heads, data, sink=0),
            Case("published", tokens, heads, data, thresh_type="exact"),
            Case("rank", tokens, heads // 4, data),
            Case("rank", tokens, heads // 4, data, dense_rows=PREFIX),
        ]
    listed += [Case("tau", tokens, heads, tau=tau) for tau in (0.0, 0.5, 1.5, 2.0)]
    listed += [Case("strided", tokens, heads, "unaligned")]
    listed += [Case("length", t, heads, data) for data in DATA for t in (8192, 16384, 65536, 131072)]
    return listed


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions, plan: kernels.Plan
) -> None:
    """Copies if any, summaries, thresholds and routes: what comes before the attention step."""
    q, k, v = kernels.readable(plan, q, k, v)
    route(summarise(q, k, v, options.thresh_type), options, q.shape[1], plan.group, plan.rows)


def run_case(case: Case, peers: dict[str, Attention]) -> dict[str, Any]:
    """All columns of one case. What cannot do the case is given with its reason instead of a time."""
    q, k, v = ALL_DATA[case.data](case.tokens, case.heads)
    options = SolAttentionOptions(128**-0.5, case.tau, case.thresh_type, (0, case.sink), (0, case.dense_rows))
    plan = kernels.plan_for(torch.cuda.get_device_capability())
    result = kernels.attend(q, k, v, options)
    blocks = num_blocks(case.tokens)
    routed = float(result.route_counts.double().mean()) / blocks
    dense_share = case.dense_rows / case.tokens  # of the query rows: these have all blocks exact, and no means
    exact = routed * (1 - dense_share) + dense_share
    row: dict[str, Any] = {**case.__dict__, "backend": result.backend, "density": routed, "exact_share": exact}
    row["native"] = measure(lambda: native(q, k, v, options))
    if case.dense_rows:
        without = replace(options, dense_rows=(0, 0))
        row["dense_rows_on_top"] = measure_on_top(
            partial(native, q, k, v, without), partial(native, q, k, v, options)
        )  # fmt: skip
    row["prepare"] = measure(lambda: prepare(q, k, v, options, plan))
    row["extra_mib"] = extra_mib(lambda: native(q, k, v, options))
    for name, attention in {**{name: dense(kind) for name, kind in DENSE.items()}, **peers}.items():
        if case.data == "unaligned" and name != "cudnn":
            # PyTorch 2.11's FlashAttention faults there, and after a fault the process can run nothing more
            row[name] = {"failed": "not run: it takes aligned addresses for granted"}
            continue
        inputs: Tensors = (q.contiguous(), k.contiguous(), v.contiguous()) if name in CONTIGUOUS else (q, k, v)
        try:
            row[name] = measure(partial(attention, *inputs, options))
            row[name]["speed_up"] = row[name]["ms"] / row["native"]["ms"]
            if name in peers:
                row[name]["relative_l2_to_native"] = relative_l2(attention(*inputs, options), result.out)
            else:
                row[name]["operators"] = ran(attention, *inputs, options)
            if name == "sana":
                row[name]["backend"] = f"sana/{sana.kernel_of(q.device)}"
        except Exception as error:  # a peer's failure, whatever it is, is a result of its own
            row[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    flops = 4.0 * case.tokens**2 * 128 * case.heads * exact
    row["exact_tflops"] = flops / row["native"]["ms"] * 1e-9
    if "ms" in row["cudnn"]:
        row["floor_ms"] = (exact + (1 - dense_share) / BLOCK) * row["cudnn"]["ms"]
        row["share_of_floor"] = row["floor_ms"] / row["native"]["ms"]
    return row


def line(row: dict[str, Any], peers: list[str]) -> str:
    def speed_up(name: str) -> str:
        return f"{row[name]['speed_up']:.2f}x" if "speed_up" in row[name] else "-"

    on_top = f" (dense rows on top: {row['dense_rows_on_top']['ms']:.2f})" if row["dense_rows"] else ""
    cells = [
        f"{row['group']:<9} T={row['tokens']:<6} H={row['heads']:<2} {row['data']:<10} {row['thresh_type']:<5}",
        f"tau={row['tau']:<4} sink={row['sink']:<3} rows={row['dense_rows']:<3}",
        f"{row['native']['ms']:8.2f} ms (prepare {row['prepare']['ms']:.2f}){on_top}",
        f"{row['exact_tflops']:4.0f} TFLOP/s, floor {row.get('share_of_floor', 0):.0%}, density {row['density']:.2%}",
        f"cuDNN {speed_up('cudnn')} flash {speed_up('flash')}",
        *(f"{name} {speed_up(name)}" for name in peers),
        f"+{row['extra_mib']:.0f} MiB",
    ]
    return " | ".join(cells)


def environment() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m engine.attention.bench " + " ".join(sys.argv[1:]),
        "device": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "sdpa": list(sdpa_choice(*random_data(4096, 2), 128**-0.5)),  # what plain SDPA runs, unasked
    }


def save(report: dict[str, Any], file: Path | None) -> None:
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.attention.bench", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write all samples of all cases")
    parser.add_argument("--peer", action="append", default=[], metavar="PATH", help="folder to import peers from")
    groups = list(dict.fromkeys(case.group for case in cases()))
    parser.add_argument("--only", default="", help=f"comma-separated groups: {', '.join(groups)}")
    arguments = parser.parse_args()
    only = set(filter(None, arguments.only.split(",")))
    if unknown := sorted(only - set(groups)):
        parser.error(f"--only: no group {', '.join(unknown)}; known: {', '.join(groups)}")
    if not torch.cuda.is_available():
        print("no CUDA device: the kernels are timed on a GPU; their tests run without one", file=sys.stderr)
        return Exit.ENVIRONMENT
    try:
        peers = find_peers(arguments.peer)
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    report: dict[str, Any] = {"environment": environment(), "peers": sorted(peers), "gate": [], "cases": []}
    print(json.dumps(report["environment"]), f"peers: {', '.join(peers) or 'none'}", sep="\n")

    for checks in (gate_small, gate_published):
        for name, value, limit in checks():
            passed = value <= limit  # false for NaN
            report["gate"].append({"check": name, "value": value, "limit": limit, "passed": passed})
            print(f"{'ok ' if passed else 'RED'} {name}: {value:.3g} (limit {limit:.3g})", flush=True)
    green = all(check["passed"] for check in report["gate"])
    save(report, arguments.json)
    for case in cases() if green else []:
        if not only or case.group in only:
            report["cases"].append(run_case(case, peers))
            print(line(report["cases"][-1], list(peers)), flush=True)
            save(report, arguments.json)  # what was measured stays, whatever a later case does
    return Exit.PASSED if green else Exit.GATE


if __name__ == "__main__":
    raise SystemExit(main())
