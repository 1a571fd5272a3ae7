"""What both caches share: the interface to the block-stack seam, the signal, and the life of a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.cache.decision import CachePolicy, Decision

Policy = TypeVar("Policy", bound=CachePolicy)

Block = Callable[..., Tensor]
"""`(hidden, **kwargs) -> hidden` with hidden [T, H]; the result may be the argument itself, updated in place."""

AllReduce = Callable[[Tensor], Tensor]
"""Takes an FP32 tensor of two local sums and returns their sums over all ranks."""

Record = Callable[[Tensor], None]
"""Takes the output of the block stack in a forward that computes."""


class BlockStackCache(Protocol):
    """What the block-stack seam needs of a cache: it replaces the iteration over the blocks of a DiT."""

    def begin_request(self, num_forwards: int, *, compute_last: bool = False) -> None:
        """Start a request of `num_forwards` DiT forwards with no state of an earlier one.

        With `compute_last` its last forward computes, whatever the cache would decide.
        """

    def forward_blocks(self, step: int, blocks: Sequence[Block]) -> Iterator[Block]:
        """The callables of forward `step`, to be called in order, each before the next is asked for.

        Callable k stands for block k and expects block k's keyword arguments. There are at most as many callables as
        blocks; a block that is skipped is never called, so its hooks do not fire.
        """

    def end_request(self) -> None:
        """Release everything that the request held."""


def local_sums(sums: Tensor) -> Tensor:
    """The `AllReduce` of a single rank."""
    return sums


@torch.no_grad()
def relative_l1(current: Tensor, previous: Tensor, all_reduce: AllReduce) -> float:
    """The published signal: sum |current - previous| / max(sum |previous|, 1e-8).

    The difference is taken in the tensors' own dtype (BF16 for H3), the absolute values are summed in FP32. Reading the
    ratio waits for the device. Holds one tensor of the arguments' size at a time beside them.

    Args:
        current, previous: the same shape and dtype; under sequence parallelism the rows of this rank.
        all_reduce: sums the two sums over the ranks, so that all of them see one number and take one branch.

    Raises:
        ValueError: the shapes differ.
    """
    if current.shape != previous.shape:
        raise ValueError(
            f"the probe's shape changed within a request from {tuple(previous.shape)} to {tuple(current.shape)}"
        )
    change = (current - previous).abs_().sum(dtype=torch.float32)
    size = previous.abs().sum(dtype=torch.float32)
    sums = all_reduce(torch.stack((change, size)))
    return float((sums[0] / sums[1].clamp_min(1e-8)).item())


@torch.no_grad()
def snapshot(hidden: Tensor) -> Tensor:
    """A clone of `hidden` that an in-place block cannot reach."""
    return hidden.detach().clone()


@torch.no_grad()
def difference_into(minuend: Tensor, own: Tensor) -> Tensor:
    """`minuend - own`, rounded once in their dtype, written into `own` so that no third tensor is allocated."""
    return torch.sub(minuend.detach(), own, out=own)


class ResidualCache(ABC, Generic[Policy]):
    """A cache that, where it reuses, adds a residual of an earlier forward instead of running blocks.

    Args:
        policy: decides each forward.
        all_reduce: see `relative_l1`; a single rank by default.
        on_decision: called with every decision as soon as it is taken, before any block runs on it.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        all_reduce: AllReduce = local_sums,
        on_decision: Callable[[Decision], None] | None = None,
    ) -> None:
        self._policy = policy
        self._all_reduce = all_reduce
        self._on_decision = on_decision
        self._in_request = False

    def begin_request(self, num_forwards: int, *, compute_last: bool = False) -> None:
        """Start a request of `num_forwards` DiT forwards; whatever an earlier request left is dropped, ended or not."""
        self._clear()
        self._policy.begin_request(num_forwards, compute_last=compute_last)
        self._in_request = True

    def end_request(self) -> None:
        """Release the tensors that the request held."""
        self._clear()
        self._in_request = False

    def forward_blocks(self, step: int, blocks: Sequence[Block]) -> Iterator[Block]:
        """See `BlockStackCache.forward_blocks`. The first callable takes the decision.

        An iteration that is abandoned before its first callable ran changes nothing. One that is abandoned later, in a
        forward that computes, leaves no history, so the next forward computes.

        Raises:
            RuntimeError: no request was begun; or, while iterating, the first callable was passed over.
            ValueError: there are no blocks.
        """
        if not self._in_request:
            raise RuntimeError("forward_blocks() outside a request; call begin_request() first")
        if not blocks:
            raise ValueError("the block stack is empty")
        return self._iterate(step, blocks)

    def _iterate(self, step: int, blocks: Sequence[Block]) -> Iterator[Block]:
        last = len(blocks) - 1
        decided = False
        record: Record | None = None

        def first(hidden: Tensor, **kwargs: object) -> Tensor:
            nonlocal decided, record
            hidden, record = self._first(step, blocks[0], hidden, kwargs)
            decided = True
            if record is not None and last == 0:
                record(hidden)
            return hidden

        def final(hidden: Tensor, **kwargs: object) -> Tensor:
            hidden = blocks[last](hidden, **kwargs)
            assert record is not None
            record(hidden)
            return hidden

        yield first
        if not decided:
            raise RuntimeError("the first block of the iteration was not called, so nothing was decided")
        # SGLang hands callable k the AdaLN parameters of block k: insert none, append none.
        if record is not None and last > 0:
            yield from blocks[1:last]
            yield final

    @abstractmethod
    def _first(
        self, step: int, block: Block, hidden: Tensor, kwargs: dict[str, object]
    ) -> tuple[Tensor, Record | None]:
        """Decide forward `step` on the stack's input and run or replace its first block.

        Returns the hidden state and, where the other blocks are to run, what to call with the stack's output.
        """

    @abstractmethod
    def _clear(self) -> None: ...

    def _report(self, decision: Decision) -> None:
        if self._on_decision is not None:
            self._on_decision(decision)
