"""Intervals for a handful of repeated measurements. No dependency, not even on the rest of the project.

For n >= 2 the interval is Student's t interval on the mean, mean +- t(0.975, n - 1) s / sqrt(n), at 95 % (Student,
"The Probable Error of a Mean", Biometrika 6, 1908; as Georges, Buytaert and Eeckhout, "Statistically Rigorous Java
Performance Evaluation", OOPSLA 2007, use it for few runs). It takes the runs as independent and near normal: what a
warmed-up process on an undisturbed machine gives, and what nobody can test with n = 3. One value has no interval:
`interval` returns None for it, and no verdict can rest on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# t(0.975, df) to four digits for df = 1..30 (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2).
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
Place = Literal["inside", "below", "above", "overlaps"]


@dataclass(frozen=True)
class Interval:
    """A closed interval."""

    low: float
    high: float


def interval(values: Sequence[float]) -> Interval | None:
    """95 % interval of the mean; None for fewer than two values. Above 31 values t(0.975, 30) stays, which is a
    little too wide.
    """
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = T_975[min(n - 1, len(T_975)) - 1] * deviation / math.sqrt(n)
    return Interval(mean - half, mean + half)


def ratio_interval(numerator: Interval, denominator: Interval) -> Interval:
    """Every ratio that two intervals of positive numbers allow. Wider than 95 %: both ends would have to be wrong at
    once.
    """
    return Interval(numerator.low / denominator.high, numerator.high / denominator.low)


def place(measured: Interval, value: float, tolerance: float) -> Place:
    """Where an interval lies against value +- tolerance: inside, wholly below, wholly above, or across an end."""
    low, high = value - tolerance, value + tolerance
    if low <= measured.low and measured.high <= high:
        return "inside"
    if measured.high < low:
        return "below"
    return "above" if measured.low > high else "overlaps"
