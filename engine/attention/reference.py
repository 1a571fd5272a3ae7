"""Sol-Attn in plain PyTorch, on any device: the oracle of the kernels, and the backend of the CPU target.

A block of keys that is not routed still takes part in the softmax, as if each of its tokens had the score of the mean
key and the mean value. So the whole operator is one softmax over T tokens and N "virtual tokens": the blocks' key
means, each weighing as many tokens as its block holds, with the sum of the block's values. For every query block either
a block's tokens or its virtual token are masked. That is how it is computed here, one query block of 64 rows at a time.

Rounding points in ``kernel`` precision, the default (arithmetic in float32 between them):
  1. key means and value sums stored BF16, and the BF16 stores of the ``exact`` threshold: see routing.py;
  2. probabilities rounded to BF16 before they multiply V; the denominator sums the unrounded ones. A kernel rounds
     relative to the running maximum, this file relative to the final one: the same relative error, not the same bits;
  3. the output, to the dtype of v.
In ``float64`` precision point 2 is gone and the arithmetic is float64; the stored summaries (1) stay BF16, since they
are part of what the operator is. A kernel's distance to it is the kernel's own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from engine.attention.call import SolAttentionOptions, SolAttentionResult
from engine.attention.routing import BLOCK, LOG2_E, block_lengths, route_from_summaries, summarise

Precision = Literal["kernel", "float64"]


@contextmanager
def ieee_matmul() -> Iterator[None]:
    """Float32 matrix products in float32: whatever the process set, no TF32 inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions) -> str | None:
    """The reference takes every device, head dimension and floating-point dtype."""
    return None if q.dtype.is_floating_point else f"q is {q.dtype}; needed: a floating-point dtype"


@torch.no_grad()
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: SolAttentionOptions,
    out: torch.Tensor | None = None,
    *,
    precision: Precision = "kernel",
) -> SolAttentionResult:
    """Sol-Attn of q, k, v [1, T, H, D]; memory beyond the inputs is about (2 D + 4 x 64) x T x H float32."""
    _, tokens, heads, _ = q.shape
    dtype = torch.float64 if precision == "float64" else torch.float32
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    lse = torch.empty((1, tokens, heads), dtype=torch.float32, device=v.device) if options.return_lse else None
    lengths = block_lengths(tokens, q.device)

    with ieee_matmul():
        summaries = summarise(q[0], k[0], v[0], dtype)
        routed = route_from_summaries(summaries, options, tokens)
        keys = torch.cat((k[0].to(dtype), summaries.k_mean.to(dtype))).permute(1, 2, 0).contiguous()  # [H, D, T+N]
        values = torch.cat((v[0].to(dtype), summaries.v_sum.to(dtype))).transpose(0, 1).contiguous()  # [H, T+N, D]
        weights = torch.cat((torch.ones(tokens, device=q.device), lengths)).to(dtype)  # [T+N]
        is_token = torch.arange(len(weights), device=q.device) < tokens  # [T+N]

        for i, first in enumerate(range(0, tokens, BLOCK)):
            rows = slice(first, min(first + BLOCK, tokens))
            exact = routed.exact[i].T  # [H, N]
            live = torch.cat((exact.repeat_interleave(lengths, dim=1), ~exact), dim=1)[:, None]  # [H, 1, T+N]
            dense = torch.arange(rows.start, rows.stop, device=q.device)
            dense = (dense >= options.dense_rows[0]) & (dense < options.dense_rows[1])  # [R]
            if dense.any():
                live = torch.where(dense[:, None], is_token, live)  # [H, R, T+N]

            scores = (q[0, rows].transpose(0, 1).to(dtype) @ keys) * (options.scale * LOG2_E)  # [H, R, T+N], base 2
            scores = scores.masked_fill(~live, -torch.inf)
            top = scores.amax(-1, keepdim=True)
            p = torch.exp2(scores - top)
            total = p @ weights  # [H, R]
            p = p if precision == "float64" else p.bfloat16().to(dtype)
            out[0, rows] = ((p @ values) / total[..., None]).transpose(0, 1).to(out.dtype)
            if lse is not None:
                lse[0, rows] = ((top[..., 0] + total.log2()) * math.log(2)).T.float()
    return SolAttentionResult(out, routed.counts, lse, "reference")
