"""The attention step of Sol-Attn in plain Triton with pointer loads: compute capability 8.0 and 8.9, any strides.

One program takes one query block of one head and walks that block's own list (groups of one). The loads of the list's K
and V tiles are asynchronous copies, several tiles ahead, as the compiler's pipeliner arranges them for ``num_stages``.
The softmax keeps running maxima, so any magnitude that float32 scores can have is computed.

``repair`` does the query blocks again that another kernel flagged, with the same steps, from the bitmap of the routes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.attention.call import SolAttentionOptions
from engine.attention.kernels.lists import Lists, dense_block_range
from engine.attention.kernels.summaries import UNPIPELINED, Summaries
from engine.attention.routing import BLOCK, LOG2_E, num_blocks

LOWEST = tl.constexpr(-1.0e38)  # below every score; finite, so that differences of two of them are no NaN
LN_2 = tl.constexpr(0.6931471805599453)
# Arguments that vary from document to document: no kernel is compiled again for a value of them.
COUNTS = (
    "T", "N", "H", "words", "dense_start", "dense_stop", "dense_skip_first", "dense_skip_last", "dense_blocks"
)  # fmt: skip


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
def _attend_block(
    p_q, p_k, p_v, p_k_mean, p_v_sum, p_o, p_lse, p_list, length, p_row,
    stride_qt, stride_kt, stride_vt, stride_ot,
    c, i_q, i_head, is_dense, dense_start, dense_stop, T, N, H,
    WALK_LIST: tl.constexpr, SHIFT: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr,
    BT: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One query block of one head, to which p_q, p_k, p_v, p_o point; p_row: its row of the bitmap."""
    o_t = tl.arange(0, BT)
    o_d = tl.arange(0, D)
    rows = i_q * BT + o_t
    b_q = tl.load(p_q + rows.to(tl.int64)[:, None] * stride_qt + o_d[None, :], mask=(rows < T)[:, None], other=0.0)
    p_k += o_t.to(tl.int64)[None, :] * stride_kt + o_d[:, None]  # [D, BT]
    p_v += o_t.to(tl.int64)[:, None] * stride_vt + o_d[None, :]  # [BT, D]

    acc = tl.zeros([BT, D], tl.float32)
    b_max = tl.full([BT], LOWEST, tl.float32)
    b_sum = tl.zeros([BT], tl.float32)

    tail = T - (N - 1) * BT
    if not is_dense:
        for first in range(0, N, BT):
            j = first + o_t
            o_mean = (j.to(tl.int64) * H + i_head) * D
            b_k = tl.load(p_k_mean + o_mean[None, :] + o_d[:, None], mask=(j < N)[None, :], other=0.0)
            b_v = tl.load(p_v_sum + o_mean[:, None] + o_d[None, :], mask=(j < N)[:, None], other=0.0)
            bit = (tl.load(p_row + j // 32) >> (j % 32)) & 1
            weight = tl.where(j == N - 1, tail, BT).to(tl.float32)
            b_max, b_sum, acc = _masked_step(b_q, b_k, b_v, c, bit == 0, weight, b_max, b_sum, acc)

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

    if WALK_LIST:
        MASK: tl.constexpr = (1 << SHIFT) - 1
        for t in tl.range(0, tl.where(is_dense, whole, length), num_stages=STAGES):
            j = tl.load(p_list + t, mask=not is_dense, other=0).to(tl.int32) & MASK
            step = tl.where(is_dense, t, j).to(tl.int64) * BT
            b_k = tl.load(p_k + step * stride_kt)
            b_v = tl.load(p_v + step * stride_vt)
            b_max, b_sum, acc = _step(b_q, b_k, b_v, c, b_max, b_sum, acc)
    else:
        for j in range(whole):
            bit = (tl.load(p_row + j // 32) >> (j % 32)) & 1
            if is_dense | (bit != 0):
                step = tl.full((), j, tl.int64) * BT
                b_k = tl.load(p_k + step * stride_kt)
                b_v = tl.load(p_v + step * stride_vt)
                b_max, b_sum, acc = _step(b_q, b_k, b_v, c, b_max, b_sum, acc)

    keep = (rows < T) & (((rows >= dense_start) & (rows < dense_stop)) == is_dense)
    p_out = p_o + rows.to(tl.int64)[:, None] * stride_ot + o_d[None, :]
    tl.store(p_out, (acc / b_sum[:, None]).to(p_o.dtype.element_ty), mask=keep[:, None])
    if LSE:
        tl.store(p_lse + rows.to(tl.int64) * H + i_head, (b_max + tl.log2(b_sum)) * LN_2, mask=keep)


@triton.jit
def _item(ticket, dense_blocks, dense_start, N, H, BT: tl.constexpr):
    """Query block, head and kind of a ticket. Dense query blocks come first: each is several times a sparse one."""
    is_dense = ticket < dense_blocks * H
    rest = tl.where(is_dense, ticket, ticket - dense_blocks * H)
    of_head = tl.where(is_dense, dense_blocks, N)
    return rest % of_head + tl.where(is_dense, dense_start // BT, 0), (rest // of_head).to(tl.int64), is_dense


@triton.jit(do_not_specialize=COUNTS)
def _attend_kernel(
    p_q, p_k, p_v, p_k_mean, p_v_sum, p_o, p_lse, p_lists, p_lengths, p_bits,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    c, dense_start, dense_stop, dense_skip_first, dense_skip_last, dense_blocks,
    T, N, H, words,
    SHIFT: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr, BT: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    i_q, i_head, is_dense = _item(tl.program_id(0), dense_blocks, dense_start, N, H, BT)
    if (not is_dense) & (i_q >= dense_skip_first) & (i_q < dense_skip_last):
        return
    i_row = i_head * N + i_q
    _attend_block(
        p_q + i_head * stride_qh, p_k + i_head * stride_kh, p_v + i_head * stride_vh, p_k_mean, p_v_sum,
        p_o + i_head * stride_oh, p_lse, p_lists + i_row * N, tl.load(p_lengths + i_row), p_bits + i_row * words,
        stride_qt, stride_kt, stride_vt, stride_ot,
        c, i_q, i_head, is_dense, dense_start, dense_stop, T, N, H,
        True, SHIFT, LSE, STAGES, BT, D,
    )  # fmt: skip


@triton.jit(do_not_specialize=tuple(name for name in COUNTS if "skip" not in name))
def _repair_kernel(
    p_q, p_k, p_v, p_k_mean, p_v_sum, p_o, p_lse, p_bits, p_flags,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    c, dense_start, dense_stop, dense_blocks,
    T, N, H, words,
    LSE: tl.constexpr, BT: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    if tl.load(p_flags + N * H) == 0:
        return
    for ticket in range(tl.program_id(0), (dense_blocks + N) * H, tl.num_programs(0)):
        i_q, i_head, is_dense = _item(ticket, dense_blocks, dense_start, N, H, BT)
        if tl.load(p_flags + i_q * H + i_head) != 0:
            _attend_block(
                p_q + i_head * stride_qh, p_k + i_head * stride_kh, p_v + i_head * stride_vh, p_k_mean, p_v_sum,
                p_o + i_head * stride_oh, p_lse, p_bits, 0, p_bits + (i_head * N + i_q) * words,
                stride_qt, stride_kt, stride_vt, stride_ot,
                c, i_q, i_head, is_dense, dense_start, dense_stop, T, N, H,
                False, 0, LSE, 1, BT, D,
            )  # fmt: skip


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
    """Fill out [T, H, 128] (and lse [T, H]) from q, k, v [T, H, 128], bfloat16. ``lists``: of group 1. One launch."""
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
        SHIFT=lists.shift, LSE=lse is not None, STAGES=stages, BT=BLOCK, D=dim, num_warps=4, num_stages=stages,
    )  # fmt: skip


def repair(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    summaries: Summaries,
    lists: Lists,
    options: SolAttentionOptions,
) -> None:
    """Compute the query blocks of ``lists.flags`` again. One launch, which ends at once where there are none."""
    tokens, heads, dim = q.shape
    start, stop = options.dense_rows
    dense_blocks = num_blocks(stop) - start // BLOCK if stop > start else 0
    programs = 2 * torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    _repair_kernel[(programs,)](
        q, k, v, summaries.k_mean, summaries.v_sum, out, lse if lse is not None else summaries.mu,
        lists.bits, lists.flags,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        options.scale * LOG2_E, start, stop, dense_blocks,
        tokens, num_blocks(tokens), heads, lists.bits.shape[2],
        LSE=lse is not None, BT=BLOCK, D=dim, num_warps=4, num_stages=UNPIPELINED,
    )  # fmt: skip
