"""The attention step of Sol-Attn in plain Triton with pointer loads: compute capability 8.0 and 8.9, any strides.

One program takes one query block of one head and walks that block's own list (groups of one). The loads of the list's K and
V tiles are asynchronous copies, several tiles ahead, as the compiler's pipeliner arranges them for ``num_stages``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.attention.call import SolAttentionOptions
from engine.attention.kernels.lists import Lists, dense_block_range
from engine.attention.kernels.summaries import Summaries
from engine.attention.routing import BLOCK, LOG2_E, num_blocks

LOWEST = tl.constexpr(-1.0e38)  # below every score; finite, so that differences of two of them are no NaN
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _step(b_q, b_k, b_v, c, b_max, b_sum, acc):
    """One key tile without mask: b_k [D, BT], b_v [BT, D]."""
    b_s = tl.dot(b_q, b_k)  # [BT, BT]
    top = tl.maximum(b_max, tl.max(b_s, 1) * c)
    alpha = tl.exp2(b_max - top)
    b_p = tl.exp2(b_s * c - top[:, None])
    b_sum = b_sum * alpha + tl.sum(b_p, 1)
    acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * alpha[:, None])
    return top, b_sum, acc


@triton.jit
def _masked_step(b_q, b_k, b_v, c, live, weight, b_max, b_sum, acc):
    """One tile of which the columns ``live`` count, each for ``weight`` tokens."""
    b_s = tl.where(live[None, :], tl.dot(b_q, b_k) * c, float("-inf"))
    top = tl.maximum(b_max, tl.max(b_s, 1))
    alpha = tl.exp2(b_max - top)
    b_p = tl.exp2(b_s - top[:, None])
    b_sum = b_sum * alpha + tl.sum(b_p * weight[None, :], 1)
    acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * alpha[:, None])
    return top, b_sum, acc


@triton.jit
def _attend_kernel(
    p_q, p_k, p_v, p_k_mean, p_v_sum, p_o, p_lse, p_lists, p_lengths, p_bits,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    c, dense_start, dense_stop, dense_skip_first, dense_skip_last, dense_blocks,
    T, N, H, words,
    SHIFT: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr, BT: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    # Dense query blocks first: each is several times a sparse one, so none may start last.
    pid = tl.program_id(0)
    is_dense = pid < dense_blocks * H
    rest = tl.where(is_dense, pid, pid - dense_blocks * H)
    of_head = tl.where(is_dense, dense_blocks, N)
    i_head = (rest // of_head).to(tl.int64)
    i_q = rest % of_head + tl.where(is_dense, dense_start // BT, 0)
    if (not is_dense) & (i_q >= dense_skip_first) & (i_q < dense_skip_last):
        return

    o_t = tl.arange(0, BT)
    o_d = tl.arange(0, D)
    rows = i_q * BT + o_t
    p_tile = p_q + i_head * stride_qh + rows.to(tl.int64)[:, None] * stride_qt + o_d[None, :]
    b_q = tl.load(p_tile, mask=(rows < T)[:, None], other=0.0)  # [BT, D]
    p_k += i_head * stride_kh + o_t.to(tl.int64)[None, :] * stride_kt + o_d[:, None]  # [D, BT]
    p_v += i_head * stride_vh + o_t.to(tl.int64)[:, None] * stride_vt + o_d[None, :]  # [BT, D]

    acc = tl.zeros([BT, D], tl.float32)
    b_max = tl.full([BT], LOWEST, tl.float32)
    b_sum = tl.zeros([BT], tl.float32)

    p_row = p_bits + (i_head * N + i_q) * words
    tail = T - (N - 1) * BT
    if not is_dense:
        for first in range(0, N, BT):
            j = first + o_t
            o_mean = (j.to(tl.int64) * H + i_head) * D
            b_k = tl.load(p_k_mean + o_mean[None, :] + o_d[:, None], mask=(j < N)[None, :], other=0.0)
            b_v = tl.load(p_v_sum + o_mean[:, None] + o_d[None, :], mask=(j < N)[:, None], other=0.0)
            bit = (tl.load(p_row + j // 32) >> (j % 32)) & 1
            weight = tl.where(j == N - 1, tail, BT).to(tl.float32)
            b_max, b_sum, acc = _masked_step(b_q, b_k, b_v, c, (bit == 0) & (j < N), weight, b_max, b_sum, acc)

    whole = T // BT
    if whole < N:
        bit = (tl.load(p_row + whole // 32) >> (whole % 32)) & 1
        if is_dense | (bit != 0):
            live = o_t < tail
            step = whole.to(tl.int64) * BT
            b_k = tl.load(p_k + step * stride_kt, mask=live[None, :], other=0.0)
            b_v = tl.load(p_v + step * stride_vt, mask=live[:, None], other=0.0)
            ones = tl.full([BT], 1.0, tl.float32)
            b_max, b_sum, acc = _masked_step(b_q, b_k, b_v, c, live, ones, b_max, b_sum, acc)

    MASK: tl.constexpr = (1 << SHIFT) - 1
    p_list = p_lists + (i_head * N + i_q) * N
    length = tl.where(is_dense, whole, tl.load(p_lengths + i_head * N + i_q))
    for t in tl.range(0, length, num_stages=STAGES):
        j = tl.load(p_list + t, mask=not is_dense, other=0).to(tl.int32) & MASK
        step = tl.where(is_dense, t, j).to(tl.int64) * BT
        b_k = tl.load(p_k + step * stride_kt)
        b_v = tl.load(p_v + step * stride_vt)
        b_max, b_sum, acc = _step(b_q, b_k, b_v, c, b_max, b_sum, acc)

    keep = (rows < T) & (((rows >= dense_start) & (rows < dense_stop)) == is_dense)
    p_out = p_o + i_head * stride_oh + rows.to(tl.int64)[:, None] * stride_ot + o_d[None, :]
    tl.store(p_out, (acc / b_sum[:, None]).to(p_o.dtype.element_ty), mask=keep[:, None])
    if LSE:
        tl.store(p_lse + rows.to(tl.int64) * H + i_head, (b_max + tl.log2(b_sum)) * LN_2, mask=keep)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    summaries: Summaries,
    lists: Lists,
    options: SolAttentionOptions,
    *,
    stages: int,
) -> None:
    """Fill out [T, H, 128] (and lse [T, H]) from q, k, v [T, H, 128], all bfloat16. ``lists`` are of group 1. One launch."""
    tokens, heads, dim = q.shape
    blocks = num_blocks(tokens)
    start, stop = options.dense_rows
    dense_blocks = num_blocks(stop) - start // BLOCK if stop > start else 0
    _attend_kernel[((dense_blocks + blocks) * heads,)](
        q, k, v, summaries.k_mean, summaries.v_sum, out, lse if lse is not None else summaries.mu,
        lists.entries, lists.lengths, lists.bits,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        options.scale * LOG2_E, start, stop, *dense_block_range(tokens, options.dense_rows), dense_blocks,
        tokens, blocks, heads, lists.bits.shape[2],
        SHIFT=lists.shift, LSE=lse is not None, STAGES=stages, BT=BLOCK, D=dim, num_warps=4,
    )  # fmt: skip
