"""The adapter of the published ``sol_attn`` package, on a stand-in with its signature: the real one needs a GPU."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from engine.attention import BackendUnsupported, sana, sol_attention
from engine.attention.call import SolAttentionOptions
from engine.attention.reference import attend as reference_attend

CUTE = ("cutlass", "cutlass.cute", "cuda", "cuda.bindings", "cuda.bindings.driver", "tvm_ffi")


def tensors(tokens=500, heads=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, tokens, heads, 128, generator=generator).bfloat16() for _ in range(3)]


@pytest.fixture
def package(monkeypatch):
    """A ``sol_attn`` on an RTX 4090 with all that it needs. Calls are kept; the mathematics is the reference's."""
    module = types.ModuleType("sol_attn")
    module.calls = []
    module.chosen = "cute_sm89"

    def sol_attn(q, k, v, *, scale=None, tau=1.0, thresh_type="diag", kv_splits=1, sink_tokens=0, sink_start=None):
        assert all(x.is_contiguous() and x.dtype == torch.bfloat16 for x in (q, k, v))
        module.calls.append({"kv_splits": kv_splits, "sink_tokens": sink_tokens, "sink_start": sink_start})
        start = q.shape[1] - sink_tokens if sink_start is None else sink_start
        options = SolAttentionOptions(scale, tau, thresh_type, (start, start + sink_tokens))
        return reference_attend(q, k, v, options).out

    module.sol_attn = sol_attn
    module.get_sol_attn_backend = lambda device=None: module.chosen
    monkeypatch.setitem(sys.modules, "sol_attn", module)
    for name in CUTE:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sana, "_capability", lambda device: (8, 9))
    return module


@pytest.mark.parametrize("kind", ["diag", "exact"])
@pytest.mark.parametrize("sink", [(0, 0), (0, 130), (200, 300)])
def test_equals_the_reference_and_reports_its_routes(package, sink, kind):
    q, k, v = tensors()
    ours, theirs = (
        sol_attention(q, k, v, scale=0.2, thresh_type=kind, sink=sink, dense_rows=(100, 170), backend=name)
        for name in ("reference", "sana")
    )
    assert theirs.backend == "sana/cute_sm89"
    assert package.calls == [{"kv_splits": 1, "sink_tokens": sink[1] - sink[0], "sink_start": sink[0]}]
    assert torch.equal(ours.route_counts, theirs.route_counts)
    # the dense rows went through SDPA, whose BF16 roundings are others than the reference's
    torch.testing.assert_close(ours.out, theirs.out, rtol=2e-2, atol=2e-3)
    sparse = [*range(100), *range(170, 500)]
    assert torch.equal(ours.out[:, sparse], theirs.out[:, sparse])


def test_on_a_gpu_our_kernels_count_the_routes_inside_the_measured_request(package, monkeypatch):
    """The oracle's einsum over all blocks at every call would slow the very arms that the published times are about."""
    counted = torch.full((8, 2), 5, dtype=torch.int32)
    monkeypatch.setattr(sana.kernels, "supports", lambda *call: None)
    monkeypatch.setattr(sana.kernels, "count_routes", lambda *call: counted)
    monkeypatch.setattr(sana, "route_counts", lambda *call: pytest.fail("counted by the oracle"))
    assert sol_attention(*tensors(), backend="sana").route_counts is counted


def test_strided_inputs_are_made_contiguous_and_out_is_filled(package):
    fused = torch.randn(300, 3 * 2 * 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, k, v = (x.unflatten(-1, (2, 128))[None] for x in fused.split(256, dim=-1))
    out = torch.empty(1, 300, 2, 128, dtype=torch.bfloat16)
    assert not q.is_contiguous()
    result = sol_attention(q, k, v, backend="sana", out=out)
    assert result.out is out and torch.equal(out, sol_attention(q, k, v).out)


def refused(message, **options):
    with pytest.raises(BackendUnsupported, match=message):
        sol_attention(*tensors(), backend="sana", **options)


def test_refused_without_the_package(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "sol_attn", None)
    refused("package sol_attn cannot be imported.*pinned Sana commit")


def test_refused_when_it_would_fall_back_to_triton(package):
    package.chosen = "triton"
    refused(r"would run its 'triton' kernel; the published one for \(8, 9\) is 'cute_sm89'")


@pytest.mark.parametrize("missing", ["cutlass.cute", "cuda.bindings.driver", "tvm_ffi"])
def test_refused_when_the_cute_runtime_is_incomplete(package, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    refused(f"kernel cute_sm89 needs {missing}")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_triton_is_the_published_kernel_where_there_is_no_other(package, monkeypatch, capability):
    monkeypatch.setattr(sana, "_capability", lambda device: capability)
    monkeypatch.setitem(sys.modules, "cutlass.cute", None)
    package.chosen = "triton"
    assert sol_attention(*tensors(), backend="sana").backend == "sana/triton"


def test_refused_below_compute_capability_8(package, monkeypatch):
    monkeypatch.setattr(sana, "_capability", lambda device: (7, 5))
    refused("found compute capability 7.5")


def test_refused_on_a_cpu(package, monkeypatch):
    monkeypatch.undo()
    refused("needs an NVIDIA GPU.*found cpu")


def test_refused_for_another_release_of_the_package(package):
    package.sol_attn = lambda q, k, v, *, scale, tau, thresh_type: None
    refused("another release than the pinned one: it lacks kv_splits, sink_tokens, sink_start")
    del package.get_sol_attn_backend
    refused("it lacks get_sol_attn_backend")


def test_refused_what_the_package_cannot_return(package):
    refused("returns no LSE", return_lse=True)


def test_refused_dtype_and_head_dimension(package):
    q, k, v = tensors()
    with pytest.raises(BackendUnsupported, match="torch.float32"):
        sol_attention(q.float(), k.float(), v.float(), backend="sana")
    with pytest.raises(BackendUnsupported, match="head dimension 64"):
        sol_attention(q[..., :64], k[..., :64], v[..., :64], backend="sana")
