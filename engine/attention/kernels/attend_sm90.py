"""The attention step of Sol-Attn on compute capability 9.0, in Gluon: warp-specialised, K/V tiles shared by queries.

An item of work is a group of G neighbouring query blocks of one head. A producer warp streams the K and V tiles that
any of them needs through a ring in shared memory, with the tensor memory accelerator; G warpgroups consume it, one
query block each, and steps over the tiles that are not on its own list. So the second-level cache, which
bounds a one-block kernel (32 KiB for 2.1 MFLOP), is asked once for a tile that several neighbours want. There is one
program a multiprocessor, which draws tickets for items until there are none.

The stream of a sparse group: the means of all blocks in tiles of 64 (K: key means, V: value sums), then the ragged last
key block if there is one, then the list. A dense group (query rows that attend to everything): all key blocks.

Probabilities are relative to one number a query block (``reference``), and not to each row's running maximum: as
bfloat16 has float32's range that costs no precision, and it spares the maxima, their exchange between threads, and the
rescaling of the accumulator. Where a row's scores are too far from that number for float32, its block is flagged, and
``attend_pointer.repair`` does it again.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.attention.call import SolAttentionOptions
from engine.attention.kernels.lists import Lists, dense_block_range
from engine.attention.kernels.summaries import Summaries
from engine.attention.routing import BLOCK, LOG2_E, num_blocks

# Bounds of a row's sum of probabilities; beyond them its query block is flagged.
SMALLEST = gl.constexpr(2.0**-60)
LARGEST = gl.constexpr(2.0**60)
LN_2 = gl.constexpr(0.6931471805599453)
# Arguments that vary from document to document: no kernel is compiled again for a value of them.
COUNTS = (
    "T", "N", "H", "groups", "words",
    "dense_start", "dense_stop", "dense_skip_first", "dense_skip_last", "dense_groups",
)  # fmt: skip


@gluon.jit
def _item(
    ticket, p_lists, p_lengths, dense_start, dense_skip_first, dense_skip_last, dense_groups, T, N, H, groups,
    G: gl.constexpr, BT: gl.constexpr,
):  # fmt: skip
    """The group of query blocks that a ticket stands for, and the lengths of the three parts of its stream.

    Dense groups come first: each is several times a sparse one, so none may start last.
    """
    is_dense = (ticket < dense_groups * H).to(gl.int32)
    rest = gl.where(is_dense != 0, ticket, ticket - dense_groups * H)
    of_head = gl.where(is_dense != 0, dense_groups, groups)
    i_head = rest // of_head
    i_group = rest % of_head
    first_block = gl.where(is_dense != 0, dense_start // BT, 0) + i_group * G
    i_list = i_head * groups + gl.where(is_dense != 0, 0, i_group)
    tail_tiles = (T % BT != 0).to(gl.int32)
    length = gl.load(p_lengths + i_list)
    length = gl.where(is_dense != 0, N - tail_tiles, length)
    # A group all of whose blocks are dense has nothing to do here: its list is empty, and so must its stream be.
    all_dense = (is_dense == 0) & (first_block >= dense_skip_first)
    all_dense = all_dense & (gl.minimum(first_block + G, N) <= dense_skip_last)
    mean_tiles = gl.where((is_dense != 0) | all_dense, 0, (N + BT - 1) // BT)
    tail_tiles = gl.where(all_dense, 0, tail_tiles)
    return i_head, first_block, is_dense, p_lists + i_list.to(gl.int64) * N, mean_tiles, tail_tiles, length


@gluon.jit
def _entry(p_list, t, length, is_dense, ALL: gl.constexpr, SHIFT: gl.constexpr):
    """Entry t of the stream's list; whatever it is behind the end. A dense group has every block and every member."""
    e = gl.load(p_list + gl.minimum(t, length - 1), mask=(length > 0) & (is_dense == 0), other=0).to(gl.int32)
    return gl.where(is_dense != 0, t | (ALL << SHIFT), e)


@gluon.jit
def _announce(p_tickets, announced, taken, turn, ticket):
    """Hand a ticket to the consumers, through two words of global memory that belong to this program alone.

    One thread stores the word and then arrives, which releases it; the consumers' wait acquires it. In shared memory it
    would be the only word that ordinary stores and loads pass between partitions (see NOTES.md, racecheck).
    """
    slot = turn & 1
    mbarrier.wait(taken.index(slot), ((turn >> 1) & 1) ^ 1)
    gl.store(p_tickets + slot, ticket)
    mbarrier.arrive(announced.index(slot), count=1)


