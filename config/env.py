"""Environment variables that would change what is locked: named and refused before anything starts.

A lock holds the variables that matter in its `env` table, and a run sets exactly those. A variable of the caller's that
matters and is not in the table would make the run differ from its lock without a trace, so it is an error. Variables
that only say where caches lie, or hold credentials, pass.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from fnmatch import fnmatchcase

from config.errors import UsageError
from config.lock import Lock

_PUBLISHED = "a setting of the published runtimes; here the target holds it"
_SGLANG = "switches kernels, caches or loaders inside SGLang"
_TORCH = "changes PyTorch's allocator, compiler or collectives"
_TRITON = "changes how Triton compiles a kernel"
_CUTE = "changes how a CuTe or CUTLASS kernel is compiled"
_CUDA = "changes how the CUDA driver loads, compiles or launches kernels"
_CUDA_LIBRARY = "changes which algorithm, precision or workspace a CUDA library takes"
_NCCL = "changes how GPUs exchange data"
_THREADS = "changes the number, the placement or the instructions of CPU threads"
_PYTHON = "puts other code before the installed packages, which are what the record names"
_GPUS = "picks other GPUs than the first ones, which are those that are watched while they run"
_ALLOCATOR = "replaces or tunes the memory allocator, or puts other code before a library"

INFLUENCES: dict[str, str] = {
    "H3_*": _PUBLISHED,
    "SOL_ATTN_*": _PUBLISHED,
    "SGLANG_*": _SGLANG,
    "MINIMAX_H3_*": _SGLANG,
    "FLASHINFER_*": _SGLANG,
    "DIFFUSERS_ATTN_*": _SGLANG,
    "PYTORCH_*": _TORCH,
    "TORCH_*": _TORCH,
    "TORCHINDUCTOR_*": _TORCH,
    "TORCHDYNAMO_*": _TORCH,
    "TRITON_*": _TRITON,
    "CUTE_DSL_*": _CUTE,
    "CUTLASS_*": _CUTE,
    "CUDA_LAUNCH_BLOCKING": _CUDA,
    "CUDA_MODULE_LOADING": _CUDA,
    "CUDA_DEVICE_MAX_CONNECTIONS": _CUDA,
    "CUDA_FORCE_PTX_JIT": _CUDA,
    "CUDA_DISABLE_PTX_JIT": _CUDA,
    "CUBLAS_*": _CUDA_LIBRARY,
    "CUBLASLT_*": _CUDA_LIBRARY,
    "CUDNN_*": _CUDA_LIBRARY,
    "NVIDIA_TF32_OVERRIDE": _CUDA_LIBRARY,
    "NCCL_*": _NCCL,
    "OMP_*": _THREADS,
    "GOMP_*": _THREADS,
    "KMP_*": _THREADS,
    "MKL_*": _THREADS,
    "OPENBLAS_*": _THREADS,
    "NUMEXPR_*": _THREADS,
    "DNNL_*": _THREADS,
    "ONEDNN_*": _THREADS,
    "ATEN_CPU_CAPABILITY": _THREADS,
    "TOKENIZERS_PARALLELISM": _THREADS,
    "LD_PRELOAD": _ALLOCATOR,
    "MALLOC_*": _ALLOCATOR,
    "GLIBC_TUNABLES": _ALLOCATOR,
    "PYTHONPATH": _PYTHON,
    "PYTHONHOME": _PYTHON,
    "CUDA_VISIBLE_DEVICES": _GPUS,
    "PYTHONOPTIMIZE": "removes the assertions of the code that runs",
}
"""Name or pattern (as of a shell) to what a matching variable would do."""

HARMLESS: dict[str, str] = {
    "PYTORCH_KERNEL_CACHE_PATH": "a cache's place",
    "TORCH_EXTENSIONS_DIR": "a cache's place",
    "TORCH_HOME": "a cache's place",
    "TORCHINDUCTOR_CACHE_DIR": "a cache's place",
    "TRITON_CACHE_DIR": "a cache's place",
    "TRITON_HOME": "a cache's place",
    "TRITON_LIBCUDA_PATH": "the driver library's place",
    "SGLANG_DIFFUSION_CACHE_ROOT": "a cache's place",
    "SGLANG_DIFFUSION_CONFIG_ROOT": "a folder's place",
    "SGLANG_DIFFUSION_LOGGING_LEVEL": "what is printed",
    "SGLANG_DIFFUSION_LOGGING_PREFIX": "what is printed",
    "NCCL_VERSION": "a label that NVIDIA's images carry; NCCL does not read it",
}
"""Exceptions from the patterns of INFLUENCES: exact names."""


def influence(name: str) -> str | None:
    """What a variable of this name would change, or None where it changes nothing that is locked."""
    if name in HARMLESS:
        return None
    return next((reason for pattern, reason in INFLUENCES.items() if fnmatchcase(name, pattern)), None)


def _first_ones(value: str) -> bool:
    """Whether a list of devices is 0, 1, ... in this order, as Slurm sets it: it picks what would be taken anyway."""
    devices = value.split(",")
    return devices == [str(number) for number in range(len(devices))]


def refuse_influences(environ: Mapping[str, str], lock: Lock) -> None:
    """Refuse an environment that would change a locked value.

    A variable passes if the lock's `env` holds it with the same value; on a CPU target those of the CPU's threads and
    instructions and of GPUs pass too. Values are never shown: one may be a secret.

    Raises:
        UsageError: naming every variable that would.
    """
    locked: Mapping[str, str] = lock.values["env"]
    # A CPU target locks no thread count and no instruction set, and its times stand beside no claim. Some machines
    # need such a variable: an old OpenBLAS computes wrong results on new processors without OPENBLAS_CORETYPE.
    on_cpu = lock.values["hardware"]["kind"] == "cpu"
    found: dict[str, str] = {}
    for name, value in sorted(environ.items()):
        if name in locked:
            if value != locked[name]:
                found[name] = f"the lock sets it to {locked[name]!r}"
        elif (reason := influence(name)) is None or (on_cpu and reason in (_THREADS, _GPUS)):
            continue
        elif not (reason is _GPUS and _first_ones(value)):
            found[name] = reason
    if not found:
        return
    names = shlex.join(found)
    raise UsageError(
        "these environment variables would change what the lock fixes:\n"
        + "\n".join(f"    {name}: {reason}" for name, reason in found.items()),
        remedy=f"unset {names}; or pass a value on with --set env.{next(iter(found))}=..., which makes the run open",
    )
