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
CUDA = Path("/usr/local/cuda")

SGLANG = """
import torch, tvm_ffi.cpp.extension as extension
from engine.h3 import cpu, sgl_kernel_stand_in
cpu.declare_torchvision_operators()
sgl_kernel_stand_in.install()
def refuse(*_, **__):
    raise SystemExit("not in the cache: something would be compiled")
extension.build_ninja = refuse
from sglang.kernels.jit.utils import override_jit_cuda_arch
from sglang.kernels.ops.activation.activation import activation_module
from sglang.kernels.ops.diffusion.qknorm_rope import _jit_qknorm_rope_module
from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module
with override_jit_cuda_arch(MAJOR, 0, "a" if MAJOR == 9 else ""):
    _jit_qknorm_rope_module(128, 96, True, torch.bfloat16, torch.bfloat16, True)
    _jit_qknorm_module(128, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16):
        activation_module(dtype, fast_math=False)
print("found")
"""


def build(mode: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """docker/kernels.py for TARGET, as the Dockerfile starts it."""
    command = [sys.executable, ROOT / "docker/kernels.py", mode, TARGET, ROOT / f"images/{TARGET}/image.toml", folder]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=variables, cwd=folder.parent, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Everything that can be built here: SGLang's kernels too where there is nvcc."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc, with which Triton compiles its launchers, is not installed here")
    built = tmp_path_factory.mktemp("ahead") / "kernels"
    done = build("required" if has_nvcc() else "triton", built, **cuda())
    assert done.returncode == 0, done.stderr
    yield built


def has_nvcc() -> bool:
    return (CUDA / "bin/nvcc").exists() and (CUDA / "lib64/libcudart.so").exists()


def cuda() -> dict[str, str]:
    """Variables under which tvm-ffi finds the compiler, and the CUDA runtime, which a CPU torch does not bring."""
    return {"CUDA_HOME": str(CUDA), "LIBRARY_PATH": str(CUDA / "lib64"), "LD_LIBRARY_PATH": str(CUDA / "lib64")}


def found(cache: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """tests/images/cached_kernels.py in a process of its own, with `cache` as Triton's."""
    command = [sys.executable, ROOT / "tests/images/cached_kernels.py", *map(str, arguments)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "docker")])
    variables = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(command, env=variables, cwd=cache.parent, capture_output=True, text=True)


def test_another_process_finds_them_where_they_were_copied_to(folder: Path, tmp_path: Path) -> None:
    document = json.loads((folder / "kernels.json").read_text())
    assert document["state"] == ("sglang+triton" if has_nvcc() else "triton")
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


@pytest.mark.parametrize(("major", "says"), [(9, "found"), (8, "not in the cache")])
def test_kernels_of_sglang_are_found_by_its_own_loader(folder: Path, tmp_path: Path, major: int, says: str) -> None:
    if not has_nvcc():
        pytest.skip(f"no nvcc with the CUDA runtime in {CUDA}: SGLang's kernels cannot be compiled here")
    shutil.copytree(folder / "tvm-ffi", tmp_path / "cache")
    variables = {**os.environ, **cuda(), "PYTHONPATH": str(ROOT), "TVM_FFI_CACHE_DIR": str(tmp_path / "cache")}
    variables["SGLANG_DIFFUSION_PLATFORM_OVERRIDE"] = "cpu"
    script = SGLANG.replace("MAJOR", str(major))
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True)
    assert says in done.stdout + done.stderr, done.stderr


def test_nothing_is_left_of_the_building(folder: Path) -> None:
    kept = [path for path in folder.rglob("*") if path.name.startswith("tmp.pid_") or path.suffix in (".c", ".o")]
    assert kept == []
    if has_nvcc():
        assert {path.suffix for path in (folder / "tvm-ffi").rglob("*") if path.is_file()} == {".so"}


def test_without_nvcc_the_kernels_of_sglang_cannot_be_built(tmp_path: Path) -> None:
    done = build("required", tmp_path / "kernels", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "nvcc is not in the base image" in done.stderr and "KERNELS=triton" in done.stderr


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    done = build("some", tmp_path / "kernels")
    assert done.returncode == 1 and "needed: required, triton or none" in done.stderr
