"""The bench driver where there is no GPU: its refusal, its peers, its arithmetic."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path

import pytest
import torch

from config.errors import Exit, UsageError
from engine.attention import bench, peers, reference, sana
from engine.attention.call import SolAttentionOptions

COMFY = """
calls = []
def sol_attn(q, k, v, *, scale=None, tau=1.0, thresh_type="diag", sink_blocks=(0, 0), sink_q=(0, 0)):
    calls.append((scale, tau, thresh_type, sink_blocks, sink_q))
    return v
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package of the peer's name and signature."""
    package = tmp_path / "sol_kernel"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "fwd.py").write_text(COMFY)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("sol_kernel", "sol_kernel.fwd"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("sol_kernel", "sol_kernel.fwd"):
        sys.modules.pop(name, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the driver would run")
def test_without_a_gpu_it_refuses_with_the_environments_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert bench.main() == Exit.ENVIRONMENT
    assert "no CUDA device" in capsys.readouterr().err


def test_a_peer_is_found_on_its_path_and_given_whole_blocks(peer):
    found = peers.find_peers([str(peer)])
    assert "comfyui-sol-attn" in found
    q = torch.zeros(1, 1000, 1, 128)
    options = SolAttentionOptions(0.5, 1.5, "exact", sink=(0, 951), dense_rows=(65, 129))
    assert found["comfyui-sol-attn"](q, q, q, options) is q
    assert sys.modules["sol_kernel.fwd"].calls == [(0.5, 1.5, "exact", (0, 15), (1, 3))]


def test_a_peer_that_is_not_there_is_not_found(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert "comfyui-sol-attn" not in peers.find_peers([])


def test_a_folder_without_a_peer_is_refused_and_says_what_was_wrong(tmp_path, monkeypatch, capsys):
    """A relative --peer from another folder once timed all cases beside `peers: none`, at exit code 0."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UsageError, match=f"{tmp_path}.*No module named 'sol_kernel'"):
        peers.find_peers([str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["bench", "--peer", str(tmp_path / "absent")])
    assert bench.main() == Exit.USAGE
    assert "no peer could be imported" in capsys.readouterr().err


def test_a_peer_that_cannot_be_imported_gives_its_own_reason(peer):
    (peer / "sol_kernel" / "fwd.py").write_text("import a_package_that_is_not_here")
    with pytest.raises(UsageError, match="No module named 'a_package_that_is_not_here'"):
        peers.find_peers([str(peer)])


def test_an_unknown_group_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "published,lenght"])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert "no group lenght; known: published, rank, tau, strided, length" in capsys.readouterr().err


SANA = """
calls = []
def sol_attn(q, k, v, *, scale=None, tau=1.0, thresh_type="diag", kv_splits=1, sink_tokens=0, sink_start=None):
    calls.append((scale, tau, thresh_type, kv_splits, sink_tokens, sink_start))
    return v.clone()
def get_sol_attn_backend(device=None):
    return "triton"
"""


@pytest.fixture
def sana_package(tmp_path, monkeypatch):
    """A folder with a package of ``sol_attn``'s signature, on a machine like an A100, where Triton is its kernel."""
    (tmp_path / "sol_attn.py").write_text(SANA)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "sol_attn", raising=False)
    monkeypatch.setattr(sana, "_capability", lambda device: (8, 0))
    yield tmp_path
    sys.modules.pop("sol_attn", None)


def bfloat16(tokens=200):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, tokens, 2, 128, generator=generator).bfloat16() for _ in range(3)]


def test_sana_is_compared_wherever_it_is_installed_and_does_the_dense_rows(sana_package):
    attention = peers.find_peers([str(sana_package)])["sana"]
    q, k, v = bfloat16()
    out = attention(q, k, v, SolAttentionOptions(0.5, 1.5, "exact", sink=(0, 95), dense_rows=(65, 129)))
    assert sys.modules["sol_attn"].calls == [(0.5, 1.5, "exact", 1, 95, 0)]
    assert torch.equal(out[:, :65], v[:, :65]) and torch.equal(out[:, 129:], v[:, 129:])
    want = torch.softmax(0.5 * q[0, 65:129, 1].double() @ k[0, :, 1].double().T, -1) @ v[0, :, 1].double()
    assert bench.relative_l2(out[0, 65:129, 1], want) < 1e-2


