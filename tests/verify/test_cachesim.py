"""Replaying cache decisions, against sequences worked out by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest

from config.record import CacheDecision
from config.schema import FirstBlockCache, TeaCache
from verify.cachesim import replay

TEA = TeaCache(kind="teacache", threshold=0.10, retain_steps=2, cooldown_steps=1, coefficients=(1.0, 0.0))
FIRST = FirstBlockCache(kind="firstblockcache", threshold=0.08)

# step: action, reason, signal, rescaled, accumulator. 0.04 + 0.05 stays below 0.10; + 0.03 reaches it.
TEA_BY_HAND = [
    ("compute", "warmup", None, None, 0.0),
    ("compute", "warmup", None, None, 0.0),
    ("reuse", "below_threshold", 0.04, 0.04, 0.04),
    ("reuse", "below_threshold", 0.05, 0.05, 0.09),
    ("compute", "threshold", 0.03, 0.03, 0.0),
    ("reuse", "below_threshold", 0.02, 0.02, 0.02),
    ("compute", "cooldown", None, None, 0.0),
]
FIRST_BY_HAND = [
    ("compute", "initialize", None, None, None),
    ("reuse", "below_threshold", 0.08, None, None),
    ("compute", "threshold", 0.0801, None, None),
    ("reuse", "below_threshold", 0.0, None, None),
]


def events(rows: list[tuple[Any, ...]], kind: str) -> list[CacheDecision]:
    names = ("action", "reason", "signal", "rescaled", "accumulator")
    return [
        CacheDecision(
            t=0, seq=step, source="worker", sample=1, step=step, kind=kind, **dict(zip(names, row, strict=True))
        )  # type: ignore[arg-type]
        for step, row in enumerate(rows)
    ]


def test_decisions_by_hand_replay() -> None:
    assert replay(TEA, 7, events(TEA_BY_HAND, "teacache")) == []
    assert replay(FIRST, 4, events(FIRST_BY_HAND, "firstblockcache")) == []


def test_polynomial_has_its_highest_power_first() -> None:
    cache = TeaCache(kind="teacache", threshold=5.0, retain_steps=1, cooldown_steps=0, coefficients=(2.0, 3.0, 1.0))
    rows = [("compute", "warmup", None, None, 0.0), ("reuse", "below_threshold", 0.5, 3.0, 3.0)]  # 2/4 + 3/2 + 1
    assert replay(cache, 2, events(rows, "teacache")) == []


@pytest.mark.parametrize(
    ("step", "row", "fault"),
    [
        (0, ("reuse", "below_threshold", 0.0, 0.0, 0.0), r"compute \(warmup\)"),
        (3, ("compute", "threshold", 0.05, 0.05, 0.0), r"reuse \(below_threshold\)"),
        (4, ("reuse", "below_threshold", 0.03, 0.03, 0.12), r"compute \(threshold\)"),
        (3, ("reuse", "below_threshold", 0.05, 0.05, 0.05), "accumulator 0.05"),
        (3, ("reuse", "below_threshold", 0.05, 0.04, 0.09), "rescaled 0.04"),
        (4, ("compute", "warmup", None, None, 0.0), "signal None"),
        (6, ("compute", "cooldown", 0.1, None, 0.0), "where the rules measure none"),
        (2, ("reuse", "below_threshold", -0.04, -0.04, -0.04), "signal -0.04"),
    ],
)
def test_wrong_teacache_decision_is_named(step: int, row: tuple[Any, ...], fault: str) -> None:
    rows = list(TEA_BY_HAND)
    rows[step] = row
    found = replay(TEA, 7, events(rows, "teacache"))
    assert any(re.search(rf"step {step}: .*{fault}", sentence) for sentence in found), found


@pytest.mark.parametrize(
    ("step", "row"),
    [
        (0, ("reuse", "below_threshold", 0.0, None, None)),
        (1, ("compute", "threshold", 0.08, None, None)),
        (2, ("reuse", "below_threshold", 0.0801, None, None)),
        (3, ("compute", "shape_change", None, None, None)),
        (1, ("reuse", "below_threshold", 0.08, None, 0.0)),
    ],
)
def test_wrong_first_block_decision_is_named(step: int, row: tuple[Any, ...]) -> None:
    rows = list(FIRST_BY_HAND)
    rows[step] = row
    assert any(f"step {step}: " in sentence for sentence in replay(FIRST, 4, events(rows, "firstblockcache")))


def test_missing_and_foreign_decisions_are_named() -> None:
    assert any("one at each of 0..7" in sentence for sentence in replay(TEA, 8, events(TEA_BY_HAND, "teacache")))
    assert any("not of teacache" in sentence for sentence in replay(TEA, 7, events(TEA_BY_HAND, "firstblockcache")))
    assert replay(TEA, 3, []) != []


def test_sum_on_the_threshold_may_go_either_way() -> None:
    """0.1 + 0.2 is not 0.3 in binary: a sum within rounding of the threshold proves nothing."""
    cache = TeaCache(kind="teacache", threshold=0.3, retain_steps=1, cooldown_steps=0, coefficients=(1.0, 0.0))
    start = [("compute", "warmup", None, None, 0.0), ("reuse", "below_threshold", 0.1, 0.1, 0.1)]
    for row in (("compute", "threshold", 0.2, 0.2, 0.0), ("reuse", "below_threshold", 0.2, 0.2, 0.3)):
        assert replay(cache, 3, events([*start, row], "teacache")) == []


# --- a list in place of the signals, and a last forward that is computed anyhow --------------------------------------

TEA_LIST = TEA.model_copy(update={"replay": (0, 3, 4)})
FIRST_LIST = FIRST.model_copy(update={"replay": (0, 2)})
# Forwards 0, 1 and 6 are forced by TeaCache itself: 0 is listed and has no signal, 1 and 6 are reused and have one.
TEA_LISTED = [
    ("compute", "replay", None, None, 0.0),
    ("reuse", "replay", 0.5, 0.5, 0.5),
    ("reuse", "replay", 0.25, 0.25, 0.75),
    ("compute", "replay", 0.01, 0.01, 0.0),
    ("compute", "replay", 0.02, 0.02, 0.0),
    ("reuse", "replay", 0.5, 0.5, 0.5),
    ("reuse", "replay", 0.25, 0.25, 0.75),
]
FIRST_LISTED = [
    ("compute", "replay", None, None, None),
    ("reuse", "replay", 0.9, None, None),
    ("compute", "replay", 0.0, None, None),
    ("reuse", "replay", 0.9, None, None),
]


def test_a_list_decides_and_the_signals_stand_beside_it() -> None:
    assert replay(TEA_LIST, 7, events(TEA_LISTED, "teacache")) == []
    assert replay(FIRST_LIST, 4, events(FIRST_LISTED, "firstblockcache")) == []
    assert replay(TEA, 7, events(TEA_LISTED, "teacache")) != []
    assert replay(TEA_LIST, 7, events(TEA_BY_HAND, "teacache")) != []
    assert replay(FIRST, 4, events(FIRST_LISTED, "firstblockcache")) != []
    assert replay(FIRST_LIST, 4, events(FIRST_BY_HAND, "firstblockcache")) != []


@pytest.mark.parametrize(
    ("step", "row", "fault"),
    [
        (1, ("compute", "replay", 0.5, 0.5, 0.0), r"reuse \(replay\)"),
        (3, ("reuse", "replay", 0.01, 0.01, 0.76), r"compute \(replay\)"),
        (3, ("compute", "threshold", 0.01, 0.01, 0.0), r"compute \(replay\)"),
        (2, ("reuse", "below_threshold", 0.25, 0.25, 0.75), r"reuse \(replay\)"),
        (2, ("reuse", "replay", None, None, None), "signal None"),
        (2, ("reuse", "replay", 0.25, 0.25, 0.25), "accumulator 0.25"),
        (0, ("compute", "replay", 0.1, None, 0.0), "where the rules measure none"),
        (6, ("compute", "warmup_last", 0.25, 0.25, 0.0), r"reuse \(replay\)"),
    ],
)
def test_a_departure_from_the_list_is_named(step: int, row: tuple[Any, ...], fault: str) -> None:
    rows = list(TEA_LISTED)
    rows[step] = row
    found = replay(TEA_LIST, 7, events(rows, "teacache"))
    assert any(re.search(rf"step {step}: .*{fault}", sentence) for sentence in found), found


def test_the_last_forward_of_a_warm_up_is_computed_where_it_would_have_been_reused() -> None:
    first = [*FIRST_BY_HAND[:3], ("compute", "warmup_last", 0.0, None, None)]
    listed = [*FIRST_LISTED[:3], ("compute", "warmup_last", 0.9, None, None)]
    tea = [*TEA_LISTED[:6], ("compute", "warmup_last", 0.25, 0.25, 0.0)]
    for cache, rows in ((FIRST, first), (FIRST_LIST, listed), (TEA_LIST, tea)):
        assert replay(cache, len(rows), events(rows, cache.kind), compute_last=True) == []
        assert replay(cache, len(rows), events(rows, cache.kind)) != []
    for cache, rows in ((FIRST, FIRST_BY_HAND), (FIRST_LIST, FIRST_LISTED), (TEA_LIST, TEA_LISTED)):
        (fault,) = replay(cache, len(rows), events(rows, cache.kind), compute_last=True)
        assert "the rules say compute (warmup_last)" in fault


def test_the_last_forward_keeps_the_reason_of_a_rule_that_computes_it_anyhow() -> None:
    assert replay(TEA, 7, events(TEA_BY_HAND, "teacache"), compute_last=True) == []  # cooldown
    rows = [*FIRST_BY_HAND[:3], ("compute", "threshold", 0.2, None, None)]
    assert replay(FIRST, 4, events(rows, "firstblockcache"), compute_last=True) == []


def test_a_sum_on_the_threshold_at_a_computed_last_forward_may_go_either_way() -> None:
    cache = TeaCache(kind="teacache", threshold=0.3, retain_steps=1, cooldown_steps=0, coefficients=(1.0, 0.0))
    start = [("compute", "warmup", None, None, 0.0), ("reuse", "below_threshold", 0.1, 0.1, 0.1)]
    for reason in ("threshold", "warmup_last"):
        rows = [*start, ("compute", reason, 0.2, 0.2, 0.0)]
        assert replay(cache, 3, events(rows, "teacache"), compute_last=True) == []
