"""The Real-QKV gate: on the Q, K, V of a running model, does the sparse kernel with everything routed equal attention?

It is the published gate (NVlabs/Sana, MiniMax-H3 adapters): the kernel at a tau so low that every block is exact,
against PyTorch's SDPA on the same BF16 tensors, judged by three statistics. Beyond the published one it takes all
heads, judges rows over the maximum-error limit again by a float32 softmax before it fails, and keeps a slice that can
be recomputed. It does not test the approximation: the error of the arm's own tau is reported and judges nothing.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F

from config.errors import GateFailed
from config.record import ErrorStats, GateLimits, GateReport, GateSlice
from engine.attention.call import SolAttentionOptions, SolAttentionResult, ThreshType, TokenRange
from engine.attention.reference import ieee_matmul
from engine.attention.routing import BLOCK, num_blocks

REL_L2_FLOOR = 1.0e-12  # of the reference's norm, as published
SCORE_ELEMENTS = 1 << 25  # float32 scores held at once: 128 MiB


class Attend(Protocol):
    """The backend under test, for instance ``functools.partial(sol_attention, backend="native")``."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        tau: float,
        thresh_type: ThreshType,
        sink: TokenRange = (0, 0),
        dense_rows: TokenRange = (0, 0),
    ) -> SolAttentionResult: ...


def softmax_attention_fp32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Dense attention of one head, [T, D] each -> [T, D] float32, in float32 throughout, some rows at a time."""
    keys, values = k.float().T, v.float()
    rows = max(1, SCORE_ELEMENTS // k.shape[0])
    with ieee_matmul():
        return torch.cat([torch.softmax((b_q.float() @ keys) * scale, dim=-1) @ values for b_q in torch.split(q, rows)])


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Dense attention of one head by PyTorch in the tensors' own dtype, [T, D] each -> [T, D]."""
    b_q, b_k, b_v = (x.contiguous()[None, None] for x in (q, k, v))  # [1, 1, T, D]
    return F.scaled_dot_product_attention(b_q, b_k, b_v, scale=scale)[0, 0]


