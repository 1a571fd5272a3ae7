"""The bench driver where there is no GPU: its refusal, its peers, its arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from config.errors import Exit
from engine.attention import bench
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
    found = bench.find_peers([str(peer)])
    assert "comfyui-sol-attn" in found
    q = torch.zeros(1, 1000, 1, 128)
    options = SolAttentionOptions(0.5, 1.5, "exact", sink=(0, 951), dense_rows=(65, 129))
    assert found["comfyui-sol-attn"](q, q, q, options) is q
    assert sys.modules["sol_kernel.fwd"].calls == [(0.5, 1.5, "exact", (0, 15), (1, 3))]


def test_a_peer_that_is_not_there_is_not_found(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert "comfyui-sol-attn" not in bench.find_peers([])


def test_a_peer_without_dense_rows_refuses_them():
    q = torch.zeros(1, 10, 1, 128)
    with pytest.raises(ValueError, match="dense query rows"):
        bench.nvlabs_peer(None)(q, q, q, SolAttentionOptions(1.0, dense_rows=(0, 5)))


def test_every_required_case_is_listed():
    listed = bench.cases()
    assert {case.data for case in listed} == set(bench.DATA)
    assert {case.thresh_type for case in listed} == {"diag", "exact"}
    assert {case.tokens for case in listed if case.group == "length"} >= {8192, 131072}
    assert {case.heads for case in listed if case.group == "rank"} == {14}
    assert len(set(listed)) == len(listed)


def test_the_gate_is_red_for_nan():
    """A comparison with NaN is false, whichever way round it is written; the gate must not pass on it."""
    assert not bench.relative_l2(torch.tensor([float("nan")]), torch.ones(1)) <= bench.RELATIVE_L2


def test_relative_l2_of_known_vectors():
    assert bench.relative_l2(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(4 / 3)
