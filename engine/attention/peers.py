"""What the benchmark compares with: dense attention of PyTorch, and sparse peers that are installed or pointed to.

Peers are no part of this repository. One that is not there is left out; one that cannot do a case raises, and the
benchmark gives the reason in place of a time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from config.errors import UsageError
from engine.attention import sana
from engine.attention.call import SolAttentionOptions
from engine.attention.dense import operators_of
from engine.attention.routing import BLOCK, num_blocks

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SolAttentionOptions], torch.Tensor]

DENSE = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
# Peers that would copy strided tensors at every call: they are timed on copies made beforehand, in their favour.
CONTIGUOUS = frozenset({"sana"})


def dense(backend: SDPBackend) -> Attention:
    """Dense attention by one of PyTorch's kernels, which raises where that one cannot run."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, scale=options.scale).transpose(1, 2)

    return attention


def ran(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions
) -> list[str]:
    """The attention operators of PyTorch that a call really ran; none for kernels that PyTorch does not know."""
    return list(operators_of(lambda: attention(q, k, v, options))[1])


def comfy_peer(module: Any) -> Attention:
    """ComfyUI-sol-attn's Triton path, BF16; its sink and dense query rows are whole blocks."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions) -> torch.Tensor:
        ranges = options.sink, options.dense_rows
        sink, rows = ((r[0] // BLOCK, num_blocks(r[1])) if r[1] > r[0] else (0, 0) for r in ranges)
        return module.sol_attn(
            q, k, v, scale=options.scale, tau=options.tau, thresh_type=options.thresh_type,
            sink_blocks=sink, sink_q=rows,
        )  # fmt: skip

    return attention


def sana_peer(module: Any) -> Attention:
    """NVlabs' ``sol_attn`` as backend ``sana`` runs it, without the pass that counts routes. Raises ValueError with the
    backend's reason where it would refuse the call: no other kernel of the package is ever timed in its place."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions) -> torch.Tensor:
        reason = sana.supports(q, k, v, options)
        if reason is not None:
            raise ValueError(reason)
        return sana.compute(q, k, v, options)

    return attention


PEERS = {"comfyui-sol-attn": ("sol_kernel.fwd", comfy_peer), "sana": ("sol_attn", sana_peer)}


def find_peers(paths: list[str]) -> dict[str, Attention]:
    """The peers that can be imported, from ``paths`` or from what is installed.

    Raises:
        UsageError: a folder that was pointed to gave none, so its column would be missing without a word.
    """
    sys.path[:0] = paths
    found, files, failed = {}, [], []
    for name, (module, adapter) in PEERS.items():
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            failed.append(f"{module}: {error}")
            continue
        found[name] = adapter(imported)
        if imported.__file__:  # a folder without __init__.py has none
            files.append(Path(imported.__file__).resolve())
    for path in map(Path, paths):
        if not any(file.is_relative_to(path.resolve()) for file in files):
            raise UsageError(
                f"no peer could be imported from {path}: {'; '.join(failed) or 'others came first'}",
                needed=f"a folder that holds one of the modules {', '.join(module for module, _ in PEERS.values())}",
                remedy="give --peer the folder above the package, and install what it imports",
            )
    return found
