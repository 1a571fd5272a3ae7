"""The public call: what it refuses, and that it never does something else instead."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from config.errors import Exit
from engine.attention import BackendUnsupported, SolAttentionResult, dispatch, sol_attention, unsupported_reason
from engine.attention.call import SolAttentionOptions


def tensors(tokens=100, heads=2, dim=32, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, tokens, heads, dim, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), r"q has shape \(100, 2, 32\)"),
        (lambda q, k, v: (q.expand(2, -1, -1, -1), k, v), r"q has shape \(2, 100, 2, 32\)"),
        (lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]), "none of them zero"),
        (lambda q, k, v: (q, k[:, :99], v), r"k is \(1, 99, 2, 32\)"),
        (lambda q, k, v: (q, k, v.float()), r"v is .* torch.float32"),
        (lambda q, k, v: (q, k.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2), v), "k has strides"),
    ],
)
def test_impossible_tensors_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        sol_attention(*change(*tensors()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thresh_type": "mean"}, "thresh_type is 'mean'"),
        ({"sink": (0, 101)}, r"sink is \(0, 101\)"),
        ({"sink": (5, 4)}, "sink is"),
        ({"dense_rows": (-1, 4)}, "dense_rows is"),
        ({"backend": "flash"}, "needed: one of native, reference, sana"),
    ],
)
def test_impossible_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        sol_attention(*tensors(), **options)


def test_scale_defaults_to_the_head_dimension():
    q, k, v = tensors()
    assert torch.equal(sol_attention(q, k, v).out, sol_attention(q, k, v, scale=32**-0.5).out)


def test_out_is_written_in_place_with_its_own_strides():
    q, k, v = tensors()
    out = torch.full((1, 100, 4, 32), 7.0, dtype=torch.bfloat16)
    result = sol_attention(q, k, v, out=out[:, :, 1:3])
    assert result.out.data_ptr() == out[:, :, 1:3].data_ptr()
    assert torch.equal(out[:, :, 1:3], sol_attention(q, k, v).out)
    assert (out[:, :, [0, 3]] == 7.0).all()


def test_a_backend_that_cannot_is_refused_with_its_reason(monkeypatch):
    refusing = SimpleNamespace(supports=lambda q, k, v, options: "no such instruction", attend=None)
    monkeypatch.setattr(dispatch, "_load", lambda name: refusing)
    with pytest.raises(BackendUnsupported, match="'native' cannot do this call: no such instruction") as caught:
        sol_attention(*tensors(), backend="native")
    assert caught.value.exit_code == Exit.ENVIRONMENT


def test_a_backend_that_is_not_there_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(dispatch.BACKENDS, "native", "engine.attention.no_such_module")
    with pytest.raises(BackendUnsupported, match="'native' cannot be imported: .*no_such_module"):
        sol_attention(*tensors(), backend="native")
    q, k, v = tensors()
    reason = unsupported_reason("native", q, k, v, SolAttentionOptions(scale=1.0))
    assert reason is not None and "no_such_module" in reason


def test_the_reference_supports_and_names_itself():
    q, k, v = tensors()
    assert unsupported_reason("reference", q, k, v, SolAttentionOptions(scale=1.0)) is None
    result = sol_attention(q, k, v)
    assert isinstance(result, SolAttentionResult) and result.backend == "reference" and result.lse is None


def test_integers_are_not_attended():
    q, k, v = (x.int() for x in tensors())
    with pytest.raises(BackendUnsupported, match="torch.int32"):
        sol_attention(q, k, v)


def test_the_public_module_imports_neither_triton_nor_sana():
    program = "import sys, engine.attention; print([m for m in ('triton', 'sol_attn', 'sglang') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
