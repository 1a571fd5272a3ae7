"""Layer-wise offload from weights on disk, on a GPU: SGLang's own manager with real streams, against resident weights.

    python -m tests.gpu.mapped_weights [--layers 6] [--mib 384] [--folder DIR] [--json FILE]

A stack of BF16 layers runs resident, then offloaded from host memory as SGLang does it (pageable, and pinned), then
from mapped files (`engine.h3.mapped`), with the pages in the page cache and after they were dropped. Every output must
be the same to the bit; the seconds of a pass over all layers, less computation than copying, show what the mode costs.
Without a CUDA device or SGLang: exit code 10 (the environment's).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from config.errors import Exit

WIDTH = 8192
"""Of each square layer; its height follows from the size."""


def missing() -> str | None:
    """Why this cannot run here, or None when it can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device; this machine has none"
    return None if importlib.util.find_spec("sglang") else "needs sglang, which is not installed"


class Stack(torch.nn.Module):
    """Layers of one size, each a residual product. mib: bytes of a layer's weights, MiB."""

    def __init__(self, layers: int, mib: int) -> None:
        super().__init__()
        rows = mib * 2**20 // 2 // WIDTH
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, rows, bias=True) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, WIDTH] BF16 -> the same shape."""
        for block in self.blocks:
            out = block(x)
            x = x + torch.nn.functional.pad(out, (0, max(0, WIDTH - out.shape[1])))[:, :WIDTH] * 0.01
        return x


def fill(stack: Stack) -> Stack:
    """The same numbers in every stack."""
    generator = torch.Generator().manual_seed(4)
    for parameter in stack.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).mul_(0.02).bfloat16()
        parameter.requires_grad_(False)
    return stack


def drop(path: Path, model: Stack, manager: Any) -> None:
    """Take a file's pages out of the page cache: unmap them from here, then ask the kernel."""
    import ctypes
    import mmap

    libc = ctypes.CDLL(None)
    for layer in manager._strided_cpu_weights.values():
        for tensor in layer.values():
            first = tensor.data_ptr() - tensor.data_ptr() % mmap.PAGESIZE
            length = tensor.data_ptr() + tensor.numel() * tensor.element_size() - first
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def timed(model: Stack, x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """One pass, and its seconds with the device synchronised."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = model(x)
    torch.cuda.synchronize()
    return out, time.perf_counter() - began


def measure(layers: int, mib: int, folder: Path) -> dict[str, Any]:
    """All ways, and whether their outputs are the resident stack's to the bit."""
    from safetensors.torch import safe_open, save_file
    from sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload import LayerwiseOffloadManager

    from engine.h3 import mapped

    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    resident = fill(Stack(layers, mib)).cuda()
    wanted, _ = timed(resident, x)
    wanted, alone = timed(resident, x)
    del resident
    torch.cuda.empty_cache()
    size = layers * mib * 2**20

    def manage(model: Stack, pinned: bool) -> Any:
        return LayerwiseOffloadManager(
            model, layers_attr_str="blocks", num_layers=layers, enabled=True, pin_cpu_memory=pinned
        )

    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "layers": layers, "mib": mib, "resident_s": alone}
    equal = {}
    for name, pinned in (("pageable", False), ("pinned", True)):
        model = fill(Stack(layers, mib))
        manager = manage(model, pinned)
        timed(model, x)
        out, seconds = timed(model, x)
        equal[name], report[f"{name}_s"] = torch.equal(out, wanted), seconds
        manager.remove_forward_hooks()
        del model, manager
        torch.cuda.empty_cache()
    model, path = fill(Stack(layers, mib)), folder / "stack.safetensors"
    save_file(dict(model.named_parameters()), path)
    weights = mapped.Weights(mapped.Spill(lambda: folder))
    with safe_open(path, "pt") as handle:
        for name, parameter in model.named_parameters():
            parameter.data = weights.keep(parameter.data, handle.get_tensor(name))
    LayerwiseOffloadManager._initialize = weights.initialising(LayerwiseOffloadManager._initialize)
    LayerwiseOffloadManager.prefetch_layer = weights.prefetching(LayerwiseOffloadManager.prefetch_layer)
    manager = manage(model, False)
    hosts = [tensor for layer in manager._strided_cpu_weights.values() for tensor in layer.values()]
    files = mapped.FileRanges()
    report["in_files"] = all(files.hold(tensor) for tensor in hosts) and not weights.spill.bytes
    report["pinned_tensors"] = sum(tensor.is_pinned() for tensor in hosts)
    timed(model, x)
    out, seconds = timed(model, x)
    equal["mapped"], report["mapped_s"] = torch.equal(out, wanted), seconds
    drop(path, model, manager)
    out, seconds = timed(model, x)
    equal["mapped_cold"], report["mapped_cold_s"] = torch.equal(out, wanted), seconds
    report["bitwise_equal"] = equal
    for way in ("pageable", "pinned", "mapped", "mapped_cold"):
        report[f"{way}_gb_s"] = round(size / report[f"{way}_s"] / 1e9, 2)
    return report


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--mib", type=int, default=384)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if (reason := missing()) is not None:
        print(reason)
        return int(Exit.ENVIRONMENT)
    from engine.h3 import sgl_kernel_stand_in, unused_packages

    sgl_kernel_stand_in.install(), unused_packages.install()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report = measure(options.layers, options.mib, Path(folder))
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report))
    return 0 if report["in_files"] and all(report["bitwise_equal"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
