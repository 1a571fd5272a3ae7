"""Errors say what was found, what was needed and what to do, and survive the way between processes."""

from __future__ import annotations

import pickle

import pytest

from config import errors
from config.errors import Exit, SolError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SolError)]


def test_exit_codes_are_the_documented_ones() -> None:
    assert {code.name: int(code) for code in Exit} == {
        "PASSED": 0,
        "FAILED": 1,
        "USAGE": 2,
        "ENVIRONMENT": 10,
        "CHECKPOINT": 11,
        "GATE": 12,
        "INVALID_RECORD": 13,
        "UNTRUSTED": 14,
        "INTERRUPTED": 130,
    }


def test_each_code_but_passed_has_one_error() -> None:
    assert sorted(int(kind.exit_code) for kind in KINDS) == sorted(int(code) for code in Exit if code)


@pytest.mark.parametrize("kind", KINDS)
def test_text_and_pickle(kind: type[SolError]) -> None:
    error = kind("no ffprobe", needed="ffprobe on PATH", remedy="apt-get install ffmpeg")
    assert str(error) == "no ffprobe\n  needed: ffprobe on PATH\n  remedy: apt-get install ffmpeg"
    assert str(kind("no ffprobe")) == "no ffprobe"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) and again.exit_code == error.exit_code
