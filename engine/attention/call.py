"""What one Sol-Attn call takes and returns, whichever backend computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

ThreshType = Literal["diag", "exact"]
TokenRange = tuple[int, int]
"""Half-open range of token positions; ``(0, 0)``, like every empty range, is none."""


@dataclass(frozen=True)
class SolAttentionOptions:
    """Everything about a call except its tensors.

    scale: softmax scale, already resolved (never None here).
    tau: threshold in standard deviations of the routing scores; larger routes fewer blocks.
    thresh_type: ``diag`` (per-channel variances of the key means) or ``exact`` (their second moments).
    sink: key tokens whose blocks are exact for every query block, rounded outwards to whole blocks.
    dense_rows: query rows that attend exactly to all keys; exact to the row, not to the block.
    return_lse: also return the natural-log LSE.
    """

    scale: float
    tau: float = 1.0
    thresh_type: ThreshType = "diag"
    sink: TokenRange = (0, 0)
    dense_rows: TokenRange = (0, 0)
    return_lse: bool = False


@dataclass(frozen=True)
class SolAttentionResult:
    """What a backend hands back.

    out: [1, T, H, D], dtype of v.
    route_counts: [N, H] int32, key blocks computed exactly for each (query block, head) according to the routing.
        Rows in ``dense_rows`` do not change it: a query block that the caller wants dense counts as routed, which is
        how the published densities were counted.
    lse: [1, T, H] float32, natural logarithm, or None when it was not asked for.
    backend: what really computed it, ``name`` or ``name/variant`` (for instance ``sana/cute_sm90``).
    """

    out: torch.Tensor
    route_counts: torch.Tensor
    lse: torch.Tensor | None
    backend: str


class Backend(Protocol):
    """A backend: a module or object with these two functions.

    ``attend`` writes into ``out`` ([1, T, H, D], last stride 1, other strides free) when one is given, and returns it
    as ``result.out``. It is only called after ``supports`` returned None for the same arguments.
    """

    def supports(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions) -> str | None:
        """Why this backend cannot do the call, or None when it can."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: SolAttentionOptions,
        out: torch.Tensor | None = None,
    ) -> SolAttentionResult:
        """Compute the call."""
