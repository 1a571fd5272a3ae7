"""Which attention operator PyTorch really ran: the one it dispatched to, not the one that was hoped for.

``scaled_dot_product_attention`` chooses among several kernels by device, dtype, shape and global switches (SGLang turns
cuDNN's off when it is imported), and what it chose decides by how much a sparse kernel is faster. The choice shows one
level below, as the name of the operator that is dispatched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
# Parts of the names of operators that are attention forwards, PyTorch's own and registered ones alike.
ATTENTION = ("attention", "flash", "fmha", "attn", "::fwd")
SDPA = "aten::scaled_dot_product_attention"
MATH = "aten::_scaled_dot_product_attention_math"  # a composite: what is seen of it is its last softmax
SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, None] = {}
        self.softmaxes = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name == SDPA:  # undivided in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        if any(part in name for part in ATTENTION):
            self.seen[name] = None
        elif name in SOFTMAX:
            self.softmaxes = True
        return func(*args, **kwargs)


@contextmanager
def watch_operators() -> Iterator[list[str]]:
    """Within the block, attention operators are noted; the list is filled when the block ends.

    A plain softmax without any attention operator is noted as PyTorch's math kernel.
    """
    names: list[str] = []
    with _Watch() as watch:
        yield names
    names += watch.seen or ([MATH] if watch.softmaxes else [])


def operators_of(call: Callable[[], T]) -> tuple[T, tuple[str, ...]]:
    """The result of ``call`` and the names of the attention operators that it ran, in the order of their first use,
    e.g. ``aten::_scaled_dot_product_cudnn_attention``. Costs a Python call an operator: not for a timed call."""
    with watch_operators() as names:
        result = call()
    return result, tuple(names)


def sdpa_choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[str, ...]:
    """The operators that SDPA runs for q, k, v [1, T, H, D] with the switches as they are now."""
    tensors = [x.transpose(1, 2) for x in (q, k, v)]
    attention = torch.nn.functional.scaled_dot_product_attention
    return operators_of(lambda: attention(*tensors, scale=scale))[1]
