"""Kernels that are compiled while an image is built are found by a run. No engine and no GPU are needed."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.architecture import PUBLISHED

ROOT = Path(__file__).resolve().parents[2]
TARGET = "h100x4"
CUDA = Path("/usr/local/cuda")

SGLANG = Path(sysconfig.get_path("purelib")) / "sglang"
PATH = (
    "multimodal_gen/runtime/models/dits/minimax_h3.py",
    "multimodal_gen/runtime/models/encoders/minimax_h3_qwen3vl.py",
    "multimodal_gen/runtime/models/encoders/qwen3vl.py",
    "multimodal_gen/runtime/models/vaes/minimax_h3.py",
    "multimodal_gen/runtime/models/vaes/minimax_h3_video_vae/*.py",
    "multimodal_gen/runtime/models/vaes/minimax_h3_audio_vae/*.py",
    "multimodal_gen/runtime/pipelines_core/stages/model_specific_stages/minimax_h3/*.py",
    "multimodal_gen/runtime/layers/usp.py",
)
"""SGLang's modules that a request of MiniMax-H3 goes through, and that call kernels."""
KERNELS = {
    "activation.activation": {"silu_and_mul_with_activation_rounding", "silu_and_mul_with_activation_rounding_"},
    "diffusion.qknorm_rope": {"can_use_fused_inplace_qknorm_rope", "fused_inplace_qknorm_rope"},
    "diffusion.triton.indexed_modulation": {"indexed_gate_bf16_", "indexed_scale_shift_bf16_"},
    "diffusion.triton.scale_shift": {"try_fused_scaled_residual_add_exact"},
    "diffusion.triton.ulysses_qkv": {"pack_qkv_destination_major"},
    "diffusion.usp_relayout": {"usp_merge_heads"},
    "layernorm.norm": {"fused_inplace_qknorm"},
}
"""All that these take from sglang.kernels.ops; docker/sglang_kernels.py calls or loads every one."""
TRITON_OF_SGLANG = {
    "_fused_scaled_residual_add_exact_kernel",
    "_indexed_gate_bf16_kernel",
    "_indexed_scale_shift_bf16_kernel",
    "_pack_qkv_destination_major_kernel",
}
TILES = """
import torch
from tests.gpu import vae_rotation
import sglang_kernels
sglang_kernels.prepare()
vae_rotation.start_sglang()
from sglang.multimodal_gen.runtime.models.vaes.minimax_h3_video_vae import base_module
seen = set()
def add(residual, x, scale):
    seen.add((tuple(residual.shape), tuple(scale.shape)))
    return residual
base_module._scaled_residual_add = add
model = vae_rotation.build(torch.device("meta"), {"num_layers": 1})
for rows, columns in ((48, 84), (30, 52), (16, 16)):
    with torch.no_grad():
        model.decode_base(torch.empty(1, 24, 37, rows, columns, device="meta"))
print(sorted(seen))
"""
CUDA_KERNELS = """
import tvm_ffi.cpp.extension as extension
import sglang_kernels
def refuse(*_, **__):
    raise SystemExit("not in the cache: something would be compiled")
extension.build_ninja = refuse
sglang_kernels.load_cuda((MAJOR, 0), GPUS)
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
    ours = {"_attend_kernel", "_repair_kernel", "_route_kernel", "_summarise_kernel", "_rotary_kernel"}
    assert ours | TRITON_OF_SGLANG <= set(document["kernels"]["triton"])


def test_every_kernel_that_a_request_can_ask_sglang_for_is_accounted_for() -> None:
    if not SGLANG.is_dir():
        pytest.skip("SGLang is not installed: its modules are what this test reads")
    files = [path for pattern in PATH for path in SGLANG.glob(pattern)]
    assert len(files) > 20
    found: dict[str, set[str]] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.kernels"):
                module = str(node.module).removeprefix("sglang.kernels.ops.")
                found.setdefault(module, set()).update(alias.name for alias in node.names)
    assert found == KERNELS


def test_every_tile_of_every_video_has_the_elements_that_the_residual_kernel_is_built_for() -> None:
    """SGLang's own decode, on meta tensors, of three sizes: 1344 x 768, 832 x 480 and one tile."""
    if not SGLANG.is_dir():
        pytest.skip("SGLang is not installed: its decoder is what this test asks")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "docker")])
    done = subprocess.run(
        [sys.executable, "-c", TILES], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    video = PUBLISHED.video
    assert done.stdout.splitlines()[-1] == str([((1, video.tile_tokens(512, 512), video.hidden), (video.hidden,))])


def test_the_number_of_heads_of_a_gpu_makes_no_other_kernel(folder: Path) -> None:
    """56: one GPU holds them all, and nothing is packed for others."""
    assert found(folder / "triton", 90, 56, "exact", False).returncode == 0


@pytest.mark.parametrize("other", [(80, 14, "exact", False), (90, 14, "diag", False)])
def test_another_architecture_or_policy_does_not_take_them(folder: Path, other: tuple[object, ...]) -> None:
    done = found(folder / "triton", *other)
    assert done.returncode == 1 and "not in the cache" in done.stderr


@pytest.mark.parametrize(("major", "gpus", "says"), [(9, 4, "found"), (9, 1, "found"), (8, 1, "not in the cache")])
def test_kernels_of_sglang_are_found_by_its_own_loader(
    folder: Path, tmp_path: Path, major: int, gpus: int, says: str
) -> None:
    if not has_nvcc():
        pytest.skip(f"no nvcc with the CUDA runtime in {CUDA}: SGLang's kernels cannot be compiled here")
    shutil.copytree(folder / "tvm-ffi", tmp_path / "cache")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "docker")])
    variables = {**os.environ, **cuda(), "PYTHONPATH": paths, "TVM_FFI_CACHE_DIR": str(tmp_path / "cache")}
    script = CUDA_KERNELS.replace("MAJOR", str(major)).replace("GPUS", str(gpus))
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