def test_sana_is_not_timed_in_place_of_the_kernel_that_belongs_there(sana_package, monkeypatch):
    attention = peers.find_peers([str(sana_package)])["sana"]
    monkeypatch.setattr(sana, "_capability", lambda device: (9, 0))
    for name in ("cutlass", "cutlass.cute", "cuda", "cuda.bindings", "cuda.bindings.driver", "tvm_ffi"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(ValueError, match="would run its 'triton' kernel; the published one"):
        attention(*bfloat16(), SolAttentionOptions(0.5))
    assert sys.modules["sol_attn"].calls == []


class _NoGpu:
    """Stands for what ``run_case`` asks of a GPU: the wall clock does for events."""

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, other) -> float:
            return (other.at - self.at) * 1e3


def test_a_case_holds_sana_beside_ours_and_names_what_ran(sana_package, monkeypatch):
    """The driver's own path for one case, with the reference in place of the kernels and the stand-in as the peer."""
    monkeypatch.setattr(torch.cuda, "Event", _NoGpu.Event)
    for name, answer in {
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 0,
        "max_memory_allocated": 1 << 20,
        "get_device_capability": (8, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(bench.kernels, "attend", lambda q, k, v, options: reference.attend(q, k, v, options))
    monkeypatch.setattr(bench, "prepare", lambda *args: None)
    fused = torch.randn(200, 3, 2, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    views = tuple(fused[None, :, i] for i in range(3))
    monkeypatch.setitem(bench.ALL_DATA, "random", lambda tokens, heads: views)
    found = {"sana": peers.find_peers([str(sana_package)])["sana"]}
    row = bench.run_case(bench.Case("published", 200, 2, dense_rows=100, sink=64), found)
    assert row["sana"]["backend"] == "sana/triton" and row["sana"]["ms"] > 0
    assert row["sana"]["relative_l2_to_native"] > 0.5  # the stand-in gives v back
    assert row["flash"]["operators"] == ["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert "failed" in row["cudnn"]
    assert len(row["dense_rows_on_top"]["samples_ms"]) == 25
    assert "sana" in bench.line(row, ["sana"]) and "dense rows on top" in bench.line(row, ["sana"])


def test_what_comes_on_top_is_free_of_a_drifting_clock(monkeypatch):
    """Of two calls of 10 and 11 on a clock that slows by a fifth meanwhile, one is the difference, and not two."""
    now = {"ms": 0.0, "factor": 1.0}

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            self.at = now["ms"]

        def elapsed_time(self, other) -> float:
            return other.at - self.at

    def taking(ms):
        def call():
            now["ms"] += ms * now["factor"]
            now["factor"] += 0.2 / 60

        return call

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert bench.measure_on_top(taking(10.0), taking(11.0))["ms"] == pytest.approx(1.1 + 10.5 / 300, rel=0.1)


def test_every_required_case_is_listed():
    listed = bench.cases()
    assert {case.data for case in listed} == set(bench.ALL_DATA)
    assert {case.thresh_type for case in listed} == {"diag", "exact"}
    assert {case.tokens for case in listed if case.group == "length"} >= {8192, 131072}
    assert {case.heads for case in listed if case.group == "rank"} == {14}
    assert len(set(listed)) == len(listed)


def test_the_gate_is_red_for_nan():
    """A comparison with NaN is false, whichever way round it is written; the gate must not pass on it."""
    assert not bench.relative_l2(torch.tensor([float("nan")]), torch.ones(1)) <= bench.RELATIVE_L2


def test_relative_l2_of_known_vectors():
    assert bench.relative_l2(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(4 / 3)
