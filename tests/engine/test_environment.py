"""environment.json tells what is needed to compare, and names nobody."""

from __future__ import annotations

import getpass
import platform
import sys
from pathlib import Path

import pytest

from config.lock import resolve
from config.record import CheckpointFile, CheckpointFound, Gpu
from engine import environment

WEIGHTS = CheckpointFound(
    kind="synthetic",
    revision="",
    sha256="0" * 64,
    files=(CheckpointFile(path="FL2VA/a", bytes=1, sha256="0" * 64),),
)


@pytest.fixture(scope="module")
def captured() -> environment.Environment:
    return environment.capture(resolve("cpu"), WEIGHTS, ["a sentence"])


def test_versions_are_those_of_the_running_interpreter(captured: environment.Environment) -> None:
    import numpy
    import torch

    versions = {package.name: package.version for package in captured.packages}
    assert versions["numpy"] == numpy.__version__
    assert captured.torch == torch.__version__
    assert captured.cuda == (torch.version.cuda or "")
    assert captured.differences[-1] == "a sentence"


def test_no_host_name_user_or_path_is_told(captured: environment.Environment) -> None:
    text = captured.model_dump_json()
    assert f'"{platform.node()}"' not in text
    assert str(Path.home()) + "/" not in text
    assert getpass.getuser() + "@" not in text


def test_pinned_sources_are_hashed_as_installed(captured: environment.Environment) -> None:
    assert captured.sglang_sources == environment.sglang_pins("cpu")
    assert any(path.endswith("dits/minimax_h3.py") for path in captured.sglang_sources)


def test_sources_of_another_sglang_before_the_installed_one_are_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pins are about what runs. It was the installed package that was hashed, whatever an import would take."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    found, pins = environment.sglang_sources("cpu"), environment.sglang_pins("cpu")
    assert found.keys() == pins.keys()
    assert not [path for path in pins if found[path] == pins[path]]


def test_what_differs_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = resolve("rtx4090")
    found = environment.differences(lock, (), {}, "")
    assert any("outside the target's image" in text for text in found)
    assert any("GPUs are none, not 1x NVIDIA GeForce RTX 4090" in text for text in found)
    monkeypatch.setattr(environment, "package_differences", lambda image: ["numpy 1 (locked 2)"])
    assert any("numpy 1 (locked 2)" in text for text in environment.differences(lock, (), {}, "sha256:0"))


def test_field_report_19_whether_the_compile_caches_were_cold_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment.compile_cache_folders():
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "TRITON_CACHE_DIR").mkdir()
    assert set(environment.compile_caches().values()) == {"cold"}
    (tmp_path / "TRITON_CACHE_DIR/kernel").touch()
    assert environment.compile_caches()["TRITON_CACHE_DIR"] == "warm"


def test_field_report_25_a_lowered_power_limit_makes_a_run_open() -> None:
    lock = resolve("rtx4090")
    fields = {"memory_mib": 24564, "sm_clock_max_mhz": 3105, "ecc": None, "mig": None, "uuid_sha256": "0" * 64}
    gpu = Gpu(index=0, name="NVIDIA GeForce RTX 4090", compute_capability="8.9", power_limit_w=450.0, **fields)
    pins = environment.sglang_pins("rtx4090")

    def said(limit: float) -> list[str]:
        board = gpu.model_copy(update={"power_limit_w": limit, "power_limit_default_w": 450.0})
        return [text for text in environment.differences(lock, (board,), pins, "sha256:" + "1" * 64) if "power" in text]

    assert said(450.0) == []
    assert said(300.0) == ["the power limit of GPU 0 is lowered to 300 of 450 W"]
