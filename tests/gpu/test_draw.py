"""Synthetic weights drawn on the GPU are those that numpy draws, bit for bit."""

from __future__ import annotations

import pytest
import torch

from engine.checkpoint.draw import Draw

# Last run: 36 passed, NVIDIA H200, driver 580.159.04, PyTorch 2.11.0+cu130, Triton 3.6.0, 2026-11-30.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="draws on an NVIDIA GPU; this machine has none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7,), (128,), (4097, 3), (96768, 26)])
@pytest.mark.parametrize("std,mean", [(0.02, 1.0), (0.0137, 0.0)])
def test_the_kernel_draws_what_numpy_draws(dtype: torch.dtype, shape: tuple[int, ...], std: float, mean: float) -> None:
    draw = Draw(3, "transformer/blocks.7.mlp.fc1.weight", shape, dtype, std, mean)
    assert torch.equal(draw.tensor("cuda").cpu(), draw.tensor("cpu"))


@pytest.mark.parametrize("first,count", [(0, 5), (1, 1), (2, 4099), (4095, 1), (99_999_997, 3)])
def test_a_shard_is_what_the_whole_holds_there(first: int, count: int) -> None:
    draw = Draw(0, "text_encoder/embed", (100_000, 1000), torch.bfloat16, 0.5)
    shard = draw.elements_from(first, count, "cuda")
    assert torch.equal(shard.cpu(), draw.elements_from(first, count, "cpu"))
    assert torch.equal(shard, draw.tensor("cuda").flatten()[first : first + count])


def test_no_element_is_left_unwritten() -> None:
    draw = Draw(1, "x", (5376, 1000), torch.float32, 0.25)
    drawn = draw.tensor("cuda")
    assert bool(drawn.isfinite().all())
    assert abs(float(drawn.std()) - 0.25) < 1e-3
    assert abs(float(drawn.mean())) < 1e-3
