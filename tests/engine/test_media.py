"""What is observed in a video, against ffmpeg's own decoder."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.media import observe_media

needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="ffmpeg is not on PATH")


def make(path: Path, *extra: str) -> None:
    command = ["ffmpeg", "-v", "error", "-f", "lavfi", "-i", "testsrc=size=98x66:rate=24", "-f", "lavfi"]
    command += ["-i", "sine=frequency=440:sample_rate=32000", "-t", "0.5", "-c:v", "libx264", "-pix_fmt", "yuv420p"]
    subprocess.run([*command, "-c:a", "aac", "-ac", "2", *extra, str(path)], check=True)


@needs_ffmpeg
def test_frames_are_digested_without_row_padding(tmp_path: Path) -> None:
    path = tmp_path / "out.mp4"
    make(path)
    media = observe_media(path)
    raw = subprocess.run(
        ["ffmpeg", "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "yuv420p", "-"],
        check=True,
        capture_output=True,
    ).stdout
    assert media.frames_sha256 == hashlib.sha256(raw).hexdigest()
    assert (media.width, media.height, media.frames, media.fps) == (98, 66, 12, 24.0)
    assert (media.video_codec, media.audio_codec, media.audio_sample_rate, media.audio_channels) == (
        "h264",
        "aac",
        32000,
        2,
    )
    assert media.duration_seconds == 0.5
    assert media.audio_seconds == pytest.approx(0.5, abs=0.07)  # AAC frames have 1,024 samples


@needs_ffmpeg
def test_a_silent_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "silent.mp4"
    make(path, "-an")
    with pytest.raises(ValueError, match="0 audio streams"):
        observe_media(path)
