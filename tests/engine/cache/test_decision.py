"""The decision rules: vectors worked out by hand, and a second simulator written as loops over whole signal series."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import SolError
from config.record import CacheDecision
from config.schema import FirstBlockCache, TeaCache
from engine.cache.decision import CachePolicy, Decision, FirstBlockCachePolicy, TeaCachePolicy
from verify.cachesim import replay as judge

IDENTITY = (1.0, 0.0)


def tea(policy: TeaCachePolicy, signals: list[float]) -> list[Decision]:
    """Run one request; as in the controllers, there is history from the second forward on."""
    policy.begin_request(len(signals))
    return [policy.decide(step, signal, step > 0) for step, signal in enumerate(signals)]


def actions(decisions: list[Decision]) -> str:
    return "".join("C" if decision.action == "compute" else "R" for decision in decisions)


def test_the_module_imports_without_torch() -> None:
    code = "import sys, engine.cache.decision; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_decision_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Decision(0, "compute", "warmup").action = "reuse"  # type: ignore[misc]


# Powers of two, so that every sum below is exact.
def test_teacache_literal_vector() -> None:
    policy = TeaCachePolicy(threshold=0.5, retain_steps=2, cooldown_steps=1, coefficients=IDENTITY)
    decisions = tea(policy, [9.0, 9.0, 0.25, 0.125, 0.125, 0.0, 0.375, 0.0625, 0.75, 9.0])
    assert decisions == [
        Decision(0, "compute", "warmup", None, None, 0.0),
        Decision(1, "compute", "warmup", None, None, 0.0),
        Decision(2, "reuse", "below_threshold", 0.25, 0.25, 0.25),
        Decision(3, "reuse", "below_threshold", 0.125, 0.125, 0.375),
        Decision(4, "compute", "threshold", 0.125, 0.125, 0.0),  # 0.5 >= 0.5
        Decision(5, "reuse", "below_threshold", 0.0, 0.0, 0.0),
        Decision(6, "reuse", "below_threshold", 0.375, 0.375, 0.375),
        Decision(7, "reuse", "below_threshold", 0.0625, 0.0625, 0.4375),
        Decision(8, "compute", "threshold", 0.75, 0.75, 0.0),
        Decision(9, "compute", "cooldown", None, None, 0.0),
    ]


def test_teacache_polynomial_is_highest_power_first() -> None:
    policy = TeaCachePolicy(threshold=100.0, retain_steps=1, cooldown_steps=0, coefficients=(2.0, -1.0, 0.5))
    decisions = tea(policy, [0.0, 3.0, 0.5])
    # 2*9 - 3 + 0.5 and 2*0.25 - 0.5 + 0.5
    assert [(d.rescaled, d.accumulator) for d in decisions[1:]] == [(15.5, 15.5), (0.5, 16.0)]


def test_teacache_computes_at_the_threshold_itself_and_firstblockcache_does_not() -> None:
    teacache = TeaCachePolicy(0.08, retain_steps=0, cooldown_steps=0, coefficients=IDENTITY)
    teacache.begin_request(2)
    assert teacache.decide(1, 0.08, True).action == "compute"
    first_block = FirstBlockCachePolicy(0.08)
    first_block.begin_request(2)
    assert first_block.decide(1, 0.08, True).action == "reuse"
    assert first_block.decide(1, math.nextafter(0.08, 1), True).action == "compute"


def test_teacache_without_history_initializes_only_after_the_warmup() -> None:
    policy = TeaCachePolicy(0.5, retain_steps=1, cooldown_steps=1, coefficients=IDENTITY)
    policy.begin_request(4)
    assert policy.decide(0, None, False).reason == "warmup"
    assert policy.decide(1, None, False).reason == "initialize"
    assert policy.decide(2, 0.25, True).reason == "below_threshold"
    assert policy.decide(3, None, False).reason == "cooldown"


def test_initialize_leaves_the_accumulator_and_the_other_computes_reset_it() -> None:
    policy = TeaCachePolicy(0.5, retain_steps=0, cooldown_steps=1, coefficients=IDENTITY)
    policy.begin_request(4)
    assert policy.decide(0, 0.25, True).accumulator == 0.25
    assert policy.decide(1, None, False) == Decision(1, "compute", "initialize", None, None, 0.25)
    assert policy.decide(2, 0.125, True).accumulator == 0.375
    assert policy.decide(3, None, True).accumulator == 0.0


def test_published_4090_policy_computes_at_least_its_five_first_and_its_last_forward() -> None:
    policy = TeaCachePolicy(0.10, retain_steps=5, cooldown_steps=1, coefficients=IDENTITY)
    assert actions(tea(policy, [0.0] * 49)) == "CCCCC" + "R" * 43 + "C"


def test_cooldown_follows_the_requests_own_length() -> None:
    """Upstream takes 49 forwards as a constant, so a 5-step warm-up (4 forwards) never reached its cooldown."""
    policy = TeaCachePolicy(0.10, retain_steps=1, cooldown_steps=1, coefficients=IDENTITY)
    assert [d.reason for d in tea(policy, [0.0] * 4)] == ["warmup", "below_threshold", "below_threshold", "cooldown"]
    assert [d.reason for d in tea(policy, [0.0] * 3)] == ["warmup", "below_threshold", "cooldown"]


def test_firstblockcache_literal_vector() -> None:
    policy = FirstBlockCachePolicy(0.25)
    policy.begin_request(6)
    decisions = [
        policy.decide(0, None, False),
        policy.decide(1, 0.25, True),
        policy.decide(2, 0.3125, True),
        policy.decide(3, None, False, shape_changed=True),
        policy.decide(4, 0.0, True),
        policy.decide(5, 0.0, True),  # the last forward may be reused, as published
    ]
    assert decisions == [
        Decision(0, "compute", "initialize"),
        Decision(1, "reuse", "below_threshold", 0.25),
        Decision(2, "compute", "threshold", 0.3125),
        Decision(3, "compute", "shape_change"),
        Decision(4, "reuse", "below_threshold", 0.0),
        Decision(5, "reuse", "below_threshold", 0.0),
    ]


@pytest.mark.parametrize("threshold", [0.0, -0.1, math.nan, math.inf])
def test_thresholds_must_be_positive_numbers(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold must be a positive number"):
        TeaCachePolicy(threshold, 5, 1, IDENTITY)
    with pytest.raises(ValueError, match="threshold must be a positive number"):
        FirstBlockCachePolicy(threshold)


@pytest.mark.parametrize(("retain", "cooldown"), [(-1, 0), (0, -1)])
def test_step_counts_must_not_be_negative(retain: int, cooldown: int) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        TeaCachePolicy(0.1, retain, cooldown, IDENTITY)


@pytest.mark.parametrize("coefficients", [(), (math.nan,), (1.0, math.inf)])
def test_coefficients_must_be_finite_and_present(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="at least one finite coefficient"):
        TeaCachePolicy(0.1, 5, 1, coefficients)


@pytest.mark.parametrize("policy", [TeaCachePolicy(0.1, 0, 0, IDENTITY), FirstBlockCachePolicy(0.1)])
@pytest.mark.parametrize("signal", [math.nan, math.inf, -0.01])
def test_a_signal_that_is_no_finite_number_is_refused_not_reused(policy: CachePolicy, signal: float) -> None:
    policy.begin_request(3)
    with pytest.raises(SolError, match="the cache signal of forward 1"):
        policy.decide(1, signal, True)


@pytest.mark.parametrize("policy", [TeaCachePolicy(0.1, 0, 0, IDENTITY), FirstBlockCachePolicy(0.1)])
def test_steps_outside_the_request_or_backwards_are_refused(policy: CachePolicy) -> None:
    with pytest.raises(ValueError, match="call begin_request"):
        policy.decide(0, None, False)
    with pytest.raises(ValueError, match="at least one forward"):
        policy.begin_request(0)
    policy.begin_request(3)
    with pytest.raises(ValueError, match="outside the request's 3 forwards"):
        policy.decide(3, 0.0, True)
    with pytest.raises(ValueError, match="outside the request's 3 forwards"):
        policy.needs_signal(-1, True)
    with pytest.raises(ValueError, match="none was given"):
        policy.decide(1, None, True)
    policy.decide(2, 0.0, True)
    with pytest.raises(ValueError, match="step went back from 2 to 0"):
        policy.decide(0, None, False)


# --- second implementation -------------------------------------------------------------------------------------------


def simulate_teacache(
    signals: list[float], threshold: float, retain: int, cooldown: int, coefficients: list[float]
) -> list[tuple[str, float | None, float]]:
    """(reason, rescaled, accumulator after) a forward; the accumulator is summed anew from the last reset each time."""
    forwards = len(signals)
    out: list[tuple[str, float | None, float]] = []
    since: list[float] = []
    for step in range(forwards):
        if step in range(retain):
            since = []
            out.append(("warmup", None, 0.0))
        elif forwards - step <= cooldown:
            since = []
            out.append(("cooldown", None, 0.0))
        elif step == 0:
            out.append(("initialize", None, 0.0))
        else:
            x = signals[step]
            value = coefficients[0]
            for c in coefficients[1:]:
                value = value * x + c
            since.append(value)
            total = 0.0
            for term in since:
                total += term
            if not total < threshold:
                since = []
                out.append(("threshold", value, 0.0))
            else:
                out.append(("below_threshold", value, total))
    return out


def simulate_first_block(heads: list[float], threshold: float) -> list[tuple[str, float | None]]:
    """Scalar head residuals in, (reason, signal) out; the reference is looked up as the last computed forward."""
    computed: list[int] = []
    out: list[tuple[str, float | None]] = []
    for step, head in enumerate(heads):
        if not computed:
            computed.append(step)
            out.append(("initialize", None))
            continue
        reference = heads[computed[-1]]
        signal = abs(head - reference) / max(abs(reference), 1e-8)
        if signal <= threshold:
            out.append(("below_threshold", signal))
        else:
            computed.append(step)
            out.append(("threshold", signal))
    return out


signal_series = st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.5]), min_size=1, max_size=60)


@given(
    signals=signal_series,
    threshold=st.floats(0.001, 2) | st.sampled_from([0.05, 0.1, 0.5]),
    retain=st.integers(0, 70),
    cooldown=st.integers(0, 70),
    coefficients=st.lists(st.floats(-3, 3), min_size=1, max_size=5),
)
def test_teacache_equals_the_simulator(
    signals: list[float], threshold: float, retain: int, cooldown: int, coefficients: list[float]
) -> None:
    decisions = tea(TeaCachePolicy(threshold, retain, cooldown, coefficients), signals)
    expected = simulate_teacache(signals, threshold, retain, cooldown, coefficients)
    assert [(d.reason, d.rescaled, d.accumulator) for d in decisions] == expected
    for decision, signal in zip(decisions, signals, strict=True):
        measured = decision.reason in ("threshold", "below_threshold")
        assert decision.signal == (signal if measured else None)
        assert decision.action == ("reuse" if decision.reason == "below_threshold" else "compute")


@given(signals=signal_series, retain=st.integers(0, 10), cooldown=st.integers(0, 10))
def test_needs_signal_is_true_exactly_where_a_signal_is_recorded(
    signals: list[float], retain: int, cooldown: int
) -> None:
    policy = TeaCachePolicy(0.1, retain, cooldown, IDENTITY)
    policy.begin_request(len(signals))
    for step, signal in enumerate(signals):
        needed = policy.needs_signal(step, step > 0)
        decision = policy.decide(step, signal if needed else None, step > 0)
        assert needed == (decision.signal is not None)


@given(heads=st.lists(st.floats(-4, 4), min_size=1, max_size=60), threshold=st.floats(0.001, 2))
def test_firstblockcache_equals_the_simulator(heads: list[float], threshold: float) -> None:
    policy = FirstBlockCachePolicy(threshold)
    policy.begin_request(len(heads))
    reference: float | None = None
    decisions = []
    for step, head in enumerate(heads):
        signal = None
        if policy.needs_signal(step, reference is not None):
            assert reference is not None
            signal = abs(head - reference) / max(abs(reference), 1e-8)
        decision = policy.decide(step, signal, reference is not None)
        if decision.action == "compute":
            reference = head
        decisions.append(decision)
    assert [(d.reason, d.signal) for d in decisions] == simulate_first_block(heads, threshold)
    assert all(d.rescaled is None and d.accumulator is None for d in decisions)


@given(first=signal_series, second=signal_series)
def test_a_second_request_decides_like_a_fresh_policy(first: list[float], second: list[float]) -> None:
    used = TeaCachePolicy(0.3, 0, 0, IDENTITY)  # no forced forward that would reset the accumulator anyway
    tea(used, first)
    assert tea(used, second) == tea(TeaCachePolicy(0.3, 0, 0, IDENTITY), second)


# --- a list in place of the signals, and a last forward that is computed anyhow --------------------------------------


def test_a_list_decides_for_teacache_and_the_signals_stand_beside_it() -> None:
    """Forwards 0, 1 and 6 are forced by the rules: listed they have no signal, and reused they have one."""
    policy = TeaCachePolicy(0.5, retain_steps=2, cooldown_steps=1, coefficients=IDENTITY, replay=(0, 3, 4))
    decisions = tea(policy, [9.0, 0.5, 0.25, 0.0625, 9.0, 0.5, 0.25])
    assert decisions == [
        Decision(0, "compute", "replay", None, None, 0.0),
        Decision(1, "reuse", "replay", 0.5, 0.5, 0.5),
        Decision(2, "reuse", "replay", 0.25, 0.25, 0.75),
        Decision(3, "compute", "replay", 0.0625, 0.0625, 0.0),
        Decision(4, "compute", "replay", 9.0, 9.0, 0.0),
        Decision(5, "reuse", "replay", 0.5, 0.5, 0.5),
        Decision(6, "reuse", "replay", 0.25, 0.25, 0.75),
    ]


def test_a_list_decides_for_firstblockcache_and_the_signals_stand_beside_it() -> None:
    policy = FirstBlockCachePolicy(0.25, replay=(0, 2))
    policy.begin_request(4)
    assert [policy.decide(step, 9.0 if step % 2 else 0.0, step > 0) for step in range(4)] == [
        Decision(0, "compute", "replay"),
        Decision(1, "reuse", "replay", 9.0),
        Decision(2, "compute", "replay", 0.0),
        Decision(3, "reuse", "replay", 9.0),
    ]


def test_without_a_history_a_forward_beside_the_list_computes_and_says_why() -> None:
    first = FirstBlockCachePolicy(0.25, replay=(0, 3))
    first.begin_request(4)
    assert first.decide(1, None, False).reason == "initialize"
    assert first.decide(2, None, False, shape_changed=True).reason == "shape_change"
    assert first.decide(3, None, False, shape_changed=True) == Decision(3, "compute", "replay")
    teacache = TeaCachePolicy(0.5, 0, 0, IDENTITY, replay=(0, 3))
    teacache.begin_request(4)
    assert teacache.decide(1, None, False) == Decision(1, "compute", "initialize", accumulator=0.0)


@pytest.mark.parametrize("replay", [(1, 2), (0, 2, 1), (0, 0), (-1, 0)])
def test_a_list_that_does_not_rise_from_the_first_forward_is_refused(replay: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must rise from forward 0"):
        FirstBlockCachePolicy(0.1, replay)
    with pytest.raises(ValueError, match="must rise from forward 0"):
        TeaCachePolicy(0.1, 0, 0, IDENTITY, replay)


lists = st.lists(st.integers(1, 59), max_size=20).map(lambda steps: tuple(sorted({0, *steps})))


@given(signals=signal_series, replay=lists, retain=st.integers(0, 10), cooldown=st.integers(0, 10))
def test_a_replay_computes_its_list_and_measures_every_reuse(
    signals: list[float], replay: tuple[int, ...], retain: int, cooldown: int
) -> None:
    forwards = len(signals)
    first = FirstBlockCachePolicy(0.1, replay)
    first.begin_request(forwards)
    teacache = TeaCachePolicy(0.1, retain, cooldown, IDENTITY, replay)
    teacache.begin_request(forwards)
    for step, signal in enumerate(signals):
        wanted = "compute" if step in replay else "reuse"
        needed = teacache.needs_signal(step, step > 0)
        decision = teacache.decide(step, signal if needed else None, step > 0)
        forced = step == 0 or step < retain or step >= forwards - cooldown
        assert (decision.action, decision.reason) == (wanted, "replay")
        assert (decision.signal is not None) == needed == (wanted == "reuse" or not forced)
        needed = first.needs_signal(step, step > 0)
        decision = first.decide(step, signal if needed else None, step > 0)
        assert (decision.action, decision.reason) == (wanted, "replay")
        assert (decision.signal is not None) == needed == (step > 0)


def test_a_computed_last_forward_takes_the_place_of_a_reuse_alone() -> None:
    first = FirstBlockCachePolicy(0.25)
    for signal, reason in ((0.125, "warmup_last"), (0.5, "threshold")):
        first.begin_request(2, compute_last=True)
        first.decide(0, None, False)
        assert first.decide(1, signal, True) == Decision(1, "compute", reason, signal)
    first.begin_request(2)  # the next request does not remember it
    assert first.decide(1, 0.125, True).action == "reuse"
    teacache = TeaCachePolicy(0.5, 1, 0, IDENTITY)
    teacache.begin_request(3, compute_last=True)
    assert teacache.decide(0, None, False).reason == "warmup"
    assert teacache.decide(1, 0.125, True) == Decision(1, "reuse", "below_threshold", 0.125, 0.125, 0.125)
    assert teacache.decide(2, 0.125, True) == Decision(2, "compute", "warmup_last", 0.125, 0.125, 0.0)
    teacache = TeaCachePolicy(0.5, 1, 1, IDENTITY)
    teacache.begin_request(3, compute_last=True)
    assert teacache.decide(2, None, True).reason == "cooldown"


def test_a_short_warm_up_computes_its_part_of_the_list_and_its_last_forward() -> None:
    """The 12-step warm-up: 11 forwards, of which 10 are dense, so forward 10 is the one that the gate needs."""
    for replay in ((0, 3, 6, 9, 12, 15), (0, 1, 2, 3, 4, 9, 14)):
        policy = FirstBlockCachePolicy(0.1, replay)
        policy.begin_request(11, compute_last=True)
        found = [policy.decide(step, 0.0, step > 0) for step in range(11)]
        assert [d.step for d in found if d.action == "compute"] == [*(step for step in replay if step < 10), 10]
        assert found[10].reason == "warmup_last"


@given(
    signals=signal_series,
    replay=st.just(()) | lists,
    threshold=st.floats(0.001, 2) | st.sampled_from([0.05, 0.1, 0.5]),
    retain=st.integers(0, 10),
    cooldown=st.integers(0, 10),
    last=st.booleans(),
)
@settings(deadline=None)  # two policies and a record's models an example: slow on a machine that does other things
def test_the_judges_own_rules_agree_with_every_decision(
    signals: list[float], replay: tuple[int, ...], threshold: float, retain: int, cooldown: int, last: bool
) -> None:
    """And with none that is turned over."""
    forwards = len(signals)
    tea_lock = TeaCache(
        kind="teacache",
        threshold=threshold,
        retain_steps=retain,
        cooldown_steps=cooldown,
        coefficients=IDENTITY,
        replay=replay,
    )
    first_lock = FirstBlockCache(kind="firstblockcache", threshold=threshold, replay=replay)
    for lock, policy in (
        (tea_lock, TeaCachePolicy(threshold, retain, cooldown, IDENTITY, replay)),
        (first_lock, FirstBlockCachePolicy(threshold, replay)),
    ):
        policy.begin_request(forwards, compute_last=last)
        decided = []
        for step, signal in enumerate(signals):
            needed = policy.needs_signal(step, step > 0)
            decided.append(policy.decide(step, signal if needed else None, step > 0))
        recorded = [
            CacheDecision(t=0, seq=i, source="worker", sample=1, kind=lock.kind, **dataclasses.asdict(decision))
            for i, decision in enumerate(decided)
        ]
        assert judge(lock, forwards, recorded, compute_last=last) == []
        turned = recorded[-1].model_copy(update={"action": "reuse" if recorded[-1].action == "compute" else "compute"})
        assert judge(lock, forwards, [*recorded[:-1], turned], compute_last=last) != []
