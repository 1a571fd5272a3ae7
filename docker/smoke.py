"""The last thing of a build that runs code of the image: does what the image is for import, and is it what is pinned?

    smoke.py TARGET | smoke.py verify

No GPU and no network is needed. Ends with a traceback or SystemExit, which ends the build.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys

STAGES = "sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.stages."
H3 = (
    "sglang.multimodal_gen.runtime.models.dits.minimax_h3",
    "sglang.multimodal_gen.runtime.models.vaes.minimax_h3",
    "sglang.multimodal_gen.runtime.entrypoints.diffusion_generator",
    STAGES + "denoising",
    STAGES + "decoding",
)


def verifying_side() -> None:
    """The verifying side imports, decodes media, and drags in nothing that runs a benchmark."""
    import av  # noqa: F401 - the media checks need it

    import entrypoints.verify  # noqa: F401
    import verify.report  # noqa: F401

    dragged = {"torch", "triton", "sglang"} & set(sys.modules)
    if dragged:
        raise SystemExit(f"the verifying side imports {sorted(dragged)}")


def running_side(target: str) -> None:
    """SGLang's MiniMax-H3 path imports from the pinned files, and ffmpeg can write H.264."""
    import torch

    from config.lock import load_target
    from engine.environment import package_differences, sglang_pins, sglang_sources
    from engine.h3 import cpu, sgl_kernel_stand_in

    encoders = subprocess.run(["ffmpeg", "-hide_banner", "-encoders"], capture_output=True, text=True).stdout
    if "libx264" not in encoders or shutil.which("ffprobe") is None:
        raise SystemExit("ffmpeg has no libx264, or ffprobe is missing")
    recipe = load_target(target).recipe
    pins, found = sglang_pins(recipe), sglang_sources(recipe)
    changed = sorted(path for path, digest in pins.items() if found[path] != digest)
    if changed or not pins:
        raise SystemExit(f"{len(changed)} of {len(pins)} SGLang sources are not the pinned ones: {changed[:3]}")
    if wrong := package_differences(recipe):
        raise SystemExit(f"packages differ from the lock: {wrong[:5]}")
    if torch.version.cuda is None:  # torchvision's own operators do not load beside a CPU build
        cpu.declare_torchvision_operators()
    else:
        sgl_kernel_stand_in.install()
    for name in H3:
        importlib.import_module(name)


if __name__ == "__main__":
    verifying_side()
    if sys.argv[1] != "verify":
        running_side(sys.argv[1])
    print(f"smoke test of {sys.argv[1]}: passed")