@gluon.jit
def _produce(arguments, G: gl.constexpr, SHIFT: gl.constexpr, STAGES: gl.constexpr, BT: gl.constexpr, D: gl.constexpr):
    (
        d_k, d_v, d_k_mean, d_v_sum, k_ring, v_ring, full, empty, announced, taken,
        p_lists, p_lengths, p_counter, p_tickets, stride_kh, stride_vh,
        dense_start, dense_skip_first, dense_skip_last, dense_groups, T, N, H, groups,
    ) = arguments  # fmt: skip
    MASK: gl.constexpr = (1 << SHIFT) - 1
    ALL: gl.constexpr = (1 << G) - 1
    BYTES: gl.constexpr = 2 * BT * D * 2
    items = (dense_groups + groups) * H
    base = 0  # tiles streamed in earlier items
    turn = 0
    ticket = gl.program_id(0)
    while ticket < items:
        _announce(p_tickets, announced, taken, turn, ticket)
        turn += 1

        i_head, first_block, is_dense, p_list, mean_tiles, tail_tiles, length = _item(
            ticket, p_lists, p_lengths, dense_start, dense_skip_first, dense_skip_last, dense_groups, T, N, H, groups,
            G, BT,
        )  # fmt: skip
        ticket = gl.atomic_add(p_counter, 1) + gl.num_programs(0)
        col_k = i_head * stride_kh
        col_v = i_head * stride_vh
        col_mean = i_head * D
        e = _entry(p_list, 0, length, is_dense, ALL, SHIFT)
        total = mean_tiles + tail_tiles + length
        for t in range(total):
            n = base + t
            stage = n % STAGES
            s = t - mean_tiles - tail_tiles
            mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            if t < mean_tiles:
                tma.async_copy_global_to_shared(d_k_mean, [t * BT, col_mean], full.index(stage), k_ring.index(stage))
                tma.async_copy_global_to_shared(d_v_sum, [t * BT, col_mean], full.index(stage), v_ring.index(stage))
            else:
                row = gl.where(s < 0, N - 1, e & MASK) * BT
                e = _entry(p_list, s + 1, length, is_dense, ALL, SHIFT)
                tma.async_copy_global_to_shared(d_k, [row, col_k], full.index(stage), k_ring.index(stage))
                tma.async_copy_global_to_shared(d_v, [row, col_v], full.index(stage), v_ring.index(stage))
        base += total
    _announce(p_tickets, announced, taken, turn, ticket)


@gluon.jit
def _release(empty, stage):
    """Give a tile's place in the ring back once all warps of this warpgroup have read it."""
    gl.thread_barrier()
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _scores(b_q, k_tile, BT: gl.constexpr):
    S_LAYOUT: gl.constexpr = b_q.type.layout.parent
    b_s = gl.zeros([BT, BT], gl.float32, S_LAYOUT)
    b_s = warpgroup_mma(b_q, k_tile.permute((1, 0)), b_s, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(b_s,))


