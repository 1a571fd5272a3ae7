"""Fills a Triton cache with the kernels of a run for a GPU that the building machine has not.

Triton finds a compiled kernel by a digest of its source, of Triton itself, of ptxas' version, of the architecture, and
of how the arguments are specialised: their types, whether a pointer or stride is a multiple of 16, the constants. All
of it is known without a GPU, as long as the arguments are made by the code that makes them at run time. So the real
calls are made here, on meta tensors of the published shapes, with a driver that names the architecture and launches
nothing. Token counts do not enter: the kernels ask not to be specialised for them.

The C modules that load and launch kernels are found by a digest of their source and are compiled here too. They are not
imported, as that needs the driver's library; it is linked against a stand-in that has the names which they use.

What torch.compile generates is not here: inductor writes it for the running pipeline and times candidates on the
device. That is compiled in the warm-up, which is not timed, and kept in the volume of caches.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import sglang_kernels
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build as triton_build
from triton.runtime.jit import JITFunction

from config.architecture import PUBLISHED

DTYPE = torch.bfloat16
VAE_ROTATED = 48  # of the 64 dimensions of a head of the video decoder: SGLang 0.5.17, models/vaes/minimax_h3.py
TOKENS = 4096  # any multiple of 16: the kernels are not specialised for it


class Elsewhere:
    """A Triton driver that names a compute capability and reaches no device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        """As triton.backends.nvidia.driver.CudaDriver gives it on such a device."""
        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def pretended(capability: int, kernels: list[Any]) -> Any:
    """Launches compile for `capability` and run nothing; what they compile is appended to `kernels`."""
    launch = JITFunction.run

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        if all(known is not kernel for known in kernels):
            kernels.append(kernel)
        return kernel

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(Elsewhere(capability))
    processors = SimpleNamespace(multi_processor_count=1)  # the size of a grid, which is no part of a kernel
    try:
        with (
            mock.patch.object(JITFunction, "run", compiled),
            mock.patch("torch.cuda.get_device_properties", lambda *_: processors),
        ):
            yield
    finally:
        triton.runtime.driver._active = before


def call_all(capability: int, heads: int, thresh_type: str, synthetic: bool) -> None:
    """Make every call that a run makes of Triton kernels, SGLang's and ours, on meta tensors.

    Needs `sglang_kernels.prepare`. heads: of one GPU. thresh_type: of the target's Sol-Attn policy. synthetic: whether
    weights are drawn on the GPU.
    """
    from engine.attention import kernels
    from engine.attention.call import SolAttentionOptions
    from engine.attention.kernels.rotary import rotary_embedding

    def meta(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    sglang_kernels.call_triton(PUBLISHED.dit.heads // heads)
    q = meta(1, TOKENS, heads, PUBLISHED.dit.head_dim)
    plan = kernels.plan_for(divmod(capability, 10))
    options = SolAttentionOptions(PUBLISHED.dit.head_dim**-0.5, thresh_type=thresh_type)
    kernels.attend(q, q, q, options, plan=plan)
    video = PUBLISHED.video
    for dtype in (torch.float16, torch.bfloat16):
        vectors, cache = meta(TOKENS, video.hidden, dtype=dtype), meta(TOKENS, VAE_ROTATED, dtype=dtype)
        rotary_embedding(meta(TOKENS, dtype=torch.int64), vectors, vectors, video.head_dim, cache)
    if not synthetic:
        return
    from engine.checkpoint.draw_kernel import draw_on_gpu

    for dtype in (torch.bfloat16, torch.float32):
        draw_on_gpu(meta(TOKENS, dtype=dtype), (1 << 126) + (1 << 62), 0, 0.1, 0.0)


def driver_stand_in(folder: Path, sources: list[str]) -> Path:
    """`folder` with a libcuda.so.1 that has every name of the CUDA driver which the C sources use."""
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", "".join(sources))))
    text = "".join(f"void {name}(void) {{}}\n" for name in names)
    (folder / "cuda.c").write_text(text)
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "cuda.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


def build_launchers(kernels: list[Any]) -> None:
    """Compile Triton's C modules for `kernels` into its cache, without importing them."""
    text = Path(nvidia.dirname, "driver.c").read_text("utf-8")
    made = nvidia.make_launcher

    def kept(*arguments: Any) -> str:
        sources.append(made(*arguments))
        return sources[-1]

    sources = [text]
    loaded = mock.patch.object(triton_build, "_load_module_from_path", lambda *_: mock.Mock())
    with loaded, mock.patch.object(nvidia, "library_dirs", lambda: []):
        with mock.patch.object(nvidia, "compile_module_from_src", lambda **_: mock.Mock()):
            with mock.patch.object(nvidia, "make_launcher", kept):
                for kernel in kernels:
                    nvidia.CudaLauncher(kernel.src, kernel.metadata)
        with tempfile.TemporaryDirectory() as name:
            libraries = [nvidia.libdevice_dir, str(driver_stand_in(Path(name), sources))]
            for source in dict.fromkeys(sources):
                triton_build.compile_module_from_src(
                    src=source,
                    name="cuda_utils" if source is text else "__triton_launcher",
                    library_dirs=libraries,
                    include_dirs=nvidia.include_dirs,
                    libraries=nvidia.libraries,
                )


def build(destination: Path, capability: int, heads: int, thresh_type: str, synthetic: bool) -> list[str]:
    """Compile the kernels and their launchers into `destination`, which must be the place where it will be read.

    Triton writes absolute paths into it. capability: 80, 89, 90 ... Returns the kernels' names, sorted.
    Raises what Triton, ptxas or gcc raise.
    """
    kernels: list[Any] = []
    sglang_kernels.prepare()
    with knobs.cache.scope():
        knobs.cache.dir = str(destination)
        with pretended(capability, kernels):
            call_all(capability, heads, thresh_type, synthetic)
        build_launchers(kernels)
    for left in destination.rglob("tmp.pid_*"):
        left.rmdir()
    return sorted(kernel.name for kernel in kernels)
