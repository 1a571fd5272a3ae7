"""Builds the kernels of a target ahead, for its recipe's architecture; the machine that builds needs no GPU.

    kernels.py required|triton|none TARGET image.toml DESTINATION

required   SGLang's CUDA kernels of the MiniMax-H3 path (needs nvcc), and what `triton` builds
triton     its Triton kernels and this project's own, which need no more than Triton and gcc
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

from config.architecture import PUBLISHED
from config.lock import load_target
from config.schema import Target


def build_cuda(capability: tuple[int, int], gpus: int, destination: Path) -> list[str]:
    """Compile SGLang's CUDA kernels of the H3 path; returns the libraries. Raises whatever the compiler says."""
    if shutil.which("nvcc") is None:
        raise SystemExit(
            "nvcc is not in the base image: SGLang's kernels cannot be built (KERNELS=triton leaves them out)"
        )
    os.environ["TVM_FFI_CACHE_DIR"] = str(destination)

    import sglang_kernels

    sglang_kernels.load_cuda(capability, gpus)
    return sglang_kernels.keep_libraries(destination)


def build_triton(capability: tuple[int, int], target: Target, destination: Path) -> list[str]:
    """Compile the Triton kernels, SGLang's and ours; returns their names. Raises whatever Triton says."""
    import triton_kernels

    major, minor = capability
    heads = PUBLISHED.dit.heads // target.hardware.gpu_count  # Ulysses deals them out
    policy = target.sol_attn.thresh_type
    synthetic = target.checkpoint.kind == "synthetic"
    return triton_kernels.build(destination, 10 * major + minor, heads, policy, synthetic)


def main() -> None:
    mode, name, recipe_file, destination = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    if mode not in ("required", "triton", "none"):
        raise SystemExit(f"KERNELS={mode}; needed: required, triton or none")
    destination.mkdir(parents=True, exist_ok=True)
    built: dict[str, list[str]] = {}
    if mode != "none":
        recipe, target = tomllib.loads(recipe_file.read_text("utf-8")), load_target(name)
        major, minor = map(int, recipe["gpu"]["arch_list"].split("."))
        if mode == "required":
            built["sglang"] = build_cuda((major, minor), target.hardware.gpu_count, destination / "tvm-ffi")
        built["triton"] = build_triton((major, minor), target, destination / "triton")
    document = {"state": "+".join(built) or "none", "kernels": built}
    (destination / "kernels.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