@gluon.jit
def _accumulate(b_e, v_tile, acc):
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    b_p = gl.convert_layout(b_e.to(gl.bfloat16), P_LAYOUT)
    acc = warpgroup_mma(b_p, v_tile, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit
def _take(p_tickets, announced, taken, turn):
    """The next ticket."""
    slot = turn & 1
    mbarrier.wait(announced.index(slot), (turn >> 1) & 1)
    ticket = gl.load(p_tickets + slot, volatile=True)  # volatile: the word changes between two takes
    gl.thread_barrier()
    mbarrier.arrive(taken.index(slot), count=1)
    return ticket


@gluon.jit
def _consume(
    arguments,
    MEMBER: gl.constexpr, G: gl.constexpr, SHIFT: gl.constexpr, STAGES: gl.constexpr, LSE: gl.constexpr,
    BT: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    (
        p_q, p_o, p_lse, p_lists, p_lengths, p_bits, p_reference, p_flags, p_tickets,
        k_ring, v_ring, full, empty, announced, taken,
        stride_qt, stride_qh, stride_ot, stride_oh,
        c, dense_start, dense_stop, dense_skip_first, dense_skip_last, dense_groups, T, N, H, groups, words,
    ) = arguments  # fmt: skip
    ALL: gl.constexpr = (1 << G) - 1
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BT, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)

    items = (dense_groups + groups) * H
    base = 0  # tiles streamed in earlier items
    turn = 0
    ticket = _take(p_tickets, announced, taken, turn)
    while ticket < items:
        turn += 1
        i_head, first_block, is_dense, p_list, mean_tiles, tail_tiles, length = _item(
            ticket, p_lists, p_lengths, dense_start, dense_skip_first, dense_skip_last, dense_groups, T, N, H, groups,
            G, BT,
        )  # fmt: skip
        before = mean_tiles + tail_tiles
        i_q = first_block + MEMBER
        rows = i_q * BT + gl.arange(0, BT, gl.SliceLayout(1, Q_LAYOUT))
        channels = gl.arange(0, D, gl.SliceLayout(0, Q_LAYOUT))
        p_tile = p_q + i_head.to(gl.int64) * stride_qh + rows.to(gl.int64)[:, None] * stride_qt + channels[None, :]
        b_q = gl.load(p_tile, mask=(rows < T)[:, None], other=0.0)  # [BT, D]
        p_row = p_bits + (i_head.to(gl.int64) * N + gl.minimum(i_q, N - 1)) * words

        reference = gl.load(p_reference + gl.minimum(i_q, N - 1) * H + i_head)
        acc = gl.zeros([BT, D], gl.float32, O_LAYOUT)
        b_sum = gl.zeros([BT], gl.float32, ROWS)

        j = gl.arange(0, BT, COLS)
        tail = T - (N - 1) * BT
        for t in range(mean_tiles):
            low = gl.load(p_row + 2 * t)
            high = gl.load(p_row + 2 * t + 1)
            approximate = ((gl.where(j < 32, low, high) >> (j % 32)) & 1) == 0
            n = base + t
            stage = n % STAGES
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            b_s = _scores(b_q, k_ring.index(stage), BT) * c - reference
            b_e = gl.exp2(gl.where(approximate[None, :], b_s, float("-inf")))
            b_sum += gl.sum(b_e, 1) * BT
            if t == mean_tiles - 1:  # the last block weighs fewer tokens
                b_sum += gl.sum(gl.where((t * BT + j == N - 1)[None, :], b_e, 0.0), 1) * (tail - BT)
            acc = _accumulate(b_e, v_ring.index(stage), acc)
            _release(empty, stage)

        if tail_tiles != 0:
            n = base + mean_tiles
            stage = n % STAGES
            bit = (gl.load(p_row + (N - 1) // 32) >> ((N - 1) % 32)) & 1
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            if (bit != 0) | (is_dense != 0):
                b_s = _scores(b_q, k_ring.index(stage), BT) * c - reference
                b_e = gl.exp2(gl.where((j < tail)[None, :], b_s, float("-inf")))
                b_sum += gl.sum(b_e, 1)
                acc = _accumulate(b_e, v_ring.index(stage), acc)
            _release(empty, stage)

        e = _entry(p_list, 0, length, is_dense, ALL, SHIFT)
        for s in range(length):
            n = base + before + s
            stage = n % STAGES
            mine = (e >> (SHIFT + MEMBER)) & 1
            e = _entry(p_list, s + 1, length, is_dense, ALL, SHIFT)
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            if mine != 0:
                b_e = gl.exp2(_scores(b_q, k_ring.index(stage), BT) * c - reference)
                b_sum += gl.sum(b_e, 1)
                acc = _accumulate(b_e, v_ring.index(stage), acc)
            _release(empty, stage)

        o_rows = i_q * BT + gl.arange(0, BT, gl.SliceLayout(1, O_LAYOUT))
        in_dense = (o_rows >= dense_start) & (o_rows < dense_stop)
        keep = (o_rows < T) & (in_dense == (is_dense != 0))
        b_total = gl.convert_layout(b_sum, gl.SliceLayout(1, O_LAYOUT))
        fine = (b_total > SMALLEST) & (b_total < LARGEST) & (gl.max(gl.abs(acc), 1) < float("inf"))
        failed = gl.max((keep & (fine == 0)).to(gl.int32), 0)
        gl.store(p_flags + i_q * H + i_head, failed, mask=failed != 0)
        gl.store(p_flags + N * H, failed, mask=failed != 0)

        b_o = acc / b_total[:, None]
        o_channels = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
        p_out = p_o + i_head.to(gl.int64) * stride_oh + o_rows.to(gl.int64)[:, None] * stride_ot + o_channels[None, :]
        gl.store(p_out, b_o.to(gl.bfloat16), mask=keep[:, None])
        if LSE:
            b_lse = (reference + gl.log2(b_total)) * LN_2
            gl.store(p_lse + o_rows.to(gl.int64) * H + i_head, b_lse, mask=keep)
        base += before + length
        ticket = _take(p_tickets, announced, taken, turn)


@gluon.jit(do_not_specialize=COUNTS)
def _attend_kernel(
    d_k, d_v, d_k_mean, d_v_sum,
    p_q, p_o, p_lse, p_lists, p_lengths, p_bits, p_counter, p_reference, p_flags, p_tickets,
    stride_qt, stride_qh, stride_kh, stride_vh, stride_ot, stride_oh,
    c, dense_start, dense_stop, dense_skip_first, dense_skip_last, dense_groups,
    T, N, H, groups, words,
    G: gl.constexpr, SHIFT: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, LSE: gl.constexpr,
    BT: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BT, D], d_k.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BT, D], d_v.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    announced = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=G)
    for i in gl.static_range(2):
        mbarrier.init(announced.index(i), count=1)
        mbarrier.init(taken.index(i), count=G)

    p_tickets += 2 * gl.program_id(0)
    producer = (
        d_k, d_v, d_k_mean, d_v_sum, k_ring, v_ring, full, empty, announced, taken,
        p_lists, p_lengths, p_counter, p_tickets, stride_kh, stride_vh,
        dense_start, dense_skip_first, dense_skip_last, dense_groups, T, N, H, groups,
    )  # fmt: skip
    consumer = (
        p_q, p_o, p_lse, p_lists, p_lengths, p_bits, p_reference, p_flags, p_tickets,
        k_ring, v_ring, full, empty, announced, taken,
        stride_qt, stride_qh, stride_ot, stride_oh,
        c, dense_start, dense_stop, dense_skip_first, dense_skip_last, dense_groups, T, N, H, groups, words,
    )  # fmt: skip
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    if G == 2:
        gl.warp_specialize(
            [
                (_consume, (consumer, FIRST, G, SHIFT, STAGES, LSE, BT, D)),
                (_consume, (consumer, SECOND, G, SHIFT, STAGES, LSE, BT, D)),
                (_produce, (producer, G, SHIFT, STAGES, BT, D)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.static_assert(G == 3)
        gl.warp_specialize(
            [
                (_consume, (consumer, FIRST, G, SHIFT, STAGES, LSE, BT, D)),
                (_consume, (consumer, SECOND, G, SHIFT, STAGES, LSE, BT, D)),
                (_consume, (consumer, THIRD, G, SHIFT, STAGES, LSE, BT, D)),
                (_produce, (producer, G, SHIFT, STAGES, BT, D)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


def _matrix(x: torch.Tensor, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """[T, H, 128] seen as a matrix of T rows whose columns run over all heads: one descriptor for any stride of a head.

    Columns of one head are [stride_h * head, + 128). Rows behind T read as zero, as the kernel relies on.
    """
    tokens, heads, dim = x.shape
    return TensorDescriptor(x, [tokens, (heads - 1) * x.stride(1) + dim], [x.stride(0), 1], [BLOCK, dim], layout)


def unsupported_strides(x: torch.Tensor) -> str | None:
    """Why the tensor memory accelerator cannot read x [T, H, 128] bfloat16 in place, or None when it can."""
    if (x.shape[1] - 1) * x.stride(1) + x.shape[2] > 2**31 - 1:
        return f"heads that span {(x.shape[1] - 1) * x.stride(1)} elements; needed: column numbers of 31 bits"
    if x.data_ptr() % 16 or x.stride(0) % 8 or (x.shape[1] > 1 and x.stride(1) % 8):
        return f"a tensor with strides {tuple(x.stride())} at address % 16 = {x.data_ptr() % 16}; needed: 16-byte steps"
    return None


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
    registers: int,
) -> None:
    """Fill out [T, H, 128] (and lse [T, H]) from q, k, v [T, H, 128], all bfloat16. One launch."""
    tokens, heads, dim = q.shape
    blocks, group = num_blocks(tokens), lists.group
    start, stop = options.dense_rows
    dense_blocks = num_blocks(stop) - start // BLOCK if stop > start else 0
    dense_groups, groups = triton.cdiv(dense_blocks, group), triton.cdiv(blocks, group)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    programs = min((dense_groups + groups) * heads, processors)
    tickets = torch.empty((2 * programs,), dtype=torch.int32, device=q.device)
    _attend_kernel[(programs,)](
        _matrix(k, layout), _matrix(v, layout), _matrix(summaries.k_mean, layout), _matrix(summaries.v_sum, layout),
        q, out, lse if lse is not None else summaries.mu,
        lists.entries, lists.lengths, lists.bits, lists.counter, lists.reference, lists.flags, tickets,
        q.stride(0), q.stride(1), k.stride(1), v.stride(1), out.stride(0), out.stride(1),
        options.scale * LOG2_E, start, stop, *dense_block_range(tokens, options.dense_rows), dense_groups,
        tokens, blocks, heads, groups, lists.bits.shape[2],
        G=group, SHIFT=lists.shift, STAGES=stages, REGISTERS=registers, LSE=lse is not None,
        BT=BLOCK, D=dim, num_warps=4,
    )  # fmt: skip
