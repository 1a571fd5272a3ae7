"""Routing on the GPU: from the block summaries to compact lists of the key blocks to compute exactly.

Query blocks are taken in groups of G neighbours, which later share every K/V tile that any of them needs. A group's
list holds the union of its members' key blocks in increasing order, each entry with one bit a member:

    entry = key block | member bits << shift        (int16 with shift 12 up to 4096 blocks, else int32 with shift 24)

A ragged last key block is left out of the lists: it needs a mask that no other block does, so the attention kernels
handle it apart, and look its route up in the bitmap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.attention.call import SolAttentionOptions
from engine.attention.kernels.summaries import UNPIPELINED, Summaries
from engine.attention.routing import BLOCK, LOG2_E, VARIANCE_EPSILON, num_blocks, sink_block_range

SHORT_BLOCKS = 4096  # key block numbers below this fit in the 12 low bits of an int16 entry
# Arguments that vary from document to document: no kernel is compiled again for a value of them.
COUNTS = ("T", "N", "H", "groups", "words", "sink_first", "sink_last", "dense_first", "dense_last")
LAUNCH = {"BN": 64, "num_warps": 4, "num_stages": UNPIPELINED}


@triton.jit
def _split(x):
    """float32 as the sum of three bfloat16: 24 bits of significand, so that BF16 matrix products lose nothing."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high, middle, low


