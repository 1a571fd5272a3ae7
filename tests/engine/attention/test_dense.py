"""The attention operator that PyTorch ran is named, whatever the caller believes it asked for."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.dense import MATH, operators_of, sdpa_choice, watch_operators

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def tensors(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 40, 2, 64, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("backend", "operator"), [(SDPBackend.FLASH_ATTENTION, FLASH), (SDPBackend.MATH, MATH)])
def test_the_operator_is_the_one_that_the_switches_left(mode, backend, operator):
    with mode(), sdpa_kernel(backend):
        assert sdpa_choice(*tensors(), 0.1) == (operator,)


def test_a_hand_written_softmax_is_named_for_what_it_is():
    q, k, v = tensors(torch.float32)
    assert operators_of(lambda: torch.softmax(q @ k.mT, -1) @ v)[1] == (MATH,)


def test_no_attention_no_name():
    q, *_ = tensors()
    assert operators_of(lambda: q + 1)[1] == ()


def test_the_result_is_the_calls_own():
    q, k, v = (x.transpose(1, 2) for x in tensors())
    want = scaled_dot_product_attention(q, k, v)
    got, names = operators_of(lambda: scaled_dot_product_attention(q, k, v))
    assert torch.equal(got, want) and names == (FLASH,)


def test_each_operator_is_named_once_and_registered_ones_too():
    @torch.library.custom_op("sol_h3_test::flash_attn_fwd", mutates_args=())
    def registered(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    q, k, v = tensors()
    with watch_operators() as names:
        registered(q)
        for _ in range(2):
            scaled_dot_product_attention(q, k, v)
    assert names == ["sol_h3_test::flash_attn_fwd", FLASH]
