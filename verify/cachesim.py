"""The decision rules of TeaCache and FirstBlockCache, replayed from recorded signals.

Rules as published (NVlabs/Sana, branch sol-engine, models/minimax_h3, the RTX4090 TeaCache and the H100 first-block
cache). The signal itself, a relative L1 between hidden states, cannot be derived again: the states are not in the
record. Two rules are this project's, for open runs: a list of computed forwards in place of the signals' verdicts
(reason `replay`), and a warm-up whose last forward is computed whatever was decided (`warmup_last`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from config.record import CacheDecision
from config.schema import FirstBlockCache, TeaCache

TOLERANCE = 1e-9  # relative; a recorded float survives JSON exactly, its sum may be taken in another order


@dataclass(frozen=True)
class Expected:
    """What the rules say at one step. `signal`: whether they measure one there."""

    action: str
    reason: str
    rescaled: float | None
    accumulator: float | None
    signal: bool = False


def replay(
    cache: TeaCache | FirstBlockCache,
    forwards: int,
    decisions: Sequence[CacheDecision],
    *,
    compute_last: bool = False,
) -> list[str]:
    """Every difference between recorded decisions of one request and the rules, one sentence each; none when they
    agree.

    Args:
        cache: the lock's parameters.
        forwards: DiT forwards of the request, hence of the cool-down rule.
        decisions: as recorded, in order; one is needed for each forward.
        compute_last: whether the request's last forward computes whatever was decided.
    """
    faults = []
    steps = [decision.step for decision in decisions]
    if steps != list(range(forwards)):
        faults.append(f"decisions at steps {_short(steps)}; needed: one at each of 0..{forwards - 1}")
    if any(decision.kind != cache.kind for decision in decisions):
        faults.append(f"a decision is not of {cache.kind}")
    accumulator, history, listed = 0.0, False, frozenset(cache.replay)
    for decision in decisions:
        if listed:
            expected, fault = _listed(cache, decision.step in listed, forwards, decision, accumulator)
        elif isinstance(cache, TeaCache):
            expected, fault = _teacache(cache, forwards, decision, accumulator, history)
        else:
            expected, fault = _first_block(cache, decision, history)
        if compute_last and decision.step == forwards - 1 and expected.action == "reuse":
            # The sum is of reuses in a row, so this ends it; a signal was measured before the rule took over.
            expected = replace(expected, action="compute", reason="warmup_last")
            expected = replace(expected, accumulator=None if expected.accumulator is None else 0.0)
        # The recorded sum carries on: after a tie that went the other way, one fault is reported and not one a step.
        accumulator = decision.accumulator if decision.accumulator is not None else 0.0
        history = True
        fault = fault or _compare(decision, expected)
        if fault:
            faults.append(f"step {decision.step}: {fault}")
    return faults


def _teacache(
    cache: TeaCache, forwards: int, decision: CacheDecision, accumulator: float, history: bool
) -> tuple[Expected, str]:
    if decision.step < cache.retain_steps:
        return Expected("compute", "warmup", None, 0.0), ""
    if decision.step >= forwards - cache.cooldown_steps:
        return Expected("compute", "cooldown", None, 0.0), ""
    if not history:
        return Expected("compute", "initialize", None, 0.0), ""
    if fault := _no_signal(decision):
        return Expected("compute", "threshold", None, 0.0), fault
    rescaled = _rescaled(cache, decision)
    total = accumulator + rescaled
    on_edge = abs(total - cache.threshold) <= TOLERANCE * cache.threshold
    computes = decision.reason == "threshold" if on_edge else total >= cache.threshold
    if computes:
        return Expected("compute", "threshold", rescaled, 0.0, signal=True), ""
    return Expected("reuse", "below_threshold", rescaled, total, signal=True), ""


def _first_block(cache: FirstBlockCache, decision: CacheDecision, history: bool) -> tuple[Expected, str]:
    if not history:
        return Expected("compute", "initialize", None, None), ""
    if fault := _no_signal(decision):
        return Expected("compute", "threshold", None, None), fault
    if decision.signal is not None and decision.signal > cache.threshold:
        return Expected("compute", "threshold", None, None, signal=True), ""
    return Expected("reuse", "below_threshold", None, None, signal=True), ""


def _listed(
    cache: TeaCache | FirstBlockCache, computes: bool, forwards: int, decision: CacheDecision, accumulator: float
) -> tuple[Expected, str]:
    """The lock's list decides; signals stand where the cache measures them, so that a forward costs what it costs.

    FirstBlockCache measures at each forward but the first. TeaCache does where its own rules do not force a compute,
    and wherever it reuses.
    """
    step, action = decision.step, "compute" if computes else "reuse"
    if not isinstance(cache, TeaCache):
        measures = step > 0
        expected = Expected(action, "replay", None, None, signal=measures)
        return expected, _no_signal(decision) if measures else ""
    forced = step == 0 or step < cache.retain_steps or step >= forwards - cache.cooldown_steps
    if computes and forced:
        return Expected(action, "replay", None, 0.0), ""
    if fault := _no_signal(decision):
        return Expected(action, "replay", None, 0.0, signal=True), fault
    rescaled = _rescaled(cache, decision)
    return Expected(action, "replay", rescaled, 0.0 if computes else accumulator + rescaled, signal=True), ""


def _no_signal(decision: CacheDecision) -> str:
    """What is wrong with the signal of a decision that needs one; empty when nothing is."""
    if decision.signal is None or not 0 <= decision.signal < math.inf:
        return f"signal {decision.signal}; needed: a relative L1"
    return ""


def _rescaled(cache: TeaCache, decision: CacheDecision) -> float:
    value = 0.0
    for coefficient in cache.coefficients:
        value = value * (decision.signal or 0.0) + coefficient
    return value


def _compare(decision: CacheDecision, expected: Expected) -> str:
    if (decision.action, decision.reason) != (expected.action, expected.reason):
        return f"{decision.action} ({decision.reason}); the rules say {expected.action} ({expected.reason})"
    for name in ("rescaled", "accumulator"):
        found, needed = getattr(decision, name), getattr(expected, name)
        if (found is None) != (needed is None) or (found is not None and not _close(found, needed)):
            return f"{name} {found}; the rules give {needed}"
    if not expected.signal and decision.signal is not None:
        return f"signal {decision.signal} where the rules measure none"
    return ""


def _close(found: float, needed: float) -> bool:
    return abs(found - needed) <= TOLERANCE * max(1.0, abs(needed))


def _short(steps: Sequence[int]) -> str:
    return str(list(steps)) if len(steps) <= 8 else f"[{steps[0]}, {steps[1]}, ..., {steps[-1]}] ({len(steps)})"
