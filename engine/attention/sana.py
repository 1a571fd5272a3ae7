"""Backend ``sana``: the published ``sol_attn`` package (NVlabs/Sana, branch sol-engine, techniques/sparse_backends).

The package picks its kernel by compute capability and drops to Triton without a word when the CuTe DSL cannot be
imported. Here a call is refused unless the package says that it will run the kernel which belongs to the capability.
Its call has no dense query rows: they are computed by a second pass through PyTorch's SDPA over all keys, as the
published runtimes do.

It returns no route either. Upstream counted routes once a run, outside the timed requests; here they are recomputed
from q and k at every call, and that time is in the request. Our own kernels keep it small: they read q once and k
twice, 1.65 GB at the published shape, 0.5 ms at an H100's 3.35 TB/s and 1.6 ms at an RTX 4090's 1.01 TB/s. At most
432 calls (9 sparse forwards of 48 blocks) are 0.7 s of the 4090's published 504 s; a quarter of the heads and at most
15 forwards are 0.09 s of the four H100s' 22.9 s. Both are within a claim's tolerance. Neither was measured there; an
H200 takes 0.66 ms.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

import torch
import torch.nn.functional as F

from engine.attention import kernels
from engine.attention.call import SolAttentionOptions, SolAttentionResult
from engine.attention.routing import route_counts

HEAD_DIM = 128
KV_SPLITS = 1  # all published H3 runtimes; the package splits on SM90 only

# The package's own dispatch; every other capability from 8.0 on, the A100's among them, runs its Triton kernel.
KERNEL_OF_CAPABILITY = {(8, 9): "cute_sm89", (9, 0): "cute_sm90", (10, 0): "cute_sm100", (12, 0): "cute_sm120"}
# What a CuTe kernel imports at its first call. The package declares none of them.
CUTE_MODULES = {
    "cutlass.cute": "nvidia-cutlass-dsl >= 4.5",
    "cuda.bindings.driver": "cuda-python",
    "tvm_ffi": "apache-tvm-ffi",
}
PARAMETERS = ("scale", "tau", "thresh_type", "kv_splits", "sink_tokens", "sink_start")


def _package() -> ModuleType | str:
    """The installed package, or why it cannot serve."""
    try:
        package = importlib.import_module("sol_attn")
    except ImportError as error:
        return f"package sol_attn cannot be imported ({error}); install it from the pinned Sana commit"
    missing = [name for name in ("sol_attn", "get_sol_attn_backend") if not callable(getattr(package, name, None))]
    if not missing:
        missing = [name for name in PARAMETERS if name not in inspect.signature(package.sol_attn).parameters]
    if missing:
        return f"package sol_attn is another release than the pinned one: it lacks {', '.join(missing)}"
    return package


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions) -> str | None:
    """Why the package cannot do this call as published, or None when it can."""
    if q.dtype != torch.bfloat16 or q.shape[-1] != HEAD_DIM:
        return f"q is {q.dtype} with head dimension {q.shape[-1]}; sol_attn takes bfloat16 and {HEAD_DIM}"
    if options.return_lse:
        return "sol_attn returns no LSE"
    capability = _capability(q.device)
    if capability is None or capability < (8, 0):
        found = q.device.type if capability is None else "compute capability {}.{}".format(*capability)
        return f"sol_attn needs an NVIDIA GPU of compute capability 8.0 or newer; found {found}"
    package = _package()
    if isinstance(package, str):
        return package
    expected = KERNEL_OF_CAPABILITY.get(capability, "triton")
    if expected != "triton":
        for module, distribution in CUTE_MODULES.items():
            try:
                importlib.import_module(module)
            except ImportError as error:
                return f"kernel {expected} needs {module} ({error}); install {distribution}"
    chosen = package.get_sol_attn_backend(q.device)
    if chosen != expected:
        return f"sol_attn would run its {chosen!r} kernel; the published one for {capability} is {expected!r}"
    return None


@torch.no_grad()
def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions) -> torch.Tensor:
    """The package's output for a call that ``supports`` admits, dense rows included; no route counts. q, k, v
    [1, T, H, 128] BF16, copied first where they are not contiguous."""
    package = importlib.import_module("sol_attn")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    sink_start, sink_stop = options.sink
    result: torch.Tensor = package.sol_attn(
        q,
        k,
        v,
        scale=options.scale,
        tau=options.tau,
        thresh_type=options.thresh_type,
        kv_splits=KV_SPLITS,
        sink_tokens=sink_stop - sink_start,
        sink_start=sink_start,
    )
    first, last = options.dense_rows
    if last > first:
        rows = q[:, first:last].transpose(1, 2)
        dense = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), scale=options.scale)
        result[:, first:last] = dense.transpose(1, 2)
    return result


def kernel_of(device: torch.device) -> str:
    """The package's own name of the kernel that it runs on this device."""
    return str(importlib.import_module("sol_attn").get_sol_attn_backend(device))


@torch.no_grad()
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions, out: torch.Tensor | None = None
) -> SolAttentionResult:
    """Run the package's kernel on q, k, v [1, T, H, 128] BF16 and count the routes from q and k."""
    result = compute(q, k, v, options)
    if out is not None:
        result = out.copy_(result)
    count = route_counts if kernels.supports(q, k, v, options) else kernels.count_routes
    return SolAttentionResult(result, count(q, k, options), None, f"sana/{kernel_of(q.device)}")
