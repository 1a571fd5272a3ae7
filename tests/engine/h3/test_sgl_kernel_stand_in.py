"""The stand-ins for sgl_kernel and flashinfer: SGLang loads with them as on CUDA, and only one name does any work."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.h3 import sgl_kernel_stand_in as stand_in

ROOTS = stand_in.SGL_KERNEL, stand_in.FLASHINFER


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """No stand-in before and after a test. An installed package would make the tests of stand-ins void, so none is."""
    monkeypatch.setenv(stand_in.FLASHINFER_SWITCH, "true")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    assert all(importlib.util.find_spec(name) is None for name in ROOTS)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ROOTS]:
        del sys.modules[name]


def run_imports(*arguments: str) -> dict:
    """What imports_on_cuda.py prints."""
    program = [sys.executable, str(Path(__file__).with_name("imports_on_cuda.py")), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_sglang_loads_on_cuda_and_the_rotation_is_bitwise_that_of_its_plain_branch():
    result = run_imports()
    assert result["installed"] == ["stand_in.sgl_kernel", "stand_in.flashinfer"]
    assert result["failed"] == {}
    assert len(result["rotations"]) == 3
    assert all(result["rotations"].values()), result["rotations"]


def test_without_the_stand_ins_sglang_does_not_load_on_cuda():
    """The control: were this to pass, the stand-ins would be needed no more."""
    failed = run_imports("--without-stand-in")["failed"]
    assert failed == {"sglang.multimodal_gen": "No module named 'sgl_kernel'"}


def test_an_installed_package_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel/__init__.py").write_text("rotary_embedding = 'the real one'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert stand_in.install() == ["stand_in.flashinfer"]
    assert importlib.import_module(stand_in.SGL_KERNEL).rotary_embedding == "the real one"
    assert not stand_in.installed()


def test_a_second_install_changes_nothing():
    assert stand_in.install() == ["stand_in.sgl_kernel", "stand_in.flashinfer"]
    first = sys.modules["sgl_kernel"]
    assert stand_in.install() == []
    assert sys.modules["sgl_kernel"] is first
    assert stand_in.installed()


@pytest.mark.parametrize("module", ["sgl_kernel", "sgl_kernel.flash_attn", "sgl_kernel.quantization"])
def test_other_names_can_be_imported_and_say_when_called_what_is_missing(module):
    stand_in.install()
    function = importlib.import_module(module).fp8_scaled_mm
    with pytest.raises(RuntimeError, match=rf"{module}\.fp8_scaled_mm was called, but sgl_kernel is not installed"):
        function(1, a=2)


def test_what_sglang_has_a_substitute_for_stays_missing():
    stand_in.install()
    for line in ("import sgl_kernel.scalar_type", "import flashinfer.rope", "from flashinfer import mm_fp4"):
        with pytest.raises(ImportError):
            exec(line, {})


def test_flashinfer_is_declared_unavailable_only_with_its_stand_in(tmp_path, monkeypatch):
    (tmp_path / "flashinfer.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert stand_in.install() == ["stand_in.sgl_kernel"]
    assert os.environ[stand_in.FLASHINFER_SWITCH] == "true"
    del sys.modules["sgl_kernel"]
    (tmp_path / "flashinfer.py").unlink()
    importlib.invalidate_caches()
    sys.meta_path = [finder for finder in sys.meta_path if not isinstance(finder, stand_in._Finder)]
    assert "stand_in.flashinfer" in stand_in.install()
    assert os.environ[stand_in.FLASHINFER_SWITCH] == "false"


def test_the_interleaved_form_is_refused():
    torch = pytest.importorskip("torch")
    stand_in.install()
    rotary_embedding = importlib.import_module(stand_in.SGL_KERNEL).rotary_embedding
    x = torch.zeros(1, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="is_neox=True"):
        rotary_embedding(torch.zeros(1, dtype=torch.long), x, x.clone(), 64, x.clone(), False)
