"""The operator beside the name of SGLang's attention class in the record: asked of the class's own object."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.h3.operators import UNKNOWN, name_operators, operator_of
from tests.engine.h3.test_seams import events, tracker

CPU = torch.device("cpu")
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
MATH = "aten::_scaled_dot_product_attention_math"


class SDPAImpl:
    """SGLang's way: every document of the packed rows through SDPA, here with one backend left to PyTorch."""

    def __init__(self, backend=SDPBackend.FLASH_ATTENTION):
        self.backend = backend

    def forward_varlen(self, query, key, value, *, cu_seqlens, max_seqlen, cu_seqlens_host=None):
        assert query.shape == key.shape == value.shape and query.dtype == torch.bfloat16
        assert tuple(cu_seqlens.tolist()) == cu_seqlens_host == (0, max_seqlen)
        q, k, v = (x[None].transpose(1, 2) for x in (query, key, value))
        with sdpa_kernel(self.backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)


class Broken:
    def forward_varlen(self, *args, **kwargs):
        raise RuntimeError("takes no such call")


def block(implementation):
    attention = SimpleNamespace(_attention_impl=implementation, head_dim=64)
    return SimpleNamespace(attn=attention)


def test_the_operator_is_what_the_object_runs():
    assert operator_of(SDPAImpl(), 64, CPU) == FLASH
    assert operator_of(SDPAImpl(SDPBackend.MATH), 64, CPU) == MATH
    assert operator_of(Broken(), 64, CPU) == UNKNOWN
    assert operator_of(SimpleNamespace(forward_varlen=lambda q, *args, **kwargs: q), 64, CPU) == UNKNOWN


def test_each_class_is_asked_once_and_blocks_that_never_ran_dense_are_not():
    known = {}
    name_operators(known, SimpleNamespace(blocks=[block(None), block(SDPAImpl()), block(Broken())]), CPU)
    assert known == {"SDPAImpl": FLASH, "Broken": UNKNOWN}
    name_operators(known, SimpleNamespace(blocks=[block(SDPAImpl(SDPBackend.MATH))]), CPU)
    assert known["SDPAImpl"] == FLASH


def test_the_record_names_class_and_operator(tmp_path: Path):
    made = tracker(tmp_path, "dense")
    made.begin_request()
    made.step = 0
    made.dense = {"SDPAImpl": [0, 1], "Other": [2]}
    made.operators = {"SDPAImpl": FLASH}
    made.end_step(1.0, 0.5)
    found = {event["backend"]: event["layers"] for event in events(tmp_path, "dense") if event["event"] == "attention"}
    assert found == {f"SDPAImpl/{FLASH}": [0, 1], "Other": [2]}
