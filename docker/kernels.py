"""Builds the kernels of a target ahead, for its recipe's architecture; the machine that builds needs no GPU.

    kernels.py required|triton|none TARGET image.toml DESTINATION

required   SGLang's compiled kernels of the MiniMax-H3 path (needs nvcc) and this project's own Triton and Gluon kernels
triton     the latter alone, which need no more than Triton and gcc
none       nothing

DESTINATION/tvm-ffi is a TVM_FFI_CACHE_DIR: its names hold source hash, architecture and tvm-ffi version.
DESTINATION/triton is a TRITON_CACHE_DIR, see triton_kernels.py. container.sh copies both to where a run may write.
DESTINATION/kernels.json says what was built. Nothing that is built is run here.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from pathlib import Path


def build_sglang(capability: tuple[int, int], destination: Path) -> list[str]:
    """Compile SGLang's kernels of the H3 path; returns the libraries. Raises whatever the compiler says."""
    if shutil.which("nvcc") is None:
        raise SystemExit(
            "nvcc is not in the base image: SGLang's kernels cannot be built (KERNELS=triton leaves them out)"
        )
    os.environ["TVM_FFI_CACHE_DIR"] = str(destination)
    os.environ["SGLANG_DIFFUSION_PLATFORM_OVERRIDE"] = "cpu"  # the machine that builds has no GPU to find

    import torch

    from engine.h3 import cpu, sgl_kernel_stand_in

    if torch.version.cuda is None:
        cpu.declare_torchvision_operators()
    sgl_kernel_stand_in.install()

    import sglang.kernels.ops.activation.activation as activation
    import sglang.kernels.ops.diffusion.qknorm_rope as qknorm_rope
    import sglang.kernels.ops.layernorm.norm as norm
    from sglang.kernels.jit.utils import override_jit_cuda_arch

    bf16 = torch.bfloat16
    major, minor = capability
    with override_jit_cuda_arch(major, minor, "a" if major >= 9 else ""):
        # MiniMax-H3's transformer: heads of 128, of which RoPE turns 96. Its VAE decoder runs in half precision.
        qknorm_rope._jit_qknorm_rope_module(128, 96, True, bf16, bf16, True)
        norm._jit_qknorm_module(128, bf16)
        for dtype in (bf16, torch.float16):
            activation.activation_module(dtype, fast_math=False)  # what the roundings of both models ask for
    return keep_libraries(destination)


def keep_libraries(folder: Path) -> list[str]:
    """Leave nothing but the libraries, which SGLang loads when it finds them: ninja's files hold times and paths.

    Raises SystemExit when there is none.
    """
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".so":
            path.unlink()
    libraries = sorted(path.stem for path in folder.rglob("*.so"))
    if not libraries:
        raise SystemExit("no kernel of SGLang was built")
    return libraries


def build_triton(capability: tuple[int, int], target_name: str, destination: Path) -> list[str]:
    """Compile our own kernels; returns their names. Raises whatever Triton says."""
    import triton_kernels

    from config.lock import load_target

    target = load_target(target_name)
    heads = 56 // target.hardware.gpu_count  # MiniMax-H3's transformer has 56; Ulysses deals them out
    major, minor = capability
    policy = target.sol_attn.thresh_type
    synthetic = target.checkpoint.kind == "synthetic"
    return triton_kernels.build(destination, 10 * major + minor, heads, policy, synthetic)


def main() -> None:
    mode, target, recipe_file, destination = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    if mode not in ("required", "triton", "none"):
        raise SystemExit(f"KERNELS={mode}; needed: required, triton or none")
    destination.mkdir(parents=True, exist_ok=True)
    built: dict[str, list[str]] = {}
    if mode != "none":
        recipe = tomllib.loads(recipe_file.read_text("utf-8"))
        major, minor = map(int, recipe["gpu"]["arch_list"].split("."))
        if mode == "required":
            built["sglang"] = build_sglang((major, minor), destination / "tvm-ffi")
        built["triton"] = build_triton((major, minor), target, destination / "triton")
    document = {"state": "+".join(built) or "none", "kernels": built}
    (destination / "kernels.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
