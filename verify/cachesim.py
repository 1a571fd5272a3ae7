"""The decision rules of TeaCache and FirstBlockCache, replayed from recorded signals.

Rules as published (NVlabs/Sana, branch sol-engine, models/minimax_h3, the RTX4090 TeaCache and the H100 first-block
cache). The signal itself, a relative L1 between hidden states, cannot be derived again: the states are not in the
record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from config.record import CacheDecision
from config.schema import FirstBlockCache, TeaCache

TOLERANCE = 1e-9  # relative; a recorded float survives JSON exactly, its sum may be taken in another order


@dataclass(frozen=True)
class Expected:
    """What the rules say at one step."""

    action: str
    reason: str
    rescaled: float | None
    accumulator: float | None


def replay(cache: TeaCache | FirstBlockCache, forwards: int, decisions: Sequence[CacheDecision]) -> list[str]:
    """Every difference between recorded decisions of one request and the rules, one sentence each; none when they
    agree.

    Args:
        cache: the lock's parameters.
        forwards: DiT forwards of the request, hence of the cool-down rule.
        decisions: as recorded, in order; one is needed for each forward.
    """
    faults = []
    steps = [decision.step for decision in decisions]
    if steps != list(range(forwards)):
        faults.append(f"decisions at steps {_short(steps)}; needed: one at each of 0..{forwards - 1}")
    if any(decision.kind != cache.kind for decision in decisions):
        faults.append(f"a decision is not of {cache.kind}")
    accumulator, history = 0.0, False
    for decision in decisions:
        if isinstance(cache, TeaCache):
            expected, fault = _teacache(cache, forwards, decision, accumulator, history)
            # The recorded sum carries on: after a tie that went the other way, one fault is reported and not one a
            # step.
            accumulator = decision.accumulator if decision.accumulator is not None else 0.0
        else:
            expected, fault = _first_block(cache, decision, history)
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
    if decision.signal is None or decision.signal < 0:
        return Expected("compute", "threshold", None, 0.0), f"signal {decision.signal}; needed: a relative L1"
    rescaled = 0.0
    for coefficient in cache.coefficients:
        rescaled = rescaled * decision.signal + coefficient
    total = accumulator + rescaled
    on_edge = abs(total - cache.threshold) <= TOLERANCE * cache.threshold
    computes = decision.action == "compute" if on_edge else total >= cache.threshold
    if computes:
        return Expected("compute", "threshold", rescaled, 0.0), ""
    return Expected("reuse", "below_threshold", rescaled, total), ""


def _first_block(cache: FirstBlockCache, decision: CacheDecision, history: bool) -> tuple[Expected, str]:
    if not history:
        return Expected("compute", "initialize", None, None), ""
    if decision.signal is None or decision.signal < 0:
        return Expected("compute", "threshold", None, None), f"signal {decision.signal}; needed: a relative L1"
    if decision.signal > cache.threshold:
        return Expected("compute", "threshold", None, None), ""
    return Expected("reuse", "below_threshold", None, None), ""


def _compare(decision: CacheDecision, expected: Expected) -> str:
    if (decision.action, decision.reason) != (expected.action, expected.reason):
        return f"{decision.action} ({decision.reason}); the rules say {expected.action} ({expected.reason})"
    for name in ("rescaled", "accumulator"):
        found, needed = getattr(decision, name), getattr(expected, name)
        if (found is None) != (needed is None) or (found is not None and not _close(found, needed)):
            return f"{name} {found}; the rules give {needed}"
    if expected.reason in ("warmup", "cooldown", "initialize") and decision.signal is not None:
        return f"signal {decision.signal} where the rules measure none"
    return ""


def _close(found: float, needed: float) -> bool:
    return abs(found - needed) <= TOLERANCE * max(1.0, abs(needed))


def _short(steps: Sequence[int]) -> str:
    return str(list(steps)) if len(steps) <= 8 else f"[{steps[0]}, {steps[1]}, ..., {steps[-1]}] ({len(steps)})"
