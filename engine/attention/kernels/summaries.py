"""Block summaries of Sol-Attn on the GPU: query means, key means, value sums, and the statistics behind the thresholds.

Names as in ``engine.attention.routing``, which is the PyTorch form of the same step: T tokens, H heads, D = 128
channels, N = ceil(T / 64) blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.attention.call import ThreshType
from engine.attention.routing import BLOCK, num_blocks

HEAD_DIM = 128
# Triton 3.6 pipelines pointer loads as asynchronous copies, and on SM90 gives their tiles to the tensor cores without
# the fence that PTX asks for: with 8 warps the second moments differed from run to run. One stage has no such copies.
UNPIPELINED = 1
WARPS = 2  # few and long loads a thread: 0.47 ms at the published shape where 4 take 0.67


@triton.jit
def _tile(p_x, stride_t, stride_h, rows, i_head, T, D: tl.constexpr):
    p_tile = p_x + rows.to(tl.int64)[:, None] * stride_t + i_head.to(tl.int64) * stride_h + tl.arange(0, D)[None, :]
    return tl.load(p_tile, mask=(rows < T)[:, None], other=0.0)  # [BT, D]


@triton.jit(do_not_specialize=("T", "H"))
def _summarise_kernel(
    p_q, p_k, p_v, p_q_mean, p_k_mean, p_v_sum,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    T, H,
    D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    i_head = tl.program_id(0)
    i_block = tl.program_id(1)
    length = tl.minimum(BT, T - i_block * BT).to(tl.float32)
    rows = i_block * BT + tl.arange(0, BT)
    # All three loads before the first sum: it is the loads in flight that fill the memory's bandwidth.
    b_q = _tile(p_q, stride_qt, stride_qh, rows, i_head, T, D)
    b_k = _tile(p_k, stride_kt, stride_kh, rows, i_head, T, D)
    b_v = _tile(p_v, stride_vt, stride_vh, rows, i_head, T, D)
    b_q = tl.sum(b_q.to(tl.float32), axis=0)  # [D]
    b_k = tl.sum(b_k.to(tl.float32), axis=0)
    b_v = tl.sum(b_v.to(tl.float32), axis=0)
    o_summary = (i_block.to(tl.int64) * H + i_head) * D + tl.arange(0, D)
    tl.store(p_q_mean + o_summary, b_q / length)
    tl.store(p_k_mean + o_summary, (b_k / length).to(tl.bfloat16))
    tl.store(p_v_sum + o_summary, b_v.to(tl.bfloat16))


@triton.jit(do_not_specialize=("N", "H"))
def _statistics_kernel(
    p_k_mean, p_mu, p_variance, p_moments, N, H,
    EXACT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Over one head's N block means: mean and variance of BD channels, or (EXACT) mean and second moments of all."""
    i_head = tl.program_id(0)
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    b_sum = tl.zeros([BD], tl.float32)
    b_square = tl.zeros([BD], tl.float32)
    b_moments = tl.zeros([BD, BD], tl.float32)  # unused, and dropped by the compiler, unless EXACT, when BD = D
    for first in range(0, N, BN):
        blocks = first + tl.arange(0, BN)
        p_tile = p_k_mean + (blocks.to(tl.int64)[:, None] * H + i_head) * D + channels[None, :]
        b_k = tl.load(p_tile, mask=(blocks < N)[:, None], other=0.0)  # [BN, BD]
        b_f = b_k.to(tl.float32)
        b_sum += tl.sum(b_f, axis=0)
        if EXACT:
            b_moments = tl.dot(tl.trans(b_k), b_k, b_moments)  # [D, D]
        else:
            b_square += tl.sum(b_f * b_f, axis=0)
    b_mu = b_sum / N
    tl.store(p_mu + i_head * D + channels, b_mu)
    if EXACT:
        # Stored BF16 twice, before and after the division, as published.
        b_moments = (b_moments.to(tl.bfloat16).to(tl.float32) / N).to(tl.bfloat16)
        tl.store(p_moments + i_head * D * D + channels[:, None] * D + channels[None, :], b_moments)
    else:
        tl.store(p_variance + i_head * D + channels, tl.maximum(b_square / N - b_mu * b_mu, 0.0))


@dataclass(frozen=True)
class Summaries:
    """q_mean [N, H, D] float32; k_mean and v_sum [N, H, D] bfloat16; over the blocks of a head, mu [H, D] float32 and
    spread: the variances [H, D] float32 for ``diag``, the second moments [H, D, D] bfloat16 for ``exact``."""

    q_mean: torch.Tensor
    k_mean: torch.Tensor
    v_sum: torch.Tensor
    mu: torch.Tensor
    spread: torch.Tensor


def summarise(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, thresh_type: ThreshType) -> Summaries:
    """Summaries of q, k, v [1, T, H, 128] bfloat16, any strides whose last is 1. Two launches, no synchronisation."""
    _, tokens, heads, dim = q.shape
    blocks, exact = num_blocks(tokens), thresh_type == "exact"
    q_mean = torch.empty((blocks, heads, dim), dtype=torch.float32, device=q.device)
    k_mean = torch.empty((blocks, heads, dim), dtype=torch.bfloat16, device=q.device)
    v_sum = torch.empty_like(k_mean)
    mu = torch.empty((heads, dim), dtype=torch.float32, device=q.device)
    spread = torch.empty((heads, dim, dim), dtype=torch.bfloat16, device=q.device) if exact else torch.empty_like(mu)
    _summarise_kernel[(heads, blocks)](
        q, k, v, q_mean, k_mean, v_sum,
        q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2),
        tokens, heads,
        D=dim, BT=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    tile = dim if exact else 32
    _statistics_kernel[(heads, dim // tile)](
        k_mean, mu, spread, spread, blocks, heads,
        EXACT=exact, D=dim, BD=tile, BN=64 if exact else 256, num_warps=8 if exact else 4, num_stages=UNPIPELINED,
    )  # fmt: skip
    return Summaries(q_mean, k_mean, v_sum, mu, spread)
