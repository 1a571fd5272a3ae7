"""Which PyTorch operator an attention class of SGLang runs on this machine: the name of a class promises none.

``SDPAImpl`` leaves the choice of a kernel to PyTorch, and SGLang turns cuDNN's off when it is imported; what was chosen
decides how strong the dense baseline is. The class's own object is asked, with tensors of the model's head size.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.dense import operators_of

ROWS, HEADS = 256, 2  # PyTorch chooses by device, dtype, head size and switches; a document's length does not matter
UNKNOWN = "unknown"


def operator_of(implementation: Any, head_dim: int, device: torch.device) -> str:
    """The operators that ``implementation.forward_varlen`` runs on BF16 rows, joined by ``+``; ``unknown`` when it runs
    none that can be told or does not take the call."""
    q, k, v = torch.zeros(3, ROWS, HEADS, head_dim, dtype=torch.bfloat16, device=device)
    bounds = torch.tensor([0, ROWS], dtype=torch.int32, device=device)
    try:
        with torch.inference_mode():
            _, names = operators_of(
                lambda: implementation.forward_varlen(
                    q, k, v, cu_seqlens=bounds, max_seqlen=ROWS, cu_seqlens_host=(0, ROWS)
                )
            )
    except Exception:  # a question must not end the run that it is asked in
        return UNKNOWN
    return "+".join(names) or UNKNOWN


def name_operators(known: dict[str, str], model: Any, device: torch.device) -> None:
    """Add class name -> operator for every attention class that the model's blocks have used and that is not known.

    device: where the model computes; a block's parameters may lie elsewhere, where they are offloaded.
    """
    for block in model.blocks:
        attention = block.attn
        implementation = attention._attention_impl
        name = type(implementation).__name__
        if implementation is not None and name not in known:
            known[name] = operator_of(implementation, attention.head_dim, device)
