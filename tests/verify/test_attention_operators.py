"""Which PyTorch operator the dense calls ran on is judged against the lock's setting."""

from __future__ import annotations

import pytest

from tests.verify.test_checks import SMALL, each, put, put_question, worst

CUDNN = "aten::_scaled_dot_product_cudnn_attention"
FLASH = "aten::_scaled_dot_product_flash_attention"
EVENTS = "arms/dense/events-rank0.jsonl"


@pytest.mark.parametrize(
    ("setting", "backend", "status"),
    [
        ("torch_cudnn_sdpa", f"CudnnSDPAImpl/{CUDNN}", "ok"),
        ("torch_cudnn_sdpa", f"CudnnSDPAImpl/{FLASH}", "fail"),
        ("torch_cudnn_sdpa", f"SDPAImpl/{CUDNN}", "fail"),
        ("torch_cudnn_sdpa", "CudnnSDPAImpl/unknown", "warn"),
        ("torch_cudnn_sdpa", "CudnnSDPAImpl", "ok"),  # records of before the operator was named
        ("torch_sdpa", f"SDPAImpl/{FLASH}", "ok"),
        ("torch_sdpa", f"SDPAImpl/{CUDNN}", "ok"),  # the setting leaves the choice to PyTorch
    ],
)
def test_dense_calls_on_a_gpu(fresh, setting, backend, status):
    record = fresh(target="rtx4090", arms=("dense",), overrides=(*SMALL, f"attention={setting}"))
    each("attention", put(backend=backend), EVENTS, mode="dense")(record)
    assert worst(put_question(record, "attention-backends")) == status


def test_on_a_cpu_there_is_no_cudnn_to_ask_for(fresh):
    record = fresh(arms=("dense",), overrides=("attention=torch_cudnn_sdpa",))
    each("attention", put(backend="CudnnSDPAImpl/aten::_scaled_dot_product_flash_attention_for_cpu"), EVENTS)(record)
    assert worst(put_question(record, "attention-backends")) == "ok"
