"""Kernels that are compiled while an image is built are found by a run. No engine and no GPU are needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGET = "h100x4"


def build(mode: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """docker/kernels.py for TARGET, as the Dockerfile starts it."""
    command = [sys.executable, ROOT / "docker/kernels.py", mode, TARGET, ROOT / f"images/{TARGET}/image.toml", folder]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=variables, cwd=folder.parent, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if shutil.which("gcc") is None:
        pytest.skip("gcc, with which Triton compiles its launchers, is not installed here")
    built = tmp_path_factory.mktemp("ahead") / "kernels"
    done = build("triton", built)
    assert done.returncode == 0, done.stderr
    yield built


def found(cache: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """tests/images/cached_kernels.py in a process of its own, with `cache` as Triton's."""
    command = [sys.executable, ROOT / "tests/images/cached_kernels.py", *map(str, arguments)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "docker")])
    variables = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(command, env=variables, cwd=cache.parent, capture_output=True, text=True)


def test_another_process_finds_them_where_they_were_copied_to(folder: Path, tmp_path: Path) -> None:
    document = json.loads((folder / "kernels.json").read_text())
    assert document["state"] == "triton"
    shutil.copytree(folder / "triton", tmp_path / "cache")
    done = found(tmp_path / "cache", 90, 14, "exact", False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == document["kernels"]["triton"]
    assert {"_attend_kernel", "_repair_kernel", "_route_kernel", "_summarise_kernel", "_rotary_kernel"} <= set(
        document["kernels"]["triton"]
    )


def test_the_number_of_heads_of_a_gpu_makes_no_other_kernel(folder: Path) -> None:
    assert found(folder / "triton", 90, 56, "exact", False).returncode == 0


@pytest.mark.parametrize("other", [(80, 14, "exact", False), (90, 14, "diag", False)])
def test_another_architecture_or_policy_does_not_take_them(folder: Path, other: tuple[object, ...]) -> None:
    done = found(folder / "triton", *other)
    assert done.returncode == 1 and "not in the cache" in done.stderr


def test_nothing_is_left_of_the_building(folder: Path) -> None:
    kept = [path for path in folder.rglob("*") if path.name.startswith("tmp.pid_") or path.suffix in (".c", ".o")]
    assert kept == []


def test_without_nvcc_the_kernels_of_sglang_cannot_be_built(tmp_path: Path) -> None:
    done = build("required", tmp_path / "kernels", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "nvcc is not in the base image" in done.stderr and "KERNELS=triton" in done.stderr


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    done = build("some", tmp_path / "kernels")
    assert done.returncode == 1 and "needed: required, triton or none" in done.stderr
