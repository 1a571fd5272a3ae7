"""Checks of ffmpeg and ffprobe, by using them: a frame and a tone are encoded and probed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine.doctor.check import Check, judged

INSTALL = "apt-get install ffmpeg"


def check_media() -> Iterator[Check]:
    """SGLang muxes H.264 and AAC with ffmpeg and refuses its own result when ffprobe is missing."""
    missing = [program for program in ("ffmpeg", "ffprobe") if shutil.which(program) is None]
    for program in ("ffmpeg", "ffprobe"):
        found = "not on PATH" if program in missing else str(shutil.which(program))
        yield judged(program, program not in missing, found, "on PATH", INSTALL)
    if not missing:
        yield encode_one_frame()


def encode_one_frame() -> Check:
    """Whether libx264 and the AAC encoder are there and work."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "probe.mp4"
        command = [
            "ffmpeg",
            "-v",
            "error",
            "-f",
            "lavfi",
            "-i",
            "color=size=64x64:rate=24",
            "-f",
            "lavfi",
            "-i",
            "sine",
        ]
        command += ["-t", "0.1", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-c:a", "aac", str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            return judged("video encoder", False, str(error), "H.264 with libx264 and AAC", INSTALL)
    lines = done.stderr.strip().splitlines()
    found = "H.264 and AAC encoded" if done.returncode == 0 else (lines[-1] if lines else f"code {done.returncode}")
    return judged("video encoder", done.returncode == 0, found, "H.264 with libx264 and AAC", INSTALL)
