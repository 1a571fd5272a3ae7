"""The rotary embedding kernel on a GPU, bitwise against the plain PyTorch arithmetic of SGLang's video VAE."""

from __future__ import annotations

import pytest
import torch

from tests.engine.attention.interpreted_kernels import ROTARY, rotate, rotate_plainly

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")

# And two of the order of a decoder chunk.
CASES = [*ROTARY, (torch.float16, 7056, 16, 16, 64, 48), (torch.bfloat16, 7056, 16, 16, 128, 96)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bitwise_equal_to_the_plain_branch(case):
    for got, want in zip(rotate(case, "cuda"), rotate_plainly(case, "cuda"), strict=True):
        assert torch.equal(got, want)
