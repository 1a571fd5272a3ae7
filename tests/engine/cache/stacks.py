"""Fake block stacks: each block exists out of place and in place, and counts its calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.cache.base import Block, BlockStackCache

ROWS, WIDTH = 24, 16


class CountingBlock:
    """hidden + tanh(hidden @ weight + time) in BF16; in place it returns its argument, like SGLang's blocks on CUDA."""

    def __init__(self, weight: Tensor, in_place: bool) -> None:
        self.weight = weight
        self.in_place = in_place
        self.calls = 0

    def __call__(self, hidden: Tensor, *, time: float) -> Tensor:
        self.calls += 1
        update = torch.tanh(hidden.float() @ self.weight + time).to(hidden.dtype)
        return hidden.add_(update) if self.in_place else hidden + update


def make_blocks(count: int, *, in_place: bool = False, seed: int = 0) -> list[CountingBlock]:
    generator = torch.Generator().manual_seed(seed)
    return [CountingBlock(torch.randn(WIDTH, WIDTH, generator=generator) * 0.3, in_place) for _ in range(count)]


def make_inputs(forwards: int, *, seed: int = 1, drift: float = 0.02, rows: int = ROWS) -> list[Tensor]:
    """A slowly drifting BF16 hidden state a forward, like a denoising trajectory."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, WIDTH, generator=generator)
    inputs = []
    for _ in range(forwards):
        inputs.append(hidden.bfloat16())
        hidden = hidden + drift * torch.randn(rows, WIDTH, generator=generator)
    return inputs


def run_stack(blocks: Iterator[Block] | Sequence[Block], hidden: Tensor, step: int) -> Tensor:
    """SGLang's own loop: each block is called before the next is asked for."""
    for _index, block in enumerate(blocks):
        hidden = block(hidden, time=0.01 * step)
    return hidden


def run_request(cache: BlockStackCache, blocks: Sequence[Block], inputs: Sequence[Tensor]) -> list[Tensor]:
    cache.begin_request(len(inputs))
    outputs = []
    for step, hidden in enumerate(inputs):
        outputs.append(run_stack(cache.forward_blocks(step, blocks), hidden.clone(), step).clone())
    cache.end_request()
    return outputs


def run_plain(blocks: Sequence[Block], inputs: Sequence[Tensor]) -> list[Tensor]:
    return [run_stack(blocks, hidden.clone(), step).clone() for step, hidden in enumerate(inputs)]


def equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
