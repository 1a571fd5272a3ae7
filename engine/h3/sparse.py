"""One sparse call of a run: gated if it is its process's first, and its routed blocks recorded."""

from __future__ import annotations

import torch
from safetensors.torch import save

from config.record import GateDone, GateLimits
from engine.attention import sol_attention, sol_attention_packed
from engine.attention.call import SolAttentionOptions
from engine.evidence import write_model
from engine.gate import require_green, run_gate
from engine.h3.tracker import RoutedCall, Tracker


def sparse_attention(
    tracker: Tracker, layer: int, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """One sparse call of the run: gated if it is the process's first, its routed blocks recorded.

    q, k, v and the result: [rows, H, D] BF16, padding rows included (zero in the result).

    Raises:
        GateFailed: the gate is red.
        RuntimeError: the process's first sparse call is in a measured request; a gate there would be timed with it.
    """
    assert tracker.layout is not None
    layout, policy = tracker.layout, tracker.target.sol_attn
    options = SolAttentionOptions(
        scale=scale,
        tau=policy.tau,
        thresh_type=policy.thresh_type,
        sink=layout.sink_range(policy.sink),
        dense_rows=layout.dense_rows_range(policy.dense_rows),
    )
    if not tracker.gated:
        if tracker.phase != "warmup":
            raise RuntimeError(
                f"sample {tracker.sample} makes the first sparse call, and it is no warm-up: no gate ran. "
                "Needed: a sparse call in the warm-up; --set warmup.compute_last=true, or more warm-up steps"
            )
        gate(tracker, layer, options, *(x[None, : layout.live_tokens] for x in (q, k, v)))
    result = sol_attention_packed(
        q,
        k,
        v,
        layout.live_tokens,
        scale=scale,
        tau=options.tau,
        thresh_type=options.thresh_type,
        sink=options.sink,
        dense_rows=options.dense_rows,
        backend=tracker.policy.sparse,
    )
    # Reading the counts here would wait for the device at every call; the tracker reads a forward's counts together.
    tracker.routed.append(
        RoutedCall(layer, result.backend, int(result.route_counts.shape[0]), result.route_counts.sum(0))
    )
    return result.out


def gate(
    tracker: Tracker, layer: int, options: SolAttentionOptions, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Run the Real-QKV gate on a live call and leave its report and slice in the record, whatever the outcome.

    Raises:
        GateFailed: the gate is red.
    """
    limits = tracker.target.gate
    backend = tracker.policy.sparse
    report, kept = run_gate(
        q,
        k,
        v,
        attend=lambda *tensors, **kwargs: sol_attention(*tensors, **kwargs, backend=backend),
        options=options,
        gate_tau=limits.tau,
        limits=GateLimits(max_abs=limits.max_abs, mean_abs=limits.mean_abs, rel_l2=limits.rel_l2),
        head=0,
        rank=tracker.rank,
        sample=tracker.sample,
        step=tracker.step,
        layer=layer,
    )
    folder = tracker.spec.gate_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"gate-rank{tracker.rank}.safetensors").write_bytes(save(kept))
    write_model(folder / f"gate-rank{tracker.rank}.json", report)
    tracker.log.write(GateDone, sample=tracker.sample, step=tracker.step, layer=layer, passed=report.passed)
    require_green(report)
    tracker.gated = True
