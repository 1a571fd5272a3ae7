"""The safetensors reader, against the safetensors package and against files that lie."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import InvalidRecord, SolError
from tests.verify.builder import save_safetensors
from verify.tensors import read_safetensors, round_bf16, to_f64


def raw(header: object, buffer: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + buffer


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_bf16_and_integers_come_back_as_they_were() -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16),
        "b": np.array([-1, 2**40], np.int64),
        "c": np.array([[7]], np.int32),
        "d": np.empty((0, 3), np.float32),
    }
    found = read_safetensors(save_safetensors(tensors), "x")
    for name, array in tensors.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array), name
    assert to_f64(found["a"]).dtype == np.float64


def test_files_of_the_safetensors_package() -> None:
    package = pytest.importorskip("safetensors.numpy", reason="the safetensors package belongs to the running side")
    tensors = {"a": np.linspace(0, 1, 5, dtype=np.float32), "b": np.arange(4, dtype=np.int64).reshape(2, 2)}
    found = read_safetensors(package.save(tensors, metadata={"x": "y"}), "x")
    assert all(np.array_equal(found[name], array) for name, array in tensors.items()) and len(found) == 2


ONE = json.dumps(entry()).encode()
LIES = {
    "empty": b"",
    "short": b"\0" * 7,
    "header beyond the file": struct.pack("<Q", 1000) + b"{}",
    "huge header": struct.pack("<Q", 2**63) + b"{}",
    "not JSON": raw(b"{]"),
    "not an object": raw([1]),
    "duplicate tensor": raw(b'{"a":' + ONE + b',"a":' + ONE + b"}", b"0000"),
    "offsets beyond the buffer": raw({"a": entry(offsets=(0, 4))}, b"000"),
    "offsets backwards": raw({"a": entry(offsets=(4, 0))}, b"0000"),
    "negative offset": raw({"a": entry(offsets=(-4, 0))}, b"0000"),
    "shape of another size": raw({"a": entry(shape=(2,))}, b"0000"),
    "shape that overflows": raw({"a": entry(shape=(2**31, 2**31, 4))}, b"0000"),
    "negative shape": raw({"a": entry(shape=(-1, -1))}, b"0000"),
    "boolean shape": raw({"a": entry(shape=(True,))}, b"0000"),
    "unknown dtype": raw({"a": entry(dtype="F8_E4M3")}, b"0000"),
    "dtype that is no text": raw({"a": entry(dtype=["F32"])}, b"0000"),
    "extra key": raw({"a": {**entry(), "x": 1}}, b"0000"),
    "gap": raw({"a": entry(offsets=(4, 8))}, b"00000000"),
    "overlap": raw({"a": entry(), "b": entry()}, b"0000"),
    "rest": raw({"a": entry()}, b"00000"),
    "three offsets": raw({"a": entry(offsets=(0, 4, 8))}, b"0000"),
}


@pytest.mark.parametrize("name", LIES)
def test_file_that_lies_is_refused(name: str) -> None:
    with pytest.raises(InvalidRecord, match="^slice"):
        read_safetensors(LIES[name], "slice")


numbers = st.integers(-2, 2**70) | st.booleans() | st.none()
headers = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__"]),
    st.fixed_dictionaries(
        {"dtype": st.sampled_from(["F32", "BF16", "I64", "I32", "F64", 3]),
         "shape": st.lists(numbers | st.integers(0, 3), max_size=4),
         "data_offsets": st.lists(numbers | st.integers(0, 9), min_size=1, max_size=3)}),
    max_size=2,
)  # fmt: skip


@settings(max_examples=500)
@given(st.binary(max_size=80) | st.builds(raw, headers, st.binary(max_size=16)))
def test_reader_ends_in_tensors_or_a_clear_error(data: bytes) -> None:
    try:
        read_safetensors(data, "x")
    except SolError:
        pass


def test_rounding_to_bf16_is_to_nearest_with_ties_to_even() -> None:
    unit = 2.0**-7
    values = np.array([1 + unit / 2, 1 + 1.5 * unit, 1 + 0.51 * unit, -3.0, 0.0])
    assert round_bf16(values).tolist() == [1.0, 1 + 2 * unit, 1 + unit, -3.0, 0.0]