class _Errors:
    """Error statistics summed over heads in float64. Differences that are not finite are left out, and remembered."""

    def __init__(self) -> None:
        self.max_abs = self.sum_abs = self.sum_square = self.reference_square = 0.0
        self.count = 0
        self.finite = True

    def add(self, output: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """Take in one head, [T, D]; returns each row's largest absolute error, [T] float64."""
        reference = reference.double()
        error = (output.double() - reference).abs()
        if not error.isfinite().all():
            self.finite = False
            error, reference = (torch.where(x.isfinite(), x, 0) for x in (error, reference))
        per_row = error.amax(-1)
        self.max_abs = max(self.max_abs, per_row.amax().item())
        self.sum_abs += error.sum().item()
        self.sum_square += error.square().sum().item()
        self.reference_square += reference.square().sum().item()
        self.count += error.numel()
        return per_row

    def stats(self) -> ErrorStats:
        rel_l2 = math.sqrt(self.sum_square) / max(math.sqrt(self.reference_square), REL_L2_FLOOR)
        return ErrorStats(max_abs=self.max_abs, mean_abs=self.sum_abs / self.count, rel_l2=rel_l2)


def slice_blocks(tokens: int, options: SolAttentionOptions) -> tuple[int, ...]:
    """Query blocks worth keeping: first, middle, last, and both sides of where the dense rows and the sink end."""
    last = num_blocks(tokens) - 1
    edges = [stop for start, stop in (options.dense_rows, options.sink) if stop > start]
    around = [block for stop in edges for block in ((stop - 1) // BLOCK, stop // BLOCK)]
    return tuple(sorted({0, last // 2, last, *(min(block, last) for block in around)}))


@torch.no_grad()
def run_gate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attend: Attend,
    options: SolAttentionOptions,
    gate_tau: float,
    limits: GateLimits,
    head: int,
    rank: int,
    sample: int,
    step: int,
    layer: int,
) -> tuple[GateReport, dict[str, torch.Tensor]]:
    """Gate one sparse call.

    q, k, v: [1, T, H, D], the live rows of a real call. attend: the backend under test. options: the arm's own.
    gate_tau and limits: the lock's. head: whose slice is kept. rank, sample, step, layer: where in the run this is.

    Returns the report (``passed`` may be False: see ``require_green``) and the tensors of its slice on the CPU, as
    GateSlice names them. Where an output is not finite the gate is red and the statistics cover the finite part.
    """
    _, tokens, heads, dim = q.shape
    common = {"scale": options.scale, "thresh_type": options.thresh_type}
    # Neither sink nor dense rows here: a backend may compute those rows by SDPA itself, which would hide its kernel.
    all_exact = attend(q, k, v, tau=gate_tau, **common)  # type: ignore[arg-type]
    real = attend(q, k, v, tau=options.tau, sink=options.sink, dense_rows=options.dense_rows, **common)  # type: ignore[arg-type]

    against_sdpa, against_fp32, sdpa_against_fp32, real_tau = (_Errors() for _ in range(4))
    rejudged = rejudged_failed = 0
    for h in range(heads):
        q_h, k_h, v_h, exact_h, real_h = (x[0, :, h] for x in (q, k, v, all_exact.out, real.out))  # [T, D]
        sdpa_h = sdpa(q_h, k_h, v_h, options.scale)
        fp32_h = softmax_attention_fp32(q_h, k_h, v_h, options.scale)
        beyond = against_sdpa.add(exact_h, sdpa_h) > limits.max_abs  # [T]
        still_beyond = against_fp32.add(exact_h, fp32_h) > limits.max_abs
        sdpa_against_fp32.add(sdpa_h, fp32_h)
        real_tau.add(real_h, sdpa_h)
        rejudged += int(beyond.sum())
        rejudged_failed += int((beyond & still_beyond).sum())
        if h == head:
            sdpa_kept = sdpa_h

    finite = all(errors.finite for errors in (against_sdpa, against_fp32, sdpa_against_fp32, real_tau))
    gating = against_sdpa.stats()
    within = gating.mean_abs <= limits.mean_abs and gating.rel_l2 <= limits.rel_l2
    blocks = slice_blocks(tokens, options)
    report = GateReport(
        rank=rank,
        sample=sample,
        step=step,
        layer=layer,
        backend=all_exact.backend,
        shape=(1, tokens, heads, dim),
        scale=options.scale,
        gate_tau=gate_tau,
        tau=options.tau,
        thresh_type=options.thresh_type,
        sink=options.sink,
        dense_rows=options.dense_rows,
        limits=limits,
        against_sdpa=gating,
        against_fp32=against_fp32.stats(),
        sdpa_against_fp32=sdpa_against_fp32.stats(),
        rejudged_rows=rejudged,
        rejudged_failed=rejudged_failed,
        finite=finite,
        real_tau=real_tau.stats(),
        passed=finite and within and rejudged_failed == 0,
        slice=GateSlice(head=head, blocks=blocks),
    )

    rows = torch.cat([torch.arange(b * BLOCK, min((b + 1) * BLOCK, tokens)) for b in blocks])
    at = rows.to(q.device)
    kept = {
        "q": q[0, at, head],
        "k": k[0, :, head],
        "v": v[0, :, head],
        "rows": rows,
        "all_exact": all_exact.out[0, at, head],
        "sdpa": sdpa_kept[at],
        "real_tau": real.out[0, at, head],
        "route_counts": real.route_counts,
    }
    return report, {name: x.cpu().contiguous() for name, x in kept.items()}


def require_green(report: GateReport) -> None:
    """Raises GateFailed, with the statistics beside their limits, unless the report passed."""
    if report.passed:
        return
    stats, limits = report.against_sdpa, report.limits
    found = "; ".join(
        f"{name} {getattr(stats, name):.3g} (limit {getattr(limits, name):.3g})"
        for name in ("max_abs", "mean_abs", "rel_l2")
    )
    again = f"; {report.rejudged_failed} of {report.rejudged_rows} rows beyond max_abs fail against FP32 too"
    raise GateFailed(
        f"the Real-QKV gate is red for {report.backend} on rank {report.rank}: {found}"
        + (again if report.rejudged_rows else "")
        + ("" if report.finite else "; NaN or Inf in an output"),
        needed="the kernel with everything routed equals SDPA within the lock's limits, and finite outputs",
        remedy="do not use timings of this arm; check the kernel on this GPU with `python -m engine.attention.bench`",
    )
