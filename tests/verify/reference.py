"""Sol-Attn once more, row by row and without any trick: the independent reference of the tests, in float64."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def bf16(x: F64) -> F64:
    """Rounded to BF16, as float64."""
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def dense(q: F64, k: F64, v: F64, scale: float) -> F64:
    """Softmax attention, one row after the other."""
    out = []
    for row in q:
        scores = scale * (k @ row)
        weights = np.exp(scores - scores.max())
        out.append(weights @ v / math.fsum(weights))
    return np.array(out)


def sol_attn(
    q: F64,
    k: F64,
    v: F64,
    *,
    scale: float,
    tau: float,
    thresh_type: str,
    sink: tuple[int, int] = (0, 0),
    dense_rows: tuple[int, int] = (0, 0),
) -> tuple[F64, list[int]]:
    """Output [T, D] and, for each query block, how many key blocks were exact."""
    tokens = len(k)
    blocks = [range(first, min(first + 64, tokens)) for first in range(0, tokens, 64)]
    c = scale / math.log(2)
    means = [bf16(np.mean(k[list(b)], axis=0)) for b in blocks]
    sums = [bf16(np.sum(v[list(b)], axis=0)) for b in blocks]
    out, counts = np.zeros_like(q), []
    for i, rows in enumerate(blocks):
        centroid = np.mean(q[list(rows)], axis=0)
        threshold = _threshold(centroid, means, c, tau, thresh_type)
        exact = []
        for j in range(len(blocks)):
            in_sink = sink[0] < sink[1] and sink[0] // 64 <= j < math.ceil(sink[1] / 64)
            exact.append(c * float(centroid @ means[j]) > threshold or abs(i - j) <= 1 or in_sink)
        counts.append(sum(exact))
        for row in rows:
            if dense_rows[0] <= row < dense_rows[1]:
                out[row] = dense(q[row : row + 1], k, v, scale)[0]
                continue
            numerator, total = np.zeros_like(v[0]), 0.0  # no running maximum: the tests' scores are small
            for j, block in enumerate(blocks):
                if exact[j]:
                    weights = 2.0 ** (c * (k[block.start : block.stop] @ q[row]))
                    numerator = numerator + weights @ v[block.start : block.stop]
                    total += math.fsum(weights)
                else:
                    weight = 2.0 ** (c * float(q[row] @ means[j]))
                    numerator = numerator + weight * sums[j]
                    total += weight * len(block)
            out[row] = numerator / total
    return out, counts


def _threshold(centroid: F64, means: list[F64], c: float, tau: float, thresh_type: str) -> float:
    if thresh_type == "diag":
        mean = np.mean(means, axis=0)
        variance = np.mean([(m - mean) ** 2 for m in means], axis=0)
        return c * float(centroid @ mean) + tau * math.sqrt(c * c * float(centroid**2 @ variance) + 1e-6)
    centroid = bf16(centroid)
    mean = float(centroid @ np.mean(means, axis=0))
    moments = bf16(bf16(sum(np.outer(m, m) for m in means)) / len(means))
    variance = max(float(centroid @ moments @ centroid) - mean**2, 0.0)
    return c * mean + tau * math.sqrt(c * c * variance + 1e-6)
