"""Block summaries, thresholds and the route of Sol-Attn: which key blocks each query block computes exactly.

The published algorithm is NVlabs/Sana, branch sol-engine, techniques/sparse_backends/sol_attn (commit 6fb7eb11). Every
place where it stores a value in fewer bits than it computed is marked "stored BF16" below; between those places all
arithmetic is in ``dtype``: float32 as in the kernels, or float64 to take the arithmetic's own rounding away.

Shapes: T tokens, H heads, D channels, N = ceil(T / 64) blocks; query blocks are indexed i, key blocks j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.call import SolAttentionOptions, ThreshType, TokenRange

BLOCK = 64
LOG2_E = 1.4426950408889634
VARIANCE_EPSILON = 1.0e-6  # inside the square root, in squared base-2 score units


def num_blocks(tokens: int) -> int:
    """N, the number of 64-token blocks that cover ``tokens``."""
    return -(-tokens // BLOCK)


def block_lengths(tokens: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[N] int64: tokens in each block; 64 but for a ragged tail."""
    lengths = torch.full((num_blocks(tokens),), BLOCK, dtype=torch.int64, device=device)
    lengths[-1] = tokens - BLOCK * (len(lengths) - 1)
    return lengths


def sink_block_range(tokens: int, sink: TokenRange) -> tuple[int, int]:
    """The blocks [first, last) that a token range touches: rounded outwards. An empty range touches none."""
    start, stop = sink
    return (start // BLOCK, num_blocks(stop)) if stop > start else (num_blocks(tokens), num_blocks(tokens))


def block_sums(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sum of each block's live tokens, [T, H, D] -> [N, H, D], accumulated in ``dtype``. Strided x is not copied."""
    whole, tail = divmod(x.shape[0], BLOCK)
    sums = x[: whole * BLOCK].unflatten(0, (whole, BLOCK)).sum(1, dtype=dtype)
    return torch.cat((sums, x[whole * BLOCK :].sum(0, dtype=dtype, keepdim=True))) if tail else sums


@dataclass(frozen=True)
class Summaries:
    """Per block and head: q_mean in the computing dtype; k_mean and v_sum stored BF16. All [N, H, D]."""

    q_mean: torch.Tensor
    k_mean: torch.Tensor
    v_sum: torch.Tensor


def summarise(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype = torch.float32) -> Summaries:
    """Summaries of q, k, v [T, H, D].

    The divisor of a mean is the block's true length; values are summed, so that a block's weight is already in them.
    """
    lengths = block_lengths(q.shape[0], q.device).to(dtype)[:, None, None]
    return Summaries(
        q_mean=block_sums(q, dtype) / lengths,
        k_mean=(block_sums(k, dtype) / lengths).bfloat16(),  # stored BF16
        v_sum=block_sums(v, dtype).bfloat16(),  # stored BF16
    )


def thresholds(q_mean: torch.Tensor, k_mean: torch.Tensor, scale: float, tau: float, kind: ThreshType) -> torch.Tensor:
    """[N, H]: mean + tau x standard deviation of a query block's base-2 scores against all block means.

    Every block weighs one, the tail too. ``diag`` ignores the covariance between channels; ``exact`` has it, through
    the matrix of second moments. Computed in q_mean's dtype.
    """
    c, dtype = scale * LOG2_E, q_mean.dtype
    keys = k_mean.to(dtype)
    mu = keys.mean(0)  # [H, D]
    if kind == "diag":
        variance = ((keys * keys).mean(0) - mu * mu).clamp_min(0)
        mean = (q_mean * mu).sum(-1)
        score_variance = (q_mean * q_mean * variance).sum(-1)
    elif kind == "exact":
        centroid = q_mean.bfloat16().to(dtype)  # stored BF16
        per_head = keys.transpose(0, 1)  # [H, N, D]
        moments = (per_head.mT @ per_head).bfloat16()  # stored BF16
        moments = (moments.to(dtype) / len(keys)).bfloat16().to(dtype)  # stored BF16 again after the division
        mean = (centroid * mu).sum(-1)
        projected = (centroid.transpose(0, 1) @ moments).transpose(0, 1)  # [N, H, D]
        score_variance = (projected * centroid).sum(-1) - mean * mean
    else:
        raise ValueError(f"thresh_type is {kind!r}; needed: 'diag' or 'exact'")
    return c * mean + tau * (c * c * score_variance.clamp_min(0) + VARIANCE_EPSILON).sqrt()


@dataclass(frozen=True)
class Route:
    """The routing of one call.

    above: [N, N, H] bool (query block, key block, head): the score is above the query block's threshold.
    exact: [N, N, H] bool: ``above``, or a forced neighbour, or in the sink: the blocks computed exactly.
    """

    above: torch.Tensor
    exact: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """[N, H] int32: exact key blocks of each query block and head."""
        return self.exact.sum(1, dtype=torch.int32)


def route_from_summaries(summaries: Summaries, options: SolAttentionOptions, tokens: int) -> Route:
    """Route a call whose summaries are known.

    The published kernels average the rows' scores q.k_mean; by linearity that is the centroid's score, which is what is
    computed here. The two differ by the rounding of float32 sums, so a score within rounding of the threshold can be
    routed differently by different backends (as it can between the published backends themselves).
    """
    q_mean, k_mean = summaries.q_mean, summaries.k_mean
    limit = thresholds(q_mean, k_mean, options.scale, options.tau, options.thresh_type)
    scores = torch.einsum("ihd,jhd->ijh", q_mean, k_mean.to(q_mean.dtype)) * (options.scale * LOG2_E)
    above = scores > limit[:, None]
    index = torch.arange(len(q_mean), device=q_mean.device)
    first, last = sink_block_range(tokens, options.sink)
    forced = ((index[:, None] - index).abs() <= 1) | ((index >= first) & (index < last))
    return Route(above=above, exact=above | forced[:, :, None])


def route(q: torch.Tensor, k: torch.Tensor, options: SolAttentionOptions, dtype: torch.dtype = torch.float32) -> Route:
    """Route a call from q and k [1, T, H, D]."""
    return route_from_summaries(summarise(q[0], k[0], k[0][:, :, :0], dtype), options, q.shape[1])


def route_counts(q: torch.Tensor, k: torch.Tensor, options: SolAttentionOptions) -> torch.Tensor:
    """[N, H] int32: the number of key blocks that each query block and head computes exactly."""
    return route(q, k, options).counts
