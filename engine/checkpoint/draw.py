"""The numbers of synthetic weights: each element a pure function of (seed, tensor name, index), on any device.

Philox-4x64-10 (Salmon et al., SC 2011), keyed by the SHA-256 of seed and name, counted as numpy counts it. Integer
arithmetic, one product and one sum, each rounded to float32, give the same bits from numpy and from the Triton kernel.
A shard is a range of indices, so it holds what the whole tensor holds there.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Draw:
    """One tensor of a synthetic checkpoint, before any of it exists.

    seed, name: what its numbers are hashed from; the name holds the component.
    std, mean: of the uniform distribution in [mean - 3**0.5 std, mean + 3**0.5 std).
    values: the elements themselves, float32, for the few tensors that are not random.
    """

    seed: int
    name: str
    shape: Shape
    dtype: torch.dtype
    std: float = 0.0
    mean: float = 0.0
    values: tuple[float, ...] = ()

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def bound(self) -> float:
        """Half of the distribution's width."""
        return self.std * 3.0**0.5

    def tensor(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """All of it on a device, generated there: on CUDA by the kernel, elsewhere by numpy."""
        return self.elements_from(0, self.elements, device).view(self.shape)

    def elements_from(self, first: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Elements [first, first + count) of the flattened tensor, [count], its dtype, on a device.

        Raises:
            ValueError: the range is not inside the tensor.
        """
        if not 0 <= first <= first + count <= self.elements:
            raise ValueError(f"elements {first} to {first + count} of {self.name}, which has {self.elements}")
        device = torch.device(device)
        if self.values:
            return torch.tensor(self.values[first : first + count], dtype=torch.float32).to(device, self.dtype)
        if device.type == "cuda":
            from engine.checkpoint.draw_kernel import draw_on_gpu

            out = torch.empty(count, dtype=self.dtype, device=device)
            draw_on_gpu(out, key(self.seed, self.name), first, self.bound, self.mean)
            return out
        values = uniform(self.seed, self.name, (count,), self.bound, first=first)
        return torch.from_numpy(values + np.float32(self.mean)).to(device, self.dtype)


def key(seed: int, name: str) -> int:
    """The generator's 128-bit key."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")


def uniform(
    seed: int, name: str, shape: Shape, bound: float, *, first: int = 0
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Uniform numbers in [-bound, bound), float32, a pure function of (seed, name, index); `first` is the index of the
    first.

    The top 24 bits of each Philox word make a float32 exactly; the only rounding is the product with `bound`.
    """
    count = math.prod(shape)
    generator = np.random.Philox(key=key(seed, name), counter=first // 4)
    words = generator.random_raw(first % 4 + count)[first % 4 :]
    unit = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    return (unit * np.float32(bound)).reshape(shape)
