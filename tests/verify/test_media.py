"""Decoding videos again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import InvalidRecord, SolError
from tests.verify.builder import media_of, video
from verify.media import probe

SMALL = (62, 34, 5, 24)  # no multiple of 16 or 64: planes are padded inside the decoder


@pytest.mark.parametrize("size", [SMALL, (64, 64, 12, 24), (448, 256, 39, 24)])
def test_equals_what_another_way_of_decoding_finds(size: tuple[int, int, int, int]) -> None:
    data = video(*size, 3)
    found, wanted = probe(data, "x").model_dump(), media_of(data)
    assert abs(found.pop("audio_seconds") - wanted.pop("audio_seconds")) < 1e-9  # type: ignore[operator]
    assert found == {key: value for key, value in wanted.items() if key != "audio_seconds"}


def test_frames_of_other_pictures_have_another_digest() -> None:
    assert probe(video(*SMALL, 1), "x").frames_sha256 != probe(video(*SMALL, 2), "x").frames_sha256


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"GIF89a" + b"\0" * 50, video(*SMALL, 1)[:400]])
def test_what_is_no_video_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRecord, match="^x"):
        probe(data, "x")


def test_video_without_sound_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="streams"):
        probe(video(*SMALL, 1, audio=False), "x")


def test_decoder_that_crashes_takes_nobody_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: one damaged file in some hundreds ended the verifier with SIGSEGV. Cause: FFmpeg's C code ran in it."""
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr("verify.media.PROGRAM", crash)
    with pytest.raises(InvalidRecord, match="x cannot be decoded: the decoder was ended by signal 11"):
        probe(video(*SMALL, 1), "x")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_damaged_video_ends_in_a_digest_or_a_clear_error(data: st.DataObject) -> None:
    good = bytearray(video(*SMALL, 1))
    for _ in range(data.draw(st.integers(1, 8))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        probe(bytes(good), "x")
    except SolError:
        pass
