"""SGLang's own kernels on the way of a MiniMax-H3 request: which they are, and the calls by which they are built ahead.

Two kinds: CUDA sources that SGLang compiles with nvcc when they are first called, and Triton kernels. Text encoder and
audio VAE have none. tests/images/test_kernels.py compares this list with what SGLang's modules import.
"""

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from config.architecture import PUBLISHED

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROTATED = 96  # of the 128 dimensions of a head: SGLang 0.5.17, models/dits/minimax_h3.py
ROWS = 4096  # any multiple of 16, for which Triton specialises: documents are padded to one of 64, and Ulysses has four
EDGE = 512  # pixels; any edge that is not below a tile's
DIT, ULYSSES = "sglang.multimodal_gen.runtime.models.dits.minimax_h3", "sglang.multimodal_gen.runtime.layers.usp"
SCALE_SHIFT = "sglang.kernels.ops.diffusion.triton.scale_shift"


class OnCuda(torch.Tensor):
    """A meta tensor that SGLang takes for one on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").as_subclass(OnCuda)


def prepare() -> None:
    """Import SGLang's modules where there is no GPU and no sgl_kernel; before anything pretends that there is a GPU."""
    os.environ["SGLANG_DIFFUSION_PLATFORM_OVERRIDE"] = "cpu"
    from engine.h3 import cpu, sgl_kernel_stand_in

    if torch.version.cuda is None:
        cpu.declare_torchvision_operators()
    sgl_kernel_stand_in.install()
    for name in (DIT, ULYSSES, SCALE_SHIFT):
        importlib.import_module(name)


def load_cuda(capability: tuple[int, int], gpus: int) -> None:
    """Have SGLang's loader find or compile every CUDA kernel of the path. gpus: of one request.

    Raises whatever the compiler says.
    """
    prepare()
    import sglang.kernels.ops.activation.activation as activation
    import sglang.kernels.ops.diffusion.qknorm_rope as qknorm_rope
    import sglang.kernels.ops.diffusion.usp_relayout as usp_relayout
    import sglang.kernels.ops.layernorm.norm as norm
    from sglang.kernels.jit.utils import override_jit_cuda_arch

    width = PUBLISHED.dit.head_dim
    major, minor = capability
    with override_jit_cuda_arch(major, minor, "a" if major >= 9 else ""):
        qknorm_rope._jit_qknorm_rope_module(width, ROTATED, True, BF16, BF16, True)
        norm._jit_qknorm_module(width, BF16)
        for dtype in (BF16, FP16):  # the transformer's, the video decoder's
            activation.activation_module(dtype, fast_math=False)  # what the roundings of both models ask for
        if gpus > 1:
            usp_relayout._jit_usp_relayout_module(BF16)


def call_triton(gpus: int) -> None:
    """Call every Triton kernel of the path as a request does, through SGLang's functions, on meta tensors.

    gpus: of one request. Needs `prepare`.
    """
    _modulate()
    _add_scaled_residual()
    if gpus > 1:
        _pack(gpus)


def _modulate() -> None:
    """The transformer's: scale and shift, and the gate, of a block and of the last layer."""
    dit = importlib.import_module(DIT)
    hidden, modalities = PUBLISHED.dit.hidden, dit.MINIMAX_H3_ADALN_MODALITY_NUM
    x, indices = meta(ROWS, hidden), meta(ROWS, dtype=torch.int64)

    def projected(vectors: int, kinds: int) -> tuple[torch.Tensor, ...]:
        projection = SimpleNamespace(expand_ratio=vectors, modality_num=kinds, hidden_size=hidden)
        out: tuple[torch.Tensor, ...] = dit.MiniMaxH3AdalnProj.split_output(
            projection, meta(2, kinds * vectors * hidden)
        )
        return out

    shift, scale, gate, *_ = projected(6, modalities)
    dit._modulate_scale_shift(x, shift, scale, indices, dtype=BF16)
    dit._modulate_gate(x, gate, x, indices, dtype=BF16)
    shift, scale = projected(2, 1)
    dit._modulate_scale_shift(x, shift, scale, indices, dtype=BF16)


def _add_scaled_residual() -> None:
    """The video decoder's, which is specialised for the number of elements: every tile of a request has the same."""
    video = PUBLISHED.video
    operations = importlib.import_module(SCALE_SHIFT)
    shape = 1, video.tile_tokens(EDGE, EDGE), video.hidden
    residual, x, scale = meta(*shape, dtype=FP32), meta(*shape, dtype=FP16), meta(video.hidden, dtype=FP32)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(mock.patch.object(operations, "current_platform", SimpleNamespace(is_cuda=lambda: True)))
        if operations.try_fused_scaled_residual_add_exact(residual, x, scale) is None:
            raise RuntimeError("SGLang does not take its fused kernel for what its video decoder adds")


def _pack(gpus: int) -> None:
    """What Ulysses sends: Q, K and V, views of one buffer."""
    dit = PUBLISHED.dit
    pack: Any = importlib.import_module(ULYSSES).pack_qkv_destination_major
    pack(*meta(ROWS, 3 * dit.heads, dit.head_dim).split(dit.heads, dim=1), gpus)


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
