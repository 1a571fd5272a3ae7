"""FirstBlockCache over a block stack: block 0 always runs, and the change of its residual decides about the others."""

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
from engine.cache.decision import Decision, FirstBlockCachePolicy


class FirstBlockCache(ResidualCache[FirstBlockCachePolicy]):
    """Runs block 0, then the other blocks, or adds the tail residual of the last computed forward in their place.

    The tail residual is the stack's output minus block 0's. The head residual (block 0's output minus its input) is
    compared with that of the last computed forward, and both residuals are replaced together.

    Memory, in tensors of the hidden state's size [T, H] (38,272 x 5,376 BF16 = 0.41 GB at the published size, a quarter
    of it on each of four Ulysses ranks), beside what the blocks use: 2 between forwards (head, tail); 3 while block 0
    runs (and its input, which becomes the new head residual in place); 4 for the moment of the signal (one difference);
    2 while the other blocks run (new head, block 0's output, which becomes the tail in place).
    A reuse allocates its result.

    Args:
        policy: decides each forward.
        all_reduce: sums the signal's two sums over the ranks.
        on_decision: called with every decision, before blocks 1.. run on it.
    """

    def __init__(
        self,
        policy: FirstBlockCachePolicy,
        *,
        all_reduce: AllReduce = local_sums,
        on_decision: Callable[[Decision], None] | None = None,
    ) -> None:
        super().__init__(policy, all_reduce=all_reduce, on_decision=on_decision)
        self._clear()

    def _clear(self) -> None:
        self._head: Tensor | None = None
        self._tail: Tensor | None = None

    def _first(
        self, step: int, block: Block, hidden: Tensor, kwargs: dict[str, object]
    ) -> tuple[Tensor, Record | None]:
        block_input = snapshot(hidden)
        hidden = block(hidden, **kwargs)
        head = difference_into(hidden, block_input)
        decision = self._decide(step, head)
        if decision.action == "reuse":
            assert self._tail is not None
            return hidden + self._tail, None
        # Residuals that are about to be replaced need not stay beside the running blocks.
        self._clear()
        head_output = snapshot(hidden)

        def record(output: Tensor) -> None:
            self._head, self._tail = head, difference_into(output, head_output)

        return hidden, record

    def _decide(self, step: int, head: Tensor) -> Decision:
        shape_changed = self._head is not None and self._head.shape != head.shape
        if shape_changed:
            self._clear()
        signal = None
        if self._policy.needs_signal(step, self._head is not None):
            assert self._head is not None
            signal = relative_l1(head, self._head, self._all_reduce)
        decision = self._policy.decide(step, signal, self._head is not None, shape_changed=shape_changed)
        self._report(decision)
        return decision
