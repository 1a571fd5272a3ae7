"""Densities of a sparse call: the exact one from its route counts, and the two that upstream published."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.call import SolAttentionOptions
from engine.attention.routing import route


def exact_density(counts: torch.Tensor) -> float:
    """Share of (query block, key block, head) triples computed exactly, from a call's route counts [N, H].

    All blocks weigh the same, the ragged tail too. It is not a ratio of FLOPs: query rows that the caller wants dense
    are not in it, and an approximated block costs a 64th of an exact one rather than nothing.
    """
    blocks, heads = counts.shape
    return counts.sum().item() / (heads * blocks * blocks)


@dataclass(frozen=True)
class PublishedDensity:
    """What the published runtimes logged as ``route_density``, over the first ``heads`` heads.

    threshold: share of triples whose score is above the threshold. effective: the same with the forced neighbours and
    the sink. The 19.65 % of the RTX 4090 is an ``effective`` of one head, one layer and one forward.
    """

    threshold: float
    effective: float
    heads: int


def published_density(
    q: torch.Tensor, k: torch.Tensor, options: SolAttentionOptions, heads: int | None = None
) -> PublishedDensity:
    """Both densities of a recomputed routing of q, k [1, T, H, D], over the first ``heads`` heads (all when None)."""
    routed = route(q[:, :, :heads], k[:, :, :heads], options)
    return PublishedDensity(
        threshold=routed.above.double().mean().item(),
        effective=routed.exact.double().mean().item(),
        heads=routed.exact.shape[-1],
    )
