"""Sol-Attn for some query blocks of one head, in float64: the second derivation of what the kernels compute.

Written from the published definition (NVlabs/Sana, branch sol-engine, techniques/sparse_backends/sol_attn, commit
6fb7eb11; arXiv 2607.24027). What the operator stores as BF16 is rounded here too, since it is part of the definition:
key means, value sums and, for the `exact` threshold, the query centroid and the second moments. All other arithmetic
is float64.

T tokens, D channels, N = ceil(T / 64) blocks; i counts query blocks, j key blocks. Scores are in the base-2 domain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Literal

import numpy as np
import numpy.typing as npt

from verify.tensors import F64, round_bf16

BLOCK = 64
LOG2_E = math.log2(math.e)
VARIANCE_FLOOR = 1e-6  # added to the variance under the square root, in squared base-2 scores
MAX_ROUTES = 64
Bools = npt.NDArray[np.bool_]

# A kernel sums in float32, in an order of its own. It may therefore round a key mean to the neighbouring BF16 value,
# and decide otherwise than float64 about a block whose score is close to the threshold. A score counts as close when
# it is within this share of the row's largest |score| or its standard deviation, whichever is more, of the threshold.
TIE_MARGIN = 2.0**-9
# The second moments of `exact` are BF16 twice over; one of their last bits is 2**-8. The margin of its threshold
# allows this share of sum_ab |q_a M_ab q_b|, the size of the terms whose difference the variance is.
MOMENT_MARGIN = 2.0**-12


def exact_softmax(q: F64, k: F64, v: F64, scale: float) -> F64:
    """Dense attention of q [R, D] over k and v [T, D] -> [R, D]."""
    parts = [np.empty((0, v.shape[1]))]
    for first in range(0, len(q), BLOCK):  # some rows at a time: [64, 38247] float64 are 20 MB
        scores = (q[first : first + BLOCK] @ k.T) * scale
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        parts.append((p @ v) / p.sum(axis=1, keepdims=True))
    return np.concatenate(parts)


@dataclass(frozen=True)
class Options:
    """Scale, threshold and the two token ranges (half-open; equal ends: none) of a call."""

    scale: float
    tau: float
    thresh_type: Literal["diag", "exact"]
    sink: tuple[int, int]
    dense_rows: tuple[int, int]


@dataclass(frozen=True)
class BlockRoute:
    """How query block i routes: `exact` [N] and `close` [N], the blocks whose decision rounding may turn. Forced
    blocks are never close.
    """

    block: int
    exact: Bools
    close: Bools
    distance: F64

    @property
    def fewest(self) -> int:
        """Least count of exact blocks that rounding can explain."""
        return int((self.exact & ~self.close).sum())

    @property
    def most(self) -> int:
        """Largest count of exact blocks that rounding can explain."""
        return int((self.exact | self.close).sum())

    def with_count(self, count: int) -> Iterator[Bools]:
        """Routes of `count` exact blocks that differ from `exact` in close blocks only, the most likely first, at
        most 64.
        """
        certain = self.exact & ~self.close
        ties = np.flatnonzero(self.close)
        ties = ties[np.argsort(-self.distance[ties])]  # highest score first
        chosen = count - int(certain.sum())
        if 0 <= chosen <= len(ties):
            for picked in islice(combinations(ties, chosen), MAX_ROUTES):
                route = certain.copy()
                route[list(picked)] = True
                yield route


class Head:
    """Keys and values of one head with their summaries; `k` and `v` are [T, D]."""

    def __init__(self, k: F64, v: F64, options: Options) -> None:
        self.k, self.v, self.options = k, v, options
        self.tokens = len(k)
        self.blocks = -(-self.tokens // BLOCK)
        self.lengths = np.full(self.blocks, BLOCK)
        self.lengths[-1] = self.tokens - BLOCK * (self.blocks - 1)
        starts = np.arange(self.blocks) * BLOCK
        self.k_mean = round_bf16(np.add.reduceat(k, starts) / self.lengths[:, None])
        self.v_sum = round_bf16(np.add.reduceat(v, starts))

    def rows(self, i: int) -> slice:
        """The token rows of query block i."""
        return slice(i * BLOCK, i * BLOCK + int(self.lengths[i]))

    def threshold(self, centroid: F64) -> tuple[float, float]:
        """Threshold of a query block with this centroid [D], and by how much rounding of the second moments may move
        it.
        """
        c, tau, mu = self.options.scale * LOG2_E, self.options.tau, self.k_mean.mean(axis=0)
        if self.options.thresh_type == "diag":
            variances = np.maximum((self.k_mean**2).mean(axis=0) - mu**2, 0)
            spread = c**2 * float(centroid**2 @ variances)
            return c * float(centroid @ mu) + tau * math.sqrt(spread + VARIANCE_FLOOR), 0.0
        centroid = round_bf16(centroid)
        moments = round_bf16(round_bf16(self.k_mean.T @ self.k_mean) / self.blocks)
        mean = float(centroid @ mu)
        spread = c**2 * max(float(centroid @ moments @ centroid) - mean**2, 0.0)
        slack = c**2 * MOMENT_MARGIN * float(np.abs(centroid) @ np.abs(moments) @ np.abs(centroid))
        low, high = math.sqrt(max(spread - slack, 0.0) + VARIANCE_FLOOR), math.sqrt(spread + slack + VARIANCE_FLOOR)
        return c * mean + tau * math.sqrt(spread + VARIANCE_FLOOR), abs(tau) * (high - low)

    def forced(self, i: int) -> Bools:
        """[N]: key blocks that query block i computes exactly whatever their score: itself, its neighbours, and the
        sink's.
        """
        forced = np.zeros(self.blocks, bool)
        forced[max(i - 1, 0) : i + 2] = True
        start, stop = self.options.sink
        if stop > start:
            forced[start // BLOCK : -(-stop // BLOCK)] = True
        return forced

    def route(self, i: int, q: F64) -> BlockRoute:
        """Route query block i, whose rows are q [64 or the tail, D]."""
        centroid = q.mean(axis=0)
        scores = (self.options.scale * LOG2_E) * (self.k_mean @ centroid)
        threshold, slack = self.threshold(centroid)
        distance = scores - threshold
        margin = TIE_MARGIN * max(float(np.abs(scores).max()), float(scores.std())) + slack
        forced = self.forced(i)
        return BlockRoute(i, (distance > 0) | forced, (np.abs(distance) <= margin) & ~forced, distance)

    def attend(self, i: int, q: F64, exact: Bools) -> F64:
        """Output of query block i with rows q [R, D] when the blocks `exact` [N] are computed exactly: [R, D].

        Each other block acts as its tokens would, had all of them the score of the mean key and the mean value.
        """
        c = self.options.scale * LOG2_E
        tokens = np.repeat(exact, self.lengths)
        keys = np.concatenate((self.k[tokens], self.k_mean[~exact]))
        values = np.concatenate((self.v[tokens], self.v_sum[~exact]))
        weights = np.concatenate((np.ones(int(tokens.sum())), self.lengths[~exact].astype(np.float64)))
        scores = c * (q @ keys.T)
        p = np.exp2(scores - scores.max(axis=1, keepdims=True))
        out: F64 = (p @ values) / (p @ weights)[:, None]
        first, last = self.options.dense_rows
        at = np.arange(len(q)) + i * BLOCK
        dense = (at >= first) & (at < last)
        if dense.any():
            out[dense] = exact_softmax(q[dense], self.k, self.v, self.options.scale)
        return out


def band_floor(blocks: int, sink: tuple[int, int]) -> int:
    """Exact blocks that no threshold can save, summed over all query blocks: the three-block band and the sink."""
    band = 3 * blocks - 2 if blocks > 1 else 1
    start, stop = sink
    if stop <= start:
        return band
    first, last = start // BLOCK, min(-(-stop // BLOCK), blocks)
    # Each sink column meets the band in itself and its two neighbours, but for the columns at the edges.
    overlap = 3 * (last - first) - (first == 0) - (last == blocks)
    return band + blocks * (last - first) - overlap
