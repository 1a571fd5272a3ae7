"""Rotary embedding in place, as SGLang's MiniMax-H3 video VAE asks of ``sgl_kernel``, which has no CUDA 12.8 wheel.

Rounds where the VAE's plain PyTorch branch rounds (every product and every sum to the tensors' own dtype), so the two
are bitwise equal: SGLang 0.5.17, minimax_h3_video_vae/vit_utils.py, ``_apply_rotary_pos_emb_impl``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate(p_x, b_cos, b_sin, heads, columns, is_half, size, BH: tl.constexpr, half):
    """Rotate the heads of one token, to whose first element p_x points."""
    for first in range(0, heads, BH):
        i_head = first + tl.arange(0, BH)
        p_low = p_x + i_head[:, None] * size + columns[None, :]
        mask = (i_head < heads)[:, None] & is_half[None, :]
        b_low = tl.load(p_low, mask=mask, other=0.0)  # [BH, HALF]
        b_high = tl.load(p_low + half, mask=mask, other=0.0)
        dtype = b_low.dtype
        b_low, b_high = b_low.to(tl.float32), b_high.to(tl.float32)
        low_cos, high_sin = (b_low * b_cos).to(dtype).to(tl.float32), (b_high * b_sin).to(dtype).to(tl.float32)
        high_cos, low_sin = (b_high * b_cos).to(dtype).to(tl.float32), (b_low * b_sin).to(dtype).to(tl.float32)
        tl.store(p_low, (low_cos - high_sin).to(dtype), mask=mask)
        tl.store(p_low + half, (high_cos + low_sin).to(dtype), mask=mask)


@triton.jit(do_not_specialize=("q_heads", "k_heads"))
def _rotary_kernel(
    p_positions, p_q, p_k, p_cache, stride_q, stride_k, stride_cache, q_heads, k_heads, size, half,
    BH: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    i_token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, HALF)
    is_half = columns < half
    p_row = p_cache + tl.load(p_positions + i_token) * stride_cache
    b_cos = tl.load(p_row + columns, mask=is_half, other=0.0).to(tl.float32)[None, :]  # [1, HALF]
    b_sin = tl.load(p_row + half + columns, mask=is_half, other=0.0).to(tl.float32)[None, :]
    _rotate(p_q + i_token * stride_q, b_cos, b_sin, q_heads, columns, is_half, size, BH, half)
    _rotate(p_k + i_token * stride_k, b_cos, b_sin, k_heads, columns, is_half, size, BH, half)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Rotate query and key in place; the signature is ``sgl_kernel.rotary_embedding``'s.

    positions: [T] int64, rows of the cache. query, key: [T, heads x head_size] float16 or bfloat16, last stride 1; the
    heads may differ in number. cos_sin_cache: [rows, R] in the same dtype, cosines in the first R / 2 columns and sines
    in the rest; the first R channels of a head are rotated, halves against each other (NeoX).

    Raises ValueError for the interleaved form and for shapes or dtypes that do not fit together.
    """
    if not is_neox:
        raise ValueError("rotary embedding in the interleaved form; needed: is_neox=True, the only one MiniMax-H3 uses")
    half, odd = divmod(cos_sin_cache.shape[-1], 2)
    for name, x in {"query": query, "key": key}.items():
        if x.ndim != 2 or x.shape[0] != positions.shape[0] or x.shape[1] % head_size or x.stride(1) != 1:
            raise ValueError(
                f"{name} is {tuple(x.shape)} with strides {x.stride()}; "
                f"needed: [{positions.shape[0]}, heads x {head_size}], last stride 1"
            )
        if x.dtype != cos_sin_cache.dtype or x.dtype not in (torch.float16, torch.bfloat16):
            found = f"{name} is {x.dtype}, the cache {cos_sin_cache.dtype}"
            raise ValueError(f"{found}; needed: float16 or bfloat16, alike")
    if odd or 2 * half > head_size:
        raise ValueError(f"the cache has {cos_sin_cache.shape[-1]} columns; needed: an even number up to {head_size}")
    if not positions.shape[0]:
        return
    _rotary_kernel[(positions.shape[0],)](
        positions, query, key, cos_sin_cache, query.stride(0), key.stride(0), cos_sin_cache.stride(0),
        query.shape[1] // head_size, key.shape[1] // head_size, head_size, half,
        BH=16, HALF=triton.next_power_of_2(half), num_warps=4,
        enable_fp_fusion=False,  # fused, a product would go into its sum without having been rounded
    )  # fmt: skip
