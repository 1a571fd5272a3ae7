"""`draw.uniform` as a Triton kernel: the same words, the same roundings, written where the weights will live.

Floor: one 64-bit counter block gives four elements and costs 20 products of 64 bits with their high halves. At full
size (62e9 elements) that is some 6e12 integer operations, about half a second of an H200, and 0.15 TB written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 512
"""Counter blocks of a program; each gives four elements."""


@triton.jit
def _products(a, b):
    return tl.umulhi(a, b), a * b


@triton.jit
def _unit(word, bound, mean):
    # Both steps before `bound` are exact. No fused multiply-add: numpy rounds the product and the sum.
    unit = (word >> 40).to(tl.float32) * 1.1920928955078125e-07 - 1.0
    return unit * bound + mean


@triton.jit(do_not_specialize=["key_low", "key_high", "first", "count"])
def _draw(out, key_low, key_high, first, count, bound, mean, BLOCK: tl.constexpr):
    # numpy increments the counter before it draws: elements 4 c .. 4 c + 3 come from counter c + 1.
    block = (first // 4) + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    c0 = (block + 1).to(tl.uint64)
    c1 = tl.zeros([BLOCK], tl.uint64)
    c2 = tl.zeros([BLOCK], tl.uint64)
    c3 = tl.zeros([BLOCK], tl.uint64)
    m0 = tl.full([BLOCK], 0xD2E7470EE14C6C93, tl.uint64)
    m1 = tl.full([BLOCK], 0xCA5A826395121157, tl.uint64)
    w0 = tl.full([BLOCK], 0x9E3779B97F4A7C15, tl.uint64)
    w1 = tl.full([BLOCK], 0xBB67AE8584CAA73B, tl.uint64)
    k0 = tl.zeros([BLOCK], tl.uint64) + key_low.to(tl.int64).to(tl.uint64)
    k1 = tl.zeros([BLOCK], tl.uint64) + key_high.to(tl.int64).to(tl.uint64)
    for _ in tl.static_range(10):
        high0, low0 = _products(m0, c0)
        high1, low1 = _products(m1, c2)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += w0
        k1 += w1
    at = block * 4 - first
    dtype = out.dtype.element_ty
    tl.store(out + at, _unit(c0, bound, mean).to(dtype), mask=(at >= 0) & (at < count))
    tl.store(out + at + 1, _unit(c1, bound, mean).to(dtype), mask=(at + 1 >= 0) & (at + 1 < count))
    tl.store(out + at + 2, _unit(c2, bound, mean).to(dtype), mask=(at + 2 >= 0) & (at + 2 < count))
    tl.store(out + at + 3, _unit(c3, bound, mean).to(dtype), mask=(at + 3 >= 0) & (at + 3 < count))


def draw_on_gpu(out: torch.Tensor, key: int, first: int, bound: float, mean: float) -> None:
    """Fill `out`, contiguous, with the elements from `first` on of the tensor that `key` names.

    key: 128 bits. bound, mean: rounded to float32, as numpy does.
    """
    count = out.numel()
    if not count:
        return
    blocks = (first + count - 1) // 4 - first // 4 + 1
    signed = [word - 2**64 if word >= 2**63 else word for word in (key & 2**64 - 1, key >> 64)]
    with torch.cuda.device_of(out):
        _draw[(triton.cdiv(blocks, BLOCK),)](
            out, signed[0], signed[1], first, count, bound, mean, BLOCK=BLOCK, enable_fp_fusion=False
        )
