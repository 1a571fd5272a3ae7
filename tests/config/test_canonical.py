"""Canonical JSON against the literal vectors of RFC 8785."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from config.canonical import canonical_json, sha256_bytes, sha256_file, sha256_json


def test_sample_object() -> None:
    """Section 3.2.2 and 3.2.4: input and the UTF-8 bytes of the result."""
    value = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"/",
        "literals": [None, True, False],
    }
    expected = bytes.fromhex(
        "7b226c69746572616c73223a5b6e756c6c2c747275652c66616c73655d2c226e"
        "756d62657273223a5b3333333333333333332e333333333333332c31652b3330"
        "2c342e352c302e3030322c31652d32375d2c22737472696e67223a22e282ac24"
        "5c75303030665c6e4127425c225c5c5c5c5c222f227d"
    )
    assert canonical_json(value) == expected


def test_keys_are_sorted_by_utf16_code_units() -> None:
    """Section 3.2.3."""
    value = {
        "\u20ac": "Euro Sign",
        "\r": "Carriage Return",
        "\ufb33": "Hebrew Letter Dalet With Dagesh",
        "1": "One",
        "\U0001f600": "Emoji: Grinning Face",
        "\u0080": "Control",
        "\u00f6": "Latin Small Letter O With Diaeresis",
    }
    assert list(json.loads(canonical_json(value)).values()) == [
        "Carriage Return",
        "One",
        "Control",
        "Latin Small Letter O With Diaeresis",
        "Euro Sign",
        "Emoji: Grinning Face",
        "Hebrew Letter Dalet With Dagesh",
    ]


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("c340000000000000", "-9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
    ],
)
def test_numbers(bits: str, expected: str) -> None:
    """Appendix B: IEEE 754 bits and their JSON form."""
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json(value) == expected.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 2**53, object()])
def test_what_has_no_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(rfc8785.CanonicalizationError):
        canonical_json(value)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(-(2.0**53) + 1, 2.0**53 - 1)
    | st.text('aé\n"\\'),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text("abé", max_size=3), children, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_reads_back_equal_and_is_stable(value: object) -> None:
    """Beyond 2**53 a float reads back as an integer that has no canonical form; no value of a lock is that large."""
    data = canonical_json(value)
    assert json.loads(data) == value
    assert canonical_json(json.loads(data)) == data


def test_digests(tmp_path: Path) -> None:
    """SHA-256 of FIPS 180-4's example, and of a canonical object by hand."""
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_bytes(b"abc") == sha256_file(tmp_path / "abc") == digest
    assert sha256_json({"b": 1.0, "a": [True]}) == hashlib.sha256(b'{"a":[true],"b":1}').hexdigest()
