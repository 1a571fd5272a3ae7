"""Intervals, against figures worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.stats import T_975, Interval, interval, place, ratio_interval


def test_interval_of_three_values() -> None:
    """Mean 12, standard deviation 2, t(0.975, 2) = 4.303: half width 4.303 * 2 / sqrt(3) = 4.9687."""
    found = interval([10.0, 12.0, 14.0])
    assert found is not None
    assert (round(found.low, 3), round(found.high, 3)) == (7.031, 16.969)


def test_one_value_has_no_interval() -> None:
    assert interval([]) is None and interval([3.0]) is None


def test_equal_values_have_an_interval_without_width() -> None:
    assert interval([5.0] * 4) == Interval(5.0, 5.0)


def test_quantiles_fall_and_end_above_the_normal_one() -> None:
    assert len(T_975) == 30 and list(T_975) == sorted(T_975, reverse=True) and T_975[-1] > 1.96
    scipy = pytest.importorskip("scipy.stats", reason="scipy belongs to the running side")
    for df, quantile in enumerate(T_975, 1):
        assert round(scipy.t.ppf(0.975, df), 3) == quantile


@pytest.mark.parametrize(
    ("low", "high", "where"),
    [(9.5, 10.5, "inside"), (9.0, 11.0, "inside"), (8.0, 8.9, "below"), (11.1, 12.0, "above"), (8.9, 9.1, "overlaps"),
     (10.9, 11.1, "overlaps"), (0.0, 99.0, "overlaps")],
)  # fmt: skip
def test_place_against_ten_plus_or_minus_one(low: float, high: float, where: str) -> None:
    assert place(Interval(low, high), 10.0, 1.0) == where


@given(st.lists(st.floats(1, 1e6), min_size=2, max_size=40))
def test_interval_contains_the_mean(values: list[float]) -> None:
    found = interval(values)
    assert found is not None
    mean = sum(values) / len(values)
    assert found.low <= mean * (1 + 1e-9) and found.high >= mean * (1 - 1e-9)


def test_ratio_of_intervals() -> None:
    assert ratio_interval(Interval(8.0, 12.0), Interval(2.0, 4.0)) == Interval(2.0, 6.0)
