"""Safetensors files as numpy arrays, read with every bound checked. BF16 comes as ml_dtypes.bfloat16.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then one buffer that
the tensors fill without gap or overlap (https://huggingface.co/docs/safetensors, "Format"). The safetensors package
hands numpy no BF16.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from config.errors import InvalidRecord
from verify.strictjson import REMEDY, parse

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]
DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
MAX_HEADER = 1 << 20


def read_safetensors(data: bytes, where: str) -> dict[str, Array]:
    """The tensors of a file by name, as read-only arrays over `data`.

    Raises:
        InvalidRecord: the header is not what the format says, or a tensor has another dtype than BF16, F32, I32 or I64.
    """

    def refuse(reason: str) -> InvalidRecord:
        return InvalidRecord(f"{where} is not a safetensors file that can be judged: {reason}", remedy=REMEDY)

    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(MAX_HEADER, len(data) - 8):
        raise refuse(f"header length {length} in a file of {len(data)} bytes")
    header = parse(data[8 : 8 + length], f"{where}, header")
    if not isinstance(header, dict):
        raise refuse("the header is not an object")
    header.pop("__metadata__", None)
    buffer = memoryview(data)[8 + length :]
    spans: list[tuple[int, int]] = []
    tensors: dict[str, Array] = {}
    for name, entry in header.items():
        dtype, shape, (begin, end) = _entry(entry, lambda reason, name=name: refuse(f"tensor {name!r}: {reason}"))
        if not begin <= end <= len(buffer) or end - begin != math.prod(shape) * dtype.itemsize:
            raise refuse(f"tensor {name!r}: offsets {begin}..{end} do not hold {dtype} {list(shape)}")
        spans.append((begin, end))
        tensors[name] = np.frombuffer(buffer[begin:end], dtype).reshape(shape)
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise refuse(f"a gap or an overlap at byte {position} of the buffer")
        position = end
    if position != len(buffer):
        raise refuse(f"{len(buffer) - position} bytes behind the last tensor")
    return tensors


def _entry(entry: Any, refuse: Any) -> tuple[np.dtype[Any], tuple[int, ...], tuple[int, int]]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refuse("needs dtype, shape and data_offsets, and nothing else")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise refuse(f"dtype {entry['dtype']!r}; needed: one of {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
            raise refuse(f"{what} {numbers!r} is not a list of whole numbers")
    if len(shape) > 8 or len(offsets) != 2:
        raise refuse("more than 8 dimensions, or not two offsets")
    return dtype, tuple(shape), (offsets[0], offsets[1])


def to_f64(array: Array) -> F64:
    """Any of the dtypes above as float64."""
    return array.astype(np.float64)


def round_bf16(array: F64) -> F64:
    """Values as BF16 would store them (to nearest, ties to even), still in float64."""
    return array.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
