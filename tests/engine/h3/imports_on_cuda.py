"""Imports SGLang's MiniMax-H3 as on a CUDA machine without sgl-kernel, and rotates with its plain branch and with ours.

A process of its own: PyTorch is made to say that there is an H100, and Triton interprets its kernels. Prints JSON.
``python imports_on_cuda.py`` with ``--without-stand-in`` does the same imports without the stand-ins.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

MULTIMODAL = "sglang.multimodal_gen"
MODULES = (
    MULTIMODAL,
    MULTIMODAL + ".runtime.managers.gpu_worker",
    MULTIMODAL + ".runtime.managers.scheduler",
    MULTIMODAL + ".runtime.models.dits.minimax_h3",
    MULTIMODAL + ".runtime.models.encoders.minimax_h3_qwen3vl",
    MULTIMODAL + ".runtime.models.vaes.minimax_h3",
    MULTIMODAL + ".runtime.pipelines.minimax_h3_pipeline",
    MULTIMODAL + ".runtime.layers.attention.backends.sdpa",
)
VIT_UTILS = MULTIMODAL + ".runtime.models.vaes.minimax_h3_video_vae.vit_utils"


def claim_an_h100() -> None:
    """PyTorch's answers on a machine with one H100, for SGLang's choice of branches; nothing is run on it."""
    import torch

    class Properties:
        major, minor, total_memory, name, multi_processor_count = 9, 0, 80 << 30, "NVIDIA H100", 132

    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": Properties.name,
        "get_device_properties": Properties,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    torch.version.cuda = "12.8"


def rotations() -> dict[str, bool]:
    """Per case, whether ``sgl_kernel.rotary_embedding`` gave the bits of the VAE's plain PyTorch branch."""
    import torch

    from engine.h3 import sgl_kernel_stand_in

    rotary_embedding = importlib.import_module(sgl_kernel_stand_in.SGL_KERNEL).rotary_embedding

    vit_utils = importlib.import_module(VIT_UTILS)
    generator = torch.Generator().manual_seed(5)
    same = {}
    # dtype, tokens, heads, head size, rotated channels
    for dtype, tokens, heads, size, rotated in (
        (torch.float16, 7, 16, 64, 48),
        (torch.float16, 3, 17, 96, 96),
        (torch.bfloat16, 5, 2, 128, 96),
    ):
        query, key = (torch.randn(1, tokens, heads, size, generator=generator).to(dtype) for _ in range(2))
        angle = torch.randn(1, tokens, 1, rotated // 2, generator=generator).repeat(1, 1, 1, 2)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        want = [vit_utils.apply_rotary_pos_emb(x.clone(), (cos, sin)) for x in (query, key)]
        half = rotated // 2  # the cache as prepare_rotary_pos_emb makes it for CUDA
        cache = torch.cat((cos[0, :, 0, :half], sin[0, :, 0, :half]), -1).contiguous()
        rotary_embedding(torch.arange(tokens), query.view(tokens, -1), key.view(tokens, -1), size, cache, True)
        name = f"{dtype} {tokens}x{heads}x{size}, {rotated} rotated"
        same[name] = all(torch.equal(a, b) for a, b in zip((query, key), want, strict=True))
    return same


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[3]))
    importlib.import_module("tests.engine.attention.triton_interpreter")

    from engine.h3 import sgl_kernel_stand_in
    from engine.h3.cpu import declare_torchvision_operators

    installed = [] if "--without-stand-in" in sys.argv else sgl_kernel_stand_in.install()
    declare_torchvision_operators()
    claim_an_h100()
    failed = {}
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            failed[name] = str(error)
            break
    print(json.dumps({"installed": installed, "failed": failed, "rotations": {} if failed else rotations()}))


if __name__ == "__main__":
    main()
