"""Builds SGLang's compiled kernels of the MiniMax-H3 path ahead, for the recipe's architecture.

    kernels.py none|skip|required image.toml DESTINATION

Compiling needs nvcc and no GPU. The result is a TVM_FFI_CACHE_DIR: its names hold source hash, architecture
and tvm-ffi version, so a machine of another kind does not take it by mistake. Nothing that is built is run here.
DESTINATION/kernels.json says what was built, or that nothing was.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from pathlib import Path


def build(recipe: dict, destination: Path) -> list[str]:
    """Compile every kernel; returns the files. Raises whatever the compiler says."""
    os.environ["TVM_FFI_CACHE_DIR"] = str(destination)
    os.environ["SGLANG_DIFFUSION_PLATFORM_OVERRIDE"] = "cpu"  # the machine that builds has no GPU to find
    major, minor = map(int, recipe["gpu"]["arch_list"].split("."))

    import torch

    from engine.h3 import cpu

    if torch.version.cuda is None:
        cpu.declare_torchvision_operators()

    import sglang.kernels.ops.activation.activation as activation
    import sglang.kernels.ops.diffusion.qknorm_rope as qknorm_rope
    import sglang.kernels.ops.layernorm.norm as norm
    from sglang.kernels.jit.utils import override_jit_cuda_arch

    bf16 = torch.bfloat16
    with override_jit_cuda_arch(major, minor, "a" if major >= 9 else ""):
        # MiniMax-H3's transformer: heads of 128, of which RoPE turns 96. Its VAE decoder runs in half precision.
        qknorm_rope._jit_qknorm_rope_module(128, 96, True, bf16, bf16, True)
        norm._jit_qknorm_module(128, bf16)
        for dtype in (bf16, torch.float16):
            activation._jit_activation_module(dtype)
    return sorted(str(path.relative_to(destination)) for path in destination.rglob("*.so"))


def main() -> None:
    mode, recipe_file, destination = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    destination.mkdir(parents=True, exist_ok=True)
    state, files = mode, []
    if mode == "required":
        if shutil.which("nvcc") is None:
            raise SystemExit("nvcc is not in the base image: kernels cannot be built (KERNELS=skip leaves them out)")
        files = build(tomllib.loads(recipe_file.read_text("utf-8")), destination)
        if not files:
            raise SystemExit("no kernel was built")
        state = "built"
    document = {"state": state, "files": files}
    (destination / "kernels.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
