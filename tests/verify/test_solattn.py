"""The float64 Sol-Attn, against a row-by-row reference written on its own."""

from __future__ import annotations

import numpy as np
import pytest

from tests.verify import reference
from verify.solattn import BLOCK, BlockRoute, Head, Options, band_floor, exact_softmax

DIM = 16


def call(tokens: int, seed: int, drift: float = 1.0) -> tuple[reference.F64, reference.F64, reference.F64]:
    noise = np.random.default_rng(seed)
    wave = drift * np.sin(np.arange(tokens) / 30)[:, None]
    return tuple(reference.bf16(noise.normal(size=(tokens, DIM)) + wave) for _ in range(3))  # type: ignore[return-value]


@pytest.mark.parametrize("thresh_type", ["diag", "exact"])
@pytest.mark.parametrize(
    ("tokens", "sink", "rows"),
    [(1, (0, 0), (0, 0)), (63, (0, 5), (0, 0)), (64, (0, 0), (3, 9)), (65, (64, 65), (0, 65)), (127, (0, 0), (60, 70)),
     (320, (100, 200), (0, 100)), (451, (0, 65), (0, 65)), (451, (440, 451), (0, 0))],
)  # fmt: skip
@pytest.mark.parametrize("tau", [1.0, 0.3, -1000.0])
def test_equals_the_row_by_row_form(tokens: int, sink, rows, thresh_type, tau: float) -> None:  # type: ignore[no-untyped-def]
    q, k, v = call(tokens, tokens)
    wanted, counts = reference.sol_attn(
        q, k, v, scale=DIM**-0.5, tau=tau, thresh_type=thresh_type, sink=sink, dense_rows=rows
    )
    head = Head(k, v, Options(DIM**-0.5, tau, thresh_type, sink, rows))
    for block in range(head.blocks):
        at = head.rows(block)
        route = head.route(block, q[at])
        assert route.exact.sum() == counts[block] and route.fewest <= counts[block] <= route.most
        found = head.attend(block, q[at], route.exact)
        assert np.abs(found - wanted[at]).max() < 1e-12


def test_low_tau_is_dense_attention() -> None:
    q, k, v = call(300, 3)
    head = Head(k, v, Options(0.25, -1000.0, "diag", (0, 0), (0, 0)))
    for block in range(head.blocks):
        at = head.rows(block)
        route = head.route(block, q[at])
        assert route.exact.all() and route.fewest == head.blocks
        assert np.abs(head.attend(block, q[at], route.exact) - reference.dense(q[at], k, v, 0.25)).max() < 1e-12


@pytest.mark.parametrize("size", [1e-20, 1e15])
def test_exact_softmax_of_tiny_and_huge_scores(size: float) -> None:
    q, k, v = call(70, 5)
    assert np.allclose(exact_softmax(q * size, k, v, 0.25), reference.dense(q * size, k, v, 0.25), atol=1e-12)


def test_equal_keys_have_no_spread_and_only_forced_blocks_or_ties() -> None:
    _, k, v = call(640, 7)
    k[:] = k[0]
    head = Head(k, v, Options(0.25, 1.0, "diag", (0, 0), (0, 0)))
    route = head.route(5, np.ones((BLOCK, DIM)))
    assert route.exact.sum() >= 3 and route.fewest == 3


def test_block_whose_score_is_on_the_threshold_may_go_either_way() -> None:
    """One block is declared close: both counts are allowed, each by one route, and no other count is."""
    q, k, v = call(640, 11)
    head = Head(k, v, Options(0.25, 1.0, "diag", (0, 0), (0, 0)))
    route = head.route(0, q[:BLOCK])
    close = np.zeros_like(route.close)
    close[5] = True
    tie = BlockRoute(0, route.exact, close, route.distance)
    assert tie.most == tie.fewest + 1
    for count in (tie.fewest, tie.most):
        routes = list(tie.with_count(count))
        assert len(routes) == 1 and routes[0].sum() == count
    assert list(tie.with_count(tie.most + 1)) == list(tie.with_count(tie.fewest - 1)) == []


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_floor_of_forced_blocks(blocks: int) -> None:
    for start in range(0, blocks * BLOCK, 30):
        for stop in range(start, blocks * BLOCK + 1, 37):
            brute = sum(
                abs(i - j) <= 1 or (start < stop and start // 64 <= j < -(-stop // 64))
                for i in range(blocks)
                for j in range(blocks)
            )
            assert band_floor(blocks, (start, stop)) == brute
