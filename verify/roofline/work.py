"""Operations, stages, and the least time that a GPU needs for them.

FLOPs are those of matrix products and convolutions, two for each multiplication with its addition; elementwise work
has none. Bytes are what device memory must see: a product reads both factors and writes its result once; a chain of
elementwise steps between two products reads each tensor once and writes each result once, however many kernels it is
spread over. Work that is fused into a product can therefore stay below a floor, and nothing else can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from config.ceilings import Ceilings

Precision = Literal["half", "tf32", "fp32"]
Kind = Literal["attention", "linear", "rest"]
Bound = Literal["products", "memory", "PCIe", "NVLink"]
HALF, SINGLE = 2, 4
"""Bytes of an element."""


@dataclass(frozen=True)
class Operation:
    """`count` equal operations of one GPU, one after the other; flops and bytes are those of one."""

    name: str
    kind: Kind
    flops: float
    bytes: float
    precision: Precision = "half"
    count: float = 1


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU receives from elsewhere.

    host: over PCIe, fetched ahead. gathered: weights from other GPUs, fetched ahead. exchanged: activations from other
    GPUs, waited for: what follows needs them.
    """

    host: float = 0
    gathered: float = 0
    exchanged: float = 0


@dataclass(frozen=True)
class Stage:
    """What one GPU does in one stage. `gpus` do the same at the same time, each its part."""

    name: str
    operations: tuple[Operation, ...]
    traffic: Traffic = Traffic()
    gpus: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of one GPU."""
        return math.fsum(operation.flops * operation.count for operation in self.operations)

    @property
    def bytes(self) -> float:
        """Bytes of one GPU's memory."""
        return math.fsum(operation.bytes * operation.count for operation in self.operations)

    @property
    def parts(self) -> dict[tuple[Kind, str], Stage]:
        """The operations by kind and name, attention first, then linear layers, then the rest; without traffic."""
        keys = dict.fromkeys((entry.kind, entry.name) for entry in self.operations)
        ordered = sorted(keys, key=lambda key: ("attention", "linear", "rest").index(key[0]))
        return {
            key: Stage(key[1], tuple(e for e in self.operations if (e.kind, e.name) == key), gpus=self.gpus)
            for key in ordered
        }


@dataclass(frozen=True)
class Floor:
    """The least time of a stage, seconds.

    seconds: every operation at the larger of its products' and its memory's time, one after the other, and then the
    exchanges; at least the time of what is fetched ahead. bound: what most of it is. reachable: the same with attention
    at the rate of the fastest dense kernel seen, where one is known.
    """

    seconds: float
    bound: Bound
    reachable: float | None

    def share(self, measured: float) -> float:
        """Floor over measured time: 1 is the floor itself."""
        return self.seconds / measured


def linear(
    name: str,
    rows: float,
    shape: tuple[int, int],
    *,
    bias: bool = False,
    precision: Precision = "half",
    output: int | None = None,
    count: float = 1,
    kind: Kind = "linear",
) -> Operation:
    """A product [rows, inputs] x [inputs, outputs]; `output` is the bytes of a result's element where it differs."""
    inputs, outputs = shape
    element = HALF if precision == "half" else SINGLE
    read = rows * inputs + (inputs + bias) * outputs
    return Operation(
        name,
        kind,
        2 * rows * inputs * outputs,
        element * read + (element if output is None else output) * rows * outputs,
        precision,
        count,
    )


def elementwise(name: str, values: float, element: int = HALF, count: float = 1) -> Operation:
    """A chain of elementwise steps that reads and writes `values` elements in all."""
    return Operation(name, "rest", 0, element * values, count=count)


def floor(stage: Stage, ceilings: Ceilings) -> Floor:
    """The least time of a stage on GPUs with these ceilings.

    Raises:
        ValueError: GPUs exchange bytes, and the ceilings have no link.
    """
    traffic, bandwidth = stage.traffic, ceilings.gb_s
    if traffic.exchanged + traffic.gathered > 0 and bandwidth.link is None:
        raise ValueError(f"{stage.name}: GPUs exchange bytes, and no ceiling of their link is known")
    link = 1e9 * bandwidth.link.value if bandwidth.link is not None else math.inf
    times = [_seconds(entry, ceilings) for entry in stage.operations]
    busy = {
        "products": math.fsum(products for products, memory in times if products >= memory),
        "memory": math.fsum(memory for products, memory in times if memory > products),
    }
    chain = math.fsum(busy.values()) + traffic.exchanged / link
    ahead = {
        "PCIe": traffic.host / (1e9 * bandwidth.host.value),
        "NVLink": (traffic.gathered + traffic.exchanged) / link,
    }
    seconds = max(chain, *ahead.values())
    bounds: dict[Bound, float] = {"products": busy["products"], "memory": busy["memory"]}
    if seconds > chain:
        bounds = {"PCIe": ahead["PCIe"], "NVLink": ahead["NVLink"]}
    return Floor(
        seconds=seconds,
        bound=max(bounds, key=lambda name: bounds[name]),
        reachable=_reachable(stage, times, ceilings, seconds, chain),
    )


def _seconds(operation: Operation, ceilings: Ceilings) -> tuple[float, float]:
    rate = {"half": ceilings.tflops.half, "tf32": ceilings.tflops.tf32, "fp32": ceilings.tflops.fp32}
    products = operation.flops / (1e12 * rate[operation.precision].value)
    memory = operation.bytes / (1e9 * ceilings.gb_s.memory.value)
    return products * operation.count, memory * operation.count


def _reachable(
    stage: Stage, times: list[tuple[float, float]], ceilings: Ceilings, seconds: float, chain: float
) -> float | None:
    kernel = ceilings.tflops.attention
    if kernel is None:
        return None
    slower = ceilings.tflops.half.value / kernel.value
    more = math.fsum(
        max(products * slower, memory) - max(products, memory)
        for entry, (products, memory) in zip(stage.operations, times, strict=True)
        if entry.kind == "attention" and entry.precision == "half"
    )
    return max(seconds, chain + more)
