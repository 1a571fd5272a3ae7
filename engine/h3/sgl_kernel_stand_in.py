"""Stand-ins for ``sgl_kernel`` and ``flashinfer``, which SGLang 0.5.17 imports on CUDA and no lock here holds.

PyPI's ``sglang-kernel`` and ``flashinfer`` for SGLang 0.5.17 are CUDA 13 builds, so the images of CUDA 12.8 are without
them. Of all the names that SGLang imports, MiniMax-H3 calls one: ``sgl_kernel.rotary_embedding``, in the video VAE's
decoder (minimax_h3_video_vae/vit_utils.py). It is served by a Triton kernel; every other name of ``sgl_kernel`` can be
imported, because SGLang's quantisation modules ask for them when they are loaded, and raises when it is called.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

SGL_KERNEL, FLASHINFER = "sgl_kernel", "flashinfer"
# Modules of sgl_kernel for which SGLang has a substitute of its own that it takes on an ImportError: a stand-in would
# hide it. sgl_kernel.scalar_type is asked for classes and values, not for functions (srt/layers/quantization/utils.py).
ABSENT = frozenset({"sgl_kernel.scalar_type"})
# The one name of flashinfer that SGLang imports without asking whether it is there (srt/layers/quantization/
# fp8_utils.py). All others stay missing: SGLang then takes its own branches for a machine without flashinfer.
FLASHINFER_NAMES = ("bmm_fp8",)
FLASHINFER_SWITCH = "SGLANG_IS_FLASHINFER_AVAILABLE"


def refuse(module: str, name: str) -> Callable[..., NoReturn]:
    """A function of this name that says, when it is called, that the real one is missing."""

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"{module}.{name} was called, but {module.split('.')[0]} is not installed: engine.h3.sgl_kernel_stand_in "
            f"serves {SGL_KERNEL}.rotary_embedding alone. Choose a back-end or a precision that does not need it, or "
            "install the real package."
        )

    missing.__name__, missing.__qualname__, missing.__module__ = name, name, module
    return missing


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """``engine.attention.kernels.rotary.rotary_embedding``; its module (and so Triton) is loaded at the first call."""
    from engine.attention.kernels.rotary import rotary_embedding as rotate

    rotate(positions, query, key, head_size, cos_sin_cache, is_neox)


class _SglKernel(ModuleType):
    """``sgl_kernel`` or a module below it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # questions of the import system and of inspect
            raise AttributeError(f"the stand-in for {self.__name__} has no {name}")
        return refuse(self.__name__, name)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of the stand-ins in ``roots``; asked last, so that an installed package comes first."""

    def __init__(self, roots: set[str]) -> None:
        self.roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, below = fullname.partition(".")
        if root not in self.roots or fullname in ABSENT or (below and root == FLASHINFER):
            return None
        return ModuleSpec(fullname, self, is_package=root == SGL_KERNEL, origin=__name__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name == FLASHINFER:
            return ModuleType(spec.name)
        return _SglKernel(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == FLASHINFER:
            for name in FLASHINFER_NAMES:
                setattr(module, name, refuse(FLASHINFER, name))
        elif module.__name__ == SGL_KERNEL:
            module.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]


def install() -> list[str]:
    """Put a stand-in into ``sys.modules`` for each of the two packages that is absent; returns their names for the
    record. Before SGLang is imported, and in every process that imports it. Installed packages are left alone."""
    names = [name for name in (SGL_KERNEL, FLASHINFER) if importlib.util.find_spec(name) is None]
    if names:
        sys.meta_path.append(_Finder(set(names)))
    for name in names:
        importlib.import_module(name)
    if FLASHINFER in names:
        os.environ[FLASHINFER_SWITCH] = "false"  # SGLang would take any module that can be found for the package
    return [f"stand_in.{name}" for name in names]


def installed() -> bool:
    """Whether ``sgl_kernel`` is the stand-in in this process."""
    return isinstance(sys.modules.get(SGL_KERNEL), _SglKernel)
