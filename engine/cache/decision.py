"""When a cached forward computes and when it reuses: the published decision rules over plain numbers, without tensors.

A policy is a state machine for one rank. The tensor side measures the signal and asks; `needs_signal` comes first
because a signal costs a reduction over all ranks and a transfer to the host, and the published rules do not measure it
where the decision is forced.

Rules: NVlabs/Sana, branch sol-engine, `models/minimax_h3/RTX4090/teacache.py` and
`models/minimax_h3/H100/first_block_cache.py`. Two are ours, for runs that say so: a list in place of the signal's
verdict (`replay`), and a last forward that is computed whatever was decided (`warmup_last`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from config.errors import SolError

Action = Literal["compute", "reuse"]
Reason = Literal[
    "warmup", "cooldown", "initialize", "shape_change", "threshold", "below_threshold", "replay", "warmup_last"
]


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision, with the figures of the published decision event.

    Attributes:
        step: index of the forward within its request, from 0.
        action: `compute` runs the blocks, `reuse` adds a cached residual instead.
        reason: the rule that decided.
        signal: the measured relative L1, dimensionless; None where the rule did not measure it.
        rescaled: the signal after TeaCache's polynomial; None without a signal and for FirstBlockCache.
        accumulator: TeaCache's running sum after this decision, so 0 after a forced or threshold compute; None for
            FirstBlockCache.
    """

    step: int
    action: Action
    reason: Reason
    signal: float | None = None
    rescaled: float | None = None
    accumulator: float | None = None


class CachePolicy(Protocol):
    """What the tensor side asks of a policy."""

    def begin_request(self, num_forwards: int, *, compute_last: bool = False) -> None:
        """Forget the previous request; the new one has `num_forwards` DiT forwards (for H3, inference steps - 1).

        With `compute_last` a reuse of its last forward is turned into a compute (`warmup_last`).
        """

    def needs_signal(self, step: int, have_history: bool) -> bool:
        """Whether `decide` will look at a signal for this forward."""

    def decide(self, step: int, signal: float | None, have_history: bool) -> Decision:
        """Decide one forward and advance the state."""


class _Request:
    """What both policies know of a request: its length, the forward it is at, and the two rules that are ours.

    A step that leaves the request or goes back betrays a missed request boundary.

    Args:
        replay: forwards that compute, in place of the signal's verdict; every other forward reuses. Forwards beyond a
            request's end do not matter to it. Empty: the signal decides.

    Raises:
        ValueError: the list does not rise from 0.
    """

    def __init__(self, replay: Sequence[int] = ()) -> None:
        if replay and (replay[0] != 0 or list(replay) != sorted(set(replay))):
            raise ValueError(f"a replayed list must rise from forward 0, got {tuple(replay)}")
        self.replay = frozenset(replay)
        self._num_forwards = 0
        self._last_step = 0
        self._compute_last = False

    def begin_request(self, num_forwards: int, *, compute_last: bool = False) -> None:
        """Start a request of `num_forwards` DiT forwards.

        Raises:
            ValueError: `num_forwards` is not positive.
        """
        if num_forwards < 1:
            raise ValueError(f"a request has at least one forward, got {num_forwards}")
        self._num_forwards = num_forwards
        self._last_step = 0
        self._compute_last = compute_last

    def _check_step(self, step: int) -> None:
        if not 0 <= step < self._num_forwards:
            raise ValueError(
                f"step {step} is outside the request's {self._num_forwards} forwards; call begin_request() first"
            )
        if step < self._last_step:
            raise ValueError(f"step went back from {self._last_step} to {step}; call begin_request() for a new request")

    def _verdict(self, step: int, computes: bool) -> tuple[Action, Reason]:
        """The action at a forward that has a history, and the rule behind it; `computes`: what the signal says."""
        if self.replay:
            action: Action = "compute" if step in self.replay else "reuse"
            reason: Reason = "replay"
        else:
            action, reason = ("compute", "threshold") if computes else ("reuse", "below_threshold")
        if action == "reuse" and self._compute_last and step == self._num_forwards - 1:
            return "compute", "warmup_last"
        return action, reason