@triton.jit(do_not_specialize=COUNTS)
def _route_kernel(
    p_q_mean, p_k_mean, p_mu, p_spread,
    p_lists, p_lengths, p_bits, p_counts, p_counter, p_reference, p_flags,
    c, tau, epsilon,
    sink_first, sink_last,
    dense_first, dense_last,
    T, N, H, groups, words,
    EXACT: tl.constexpr, G: tl.constexpr, SLOTS: tl.constexpr, SHIFT: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """R rows of one head: R / SLOTS groups of SLOTS rows (G's power of 2), of which the first G are query blocks.

    Query blocks in [dense_first, dense_last) attend densely by other means: counted and in the bitmap, in no list.
    """
    GT: tl.constexpr = R // SLOTS
    i_tile = tl.program_id(0)
    i_head = tl.program_id(1)
    rows = tl.arange(0, R)
    i_q = (i_tile * GT + rows // SLOTS) * G + rows % SLOTS  # [R]
    is_q = (rows % SLOTS < G) & (i_q < N)
    channels = tl.arange(0, D)

    p_tile = p_q_mean + (i_q.to(tl.int64)[:, None] * H + i_head) * D + channels[None, :]
    b_q = tl.load(p_tile, mask=is_q[:, None], other=0.0)  # [R, D]
    b_mu = tl.load(p_mu + i_head * D + channels)
    if (i_tile == 0) & (i_head == 0):
        tl.store(p_counter, 0)
        tl.store(p_flags + N * H, 0)
    if EXACT:
        b_centroid = b_q.to(tl.bfloat16)
        b_moments = tl.load(p_spread + i_head * D * D + channels[:, None] * D + channels[None, :])  # [D, D]
        b_projected = tl.dot(b_centroid, b_moments)  # [R, D]
        b_c = b_centroid.to(tl.float32)
        b_mean = tl.sum(b_c * b_mu[None, :], axis=1)
        b_variance = tl.sum(b_projected * b_c, axis=1) - b_mean * b_mean
    else:
        b_spread = tl.load(p_spread + i_head * D + channels)
        b_mean = tl.sum(b_q * b_mu[None, :], axis=1)
        b_variance = tl.sum(b_q * b_q * b_spread[None, :], axis=1)
    b_limit = c * b_mean + tau * tl.sqrt(tl.maximum(c * c * b_variance, 0.0) + epsilon)  # [R]

    q_high, q_middle, q_low = _split(b_q)
    b_member = tl.where(is_q & ((i_q < dense_first) | (i_q >= dense_last)), 1 << (rows % SLOTS), 0)  # [R]
    b_exact = tl.zeros([R, BN], tl.int32)
    b_best = tl.full([R, BN], float("-inf"), tl.float32)
    b_length = tl.zeros([GT], tl.int32)
    i_group = i_tile * GT + tl.arange(0, GT)
    p_list = p_lists + (i_head * groups + i_group).to(tl.int64) * N  # [GT]
    whole = T // BT  # key blocks of 64 tokens; a ragged one is in no list
    for first in range(0, N, BN):
        j = first + tl.arange(0, BN)
        p_means = p_k_mean + (j.to(tl.int64)[:, None] * H + i_head) * D + channels[None, :]
        b_k = tl.trans(tl.load(p_means, mask=(j < N)[:, None], other=0.0))  # [D, BN]
        b_s = tl.dot(q_low, b_k)
        b_s = tl.dot(q_middle, b_k, b_s)
        b_s = tl.dot(q_high, b_k, b_s) * c  # [R, BN]
        b_best = tl.maximum(b_best, tl.where((j < N)[None, :], b_s, float("-inf")))
        near = (i_q[:, None] - j[None, :] <= 1) & (j[None, :] - i_q[:, None] <= 1)
        sink = (j >= sink_first) & (j < sink_last)
        exact = (b_s > b_limit[:, None]) | near | sink[None, :]
        exact = exact & is_q[:, None] & (j < N)[None, :]
        b_exact += exact.to(tl.int32)

        b_words = tl.reshape((exact | (j >= N)[None, :]).to(tl.int32), [R, BN // 32, 32])
        b_words = tl.sum(b_words << tl.arange(0, 32)[None, None, :], axis=2)  # [R, BN / 32]
        i_word = first // 32 + tl.arange(0, BN // 32)
        p_word = p_bits + (i_head.to(tl.int64) * N + i_q[:, None]) * words + i_word[None, :]
        tl.store(p_word, b_words, mask=is_q[:, None] & (i_word < words)[None, :])

        b_bits = tl.where(exact & (j < whole)[None, :], b_member[:, None], 0)
        b_bits = tl.sum(tl.reshape(b_bits, [GT, SLOTS, BN]), axis=1)  # [GT, BN]
        b_some = (b_bits != 0).to(tl.int32)
        position = b_length[:, None] + tl.cumsum(b_some, axis=1) - 1
        entry = j[None, :] | (b_bits << SHIFT)
        keep = (b_some != 0) & (i_group < groups)[:, None]
        tl.store(p_list[:, None] + position, entry.to(p_lists.dtype.element_ty), mask=keep)
        b_length += tl.sum(b_some, axis=1)
    b_count = tl.sum(b_exact, axis=1)
    b_top = tl.max(b_best, axis=1)
    tl.store(p_lengths + i_head * groups + i_group, b_length, mask=i_group < groups)
    tl.store(p_counts + i_q * H + i_head, b_count, mask=is_q)
    tl.store(p_reference + i_q * H + i_head, b_top, mask=is_q)
    tl.store(p_flags + i_q * H + i_head, 0, mask=is_q)


@dataclass(frozen=True)
class Lists:
    """What the attention kernels walk.

    entries: [H, groups, N] int16 or int32, see the module; only the first ``lengths`` entries of a row are written.
    lengths: [H, groups] int32.
    bits: [H, N, words] int32, bit j % 32 of word j // 32 set when query block i computes key block j exactly;
        bits behind the last block are set too, so that a reader takes them for none to approximate.
    counter: [1] int32, zero: tickets that a persistent attention kernel has given out.
    counts: [N, H] int32, exact key blocks of every query block, the ragged one and those of dense rows included.
    reference: [N, H] float32, the greatest base-2 score of a query block's mean against any block's.
    flags: [N H + 1] int32, zero: room for the attention kernel to flag query blocks, and (last) that there is one.
    group: query blocks a group (G); shift: bits below the member bits of an entry.
    """

    entries: torch.Tensor
    lengths: torch.Tensor
    bits: torch.Tensor
    counts: torch.Tensor
    reference: torch.Tensor
    flags: torch.Tensor
    counter: torch.Tensor
    group: int
    shift: int


def dense_block_range(tokens: int, dense_rows: tuple[int, int]) -> tuple[int, int]:
    """Query blocks [first, last) all of whose rows lie in ``dense_rows``; (0, 0) when there is none."""
    start, stop = dense_rows
    first, last = num_blocks(start), num_blocks(tokens) if stop == tokens else stop // BLOCK
    return (first, last) if last > first and stop > start else (0, 0)


def route(summaries: Summaries, options: SolAttentionOptions, tokens: int, group: int, rows: int = 16) -> Lists:
    """Route a call of ``tokens`` tokens, ``rows`` query blocks a program. One launch, no synchronisation."""
    blocks, heads, dim = summaries.q_mean.shape
    device = summaries.q_mean.device
    groups = triton.cdiv(blocks, group)
    words = 2 * triton.cdiv(blocks, 64)  # whole 64-block groups, so that a reader needs no mask
    short = blocks <= SHORT_BLOCKS and group <= 4
    entries = torch.empty((heads, groups, blocks), dtype=torch.int16 if short else torch.int32, device=device)
    lengths = torch.empty((heads, groups), dtype=torch.int32, device=device)
    bits = torch.empty((heads, blocks, words), dtype=torch.int32, device=device)
    counts = torch.empty((blocks, heads), dtype=torch.int32, device=device)
    counter = torch.empty((1,), dtype=torch.int32, device=device)
    reference = torch.empty((blocks, heads), dtype=torch.float32, device=device)
    flags = torch.empty((blocks * heads + 1,), dtype=torch.int32, device=device)
    slots = triton.next_power_of_2(group)
    shift = 12 if short else 24
    _route_kernel[(triton.cdiv(groups, rows // slots), heads)](
        summaries.q_mean, summaries.k_mean, summaries.mu, summaries.spread,
        entries, lengths, bits, counts, counter, reference, flags,
        options.scale * LOG2_E, options.tau, VARIANCE_EPSILON,
        *sink_block_range(tokens, options.sink),
        *dense_block_range(tokens, options.dense_rows),
        tokens, blocks, heads, groups, words,
        EXACT=options.thresh_type == "exact", G=group, SLOTS=slots, SHIFT=shift,
        R=rows, D=dim, BT=BLOCK, **LAUNCH,
    )  # fmt: skip
    return Lists(entries, lengths, bits, counts, reference, flags, counter, group, shift)
