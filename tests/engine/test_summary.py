"""Figures of benchmark.json from literal events."""

from __future__ import annotations

import pytest

from engine.summary import cache_counts, density, ratios, series


def sparse(step: int, layer: int, routed: list[int], blocks: int = 4) -> dict[str, object]:
    return {"step": step, "layers": [layer], "routed": routed, "blocks": blocks}


def test_density_is_routed_over_heads_times_blocks_squared_over_all_ranks() -> None:
    rank0, rank1 = sparse(11, 2, [16, 8]), sparse(11, 2, [4, 4])
    found = density([rank0, sparse(12, 2, [4, 4]), rank1])
    assert found is not None
    assert found.calls == 2
    assert found.first == (16 + 8 + 4 + 4) / 64
    assert found.minimum == 8 / 32
    assert found.mean == pytest.approx((0.5 + 0.25) / 2)


def test_no_sparse_call_has_no_density() -> None:
    assert density([]) is None


def test_cache_counts_of_the_published_4090_run() -> None:
    decisions = [{"action": "compute"}] * 14 + [{"action": "reuse"}] * 35
    found = cache_counts(decisions)
    assert found is not None
    assert (found.calls, found.compute, found.reuse) == (49, 14, 35)
    assert found.reuse_rate == pytest.approx(0.7143, abs=5e-5)
    assert cache_counts([]) is None


def test_one_value_has_no_deviation() -> None:
    one, three = series([2.0]), series([3.0, 1.0, 2.0])
    assert one is not None and one.stdev is None
    assert three is not None and (three.median, three.stdev, three.n) == (2.0, 1.0, 3)
    assert series([]) is None


def test_ratios_need_both_arms() -> None:
    assert list(ratios({})) == []