class TeaCachePolicy(_Request):
    """TeaCache: reuse while the accumulated, rescaled change of the probe stays below the threshold.

    Order of the rules at step s of n forwards: s < retain_steps computes (`warmup`); s >= n - cooldown_steps computes
    (`cooldown`); without history it computes (`initialize`); else the rescaled signal is accumulated, and an
    accumulator >= threshold computes (`threshold`), a smaller one reuses (`below_threshold`). Every compute but
    `initialize` resets the accumulator. The number of forwards is the request's own; upstream compares with a constant
    49 whatever was asked, so that a short warm-up never cools down.

    A replayed list takes the place of all of them but a missing history. The signal is then measured where these rules
    measure it and on every reuse, which has one in a run that is not replayed; it is accumulated and decides nothing.

    Args:
        threshold: limit of the accumulator, positive.
        retain_steps: leading forwards that always compute.
        cooldown_steps: trailing forwards that always compute.
        coefficients: polynomial applied to the signal, highest power first; (1, 0) is the identity.
        replay: forwards that compute; empty: the signal decides.

    Raises:
        ValueError: a parameter is out of range.
    """

    def __init__(
        self,
        threshold: float,
        retain_steps: int,
        cooldown_steps: int,
        coefficients: Sequence[float],
        replay: Sequence[int] = (),
    ) -> None:
        super().__init__(replay)
        self.threshold = _positive(threshold)
        if min(retain_steps, cooldown_steps) < 0:
            raise ValueError(f"step counts must not be negative, got retain {retain_steps}, cooldown {cooldown_steps}")
        if not coefficients or not all(math.isfinite(value) for value in coefficients):
            raise ValueError(f"at least one finite coefficient is needed, got {tuple(coefficients)}")
        self.retain_steps = retain_steps
        self.cooldown_steps = cooldown_steps
        self.coefficients = tuple(coefficients)
        self._accumulator = 0.0

    def begin_request(self, num_forwards: int, *, compute_last: bool = False) -> None:
        """Start a request of `num_forwards` DiT forwards with an empty accumulator."""
        super().begin_request(num_forwards, compute_last=compute_last)
        self._accumulator = 0.0

    def needs_signal(self, step: int, have_history: bool) -> bool:
        """Whether `decide` will look at a signal for this forward."""
        return self._forced(step, have_history) is None

    def decide(self, step: int, signal: float | None, have_history: bool) -> Decision:
        """Decide forward `step` and advance the accumulator.

        Args:
            step: index of the forward within the request, never decreasing.
            signal: relative L1 between this forward's probe and the previous forward's; ignored where the decision is
                forced.
            have_history: whether a previous probe and a residual are held.

        Raises:
            SolError: the signal is not a finite number >= 0.
            ValueError: the step is outside the request or went back, or a needed signal is missing.
        """
        forced = self._forced(step, have_history)
        self._last_step = step
        if forced is not None:
            if forced != "initialize":
                self._accumulator = 0.0
            return Decision(step, "compute", forced, accumulator=self._accumulator)
        value = _checked_signal(step, signal)
        rescaled = _polynomial(self.coefficients, value)
        self._accumulator += rescaled
        action, reason = self._verdict(step, self._accumulator >= self.threshold)
        if action == "compute":
            self._accumulator = 0.0
        return Decision(step, action, reason, value, rescaled, self._accumulator)

    def _forced(self, step: int, have_history: bool) -> Reason | None:
        """The rule that decides before a signal is measured, or None."""
        self._check_step(step)
        rule: Reason | None = None if have_history else "initialize"
        if step < self.retain_steps:
            rule = "warmup"
        elif step >= self._num_forwards - self.cooldown_steps:
            rule = "cooldown"
        if not self.replay or rule is None:
            return rule
        if step in self.replay:
            return "replay"
        return None if have_history else "initialize"


class FirstBlockCachePolicy(_Request):
    """FirstBlockCache: compute where block 0's residual left the last computed one's by more than the threshold.

    Without history it computes (`initialize`), after a change of shape too (`shape_change`); else a signal > threshold
    computes (`threshold`) and a signal <= threshold reuses (`below_threshold`). There is no warm-up, no cooldown, and
    the last forward of a request may be reused, as published. A replayed list takes the place of the signal's verdict;
    the signal is measured where it would have been.

    Args:
        threshold: limit of the relative L1, positive.
        replay: forwards that compute; empty: the signal decides.

    Raises:
        ValueError: the threshold is not a positive number, or the list does not rise from 0.
    """

    def __init__(self, threshold: float, replay: Sequence[int] = ()) -> None:
        super().__init__(replay)
        self.threshold = _positive(threshold)

    def needs_signal(self, step: int, have_history: bool) -> bool:
        """Whether `decide` will look at a signal for this forward."""
        self._check_step(step)
        return have_history

    def decide(self, step: int, signal: float | None, have_history: bool, *, shape_changed: bool = False) -> Decision:
        """Decide forward `step`.

        Args:
            step: index of the forward within the request, never decreasing.
            signal: relative L1 between this forward's head residual and the last computed one; ignored without history.
            have_history: whether a head and a tail residual of the same shape are held.
            shape_changed: whether history was just dropped because its shape no longer fits.

        Raises:
            SolError: the signal is not a finite number >= 0.
            ValueError: the step is outside the request or went back, or a needed signal is missing.
        """
        self._check_step(step)
        self._last_step = step
        if shape_changed or not have_history:
            # A forward that the list lacks cannot reuse what is not there; the record then differs from the list.
            unlisted: Reason = "shape_change" if shape_changed else "initialize"
            return Decision(step, "compute", "replay" if step in self.replay else unlisted)
        value = _checked_signal(step, signal)
        action, reason = self._verdict(step, value > self.threshold)
        return Decision(step, action, reason, value)


def _positive(threshold: float) -> float:
    if not (math.isfinite(threshold) and threshold > 0):
        raise ValueError(f"the threshold must be a positive number, got {threshold}")
    return threshold


def _polynomial(coefficients: tuple[float, ...], value: float) -> float:
    # Horner's rule in this order: a replay has to reach the same rounding.
    result = 0.0
    for coefficient in coefficients:
        result = result * value + coefficient
    return result


def _checked_signal(step: int, signal: float | None) -> float:
    if signal is None:
        raise ValueError(f"step {step} is decided by its signal, and none was given")
    # A NaN compares false with every threshold: unchecked, it would be reused to the end of the request.
    if not (math.isfinite(signal) and signal >= 0):
        raise SolError(
            f"the cache signal of forward {step} is {signal}",
            needed="a finite relative L1 >= 0",
            remedy="the activations are not finite: check the checkpoint's digests, then run an arm without a cache",
        )
    return signal
