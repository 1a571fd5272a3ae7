"""TeaCache over a block stack: the change of block 0's modulated input decides whether the whole stack runs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.cache.base import (
    AllReduce,
    Block,
    Record,
    ResidualCache,
    difference_into,
    local_sums,
    relative_l1,
    snapshot,
)
from engine.cache.decision import Decision, TeaCachePolicy

Probe = Callable[..., Tensor]
"""`(hidden, **kwargs) -> probe`, called with block 0's own arguments; the result shares no memory with `hidden`."""


class TeaCache(ResidualCache[TeaCachePolicy]):
    """Runs all blocks, or none and adds the residual (output minus input of the stack) of the last computed forward.

    The probe is computed, and replaced, on every forward: the signals are consecutive differences.

    Memory, in tensors of the hidden state's size [T, H] (38,272 x 5,376 BF16 = 0.41 GB on one GPU at the published
    size), beside what the blocks use: 2 between forwards (probe, residual); 4 for the moment of the signal (both
    probes, residual, one difference); 2 while the blocks run (probe, the stack's input, which becomes the residual in
    place). A reuse allocates its result.

    Args:
        policy: decides each forward.
        probe: the signal's source; for H3 `engine.cache.h3_probe.first_block_probe`.
        all_reduce: sums the signal's two sums over the ranks.
        on_decision: called with every decision, before any block runs on it.
    """

    def __init__(
        self,
        policy: TeaCachePolicy,
        probe: Probe,
        *,
        all_reduce: AllReduce = local_sums,
        on_decision: Callable[[Decision], None] | None = None,
    ) -> None:
        super().__init__(policy, all_reduce=all_reduce, on_decision=on_decision)
        self._probe = probe
        self._clear()

    def _clear(self) -> None:
        self._previous_probe: Tensor | None = None
        self._residual: Tensor | None = None

    def _first(
        self, step: int, block: Block, hidden: Tensor, kwargs: dict[str, object]
    ) -> tuple[Tensor, Record | None]:
        decision = self._decide(step, self._probe(hidden, **kwargs).detach())
        if decision.action == "reuse":
            assert self._residual is not None
            return hidden + self._residual, None
        # A residual that is about to be replaced need not stay beside the running blocks.
        self._residual = None
        stack_input = snapshot(hidden)

        def record(output: Tensor) -> None:
            self._residual = difference_into(output, stack_input)

        return block(hidden, **kwargs), record

    def _decide(self, step: int, probe: Tensor) -> Decision:
        previous = self._previous_probe
        have_history = previous is not None and self._residual is not None
        signal = None
        if self._policy.needs_signal(step, have_history):
            assert previous is not None
            signal = relative_l1(probe, previous, self._all_reduce)
        decision = self._policy.decide(step, signal, have_history)
        self._previous_probe = probe
        self._report(decision)
        return decision
