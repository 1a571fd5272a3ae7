"""Checks of what muxes and decodes a video, by using it: a frame and a tone are encoded."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine.doctor.check import Check, Severity, judged

INSTALL = "apt-get install ffmpeg"
MODULES = {"av": "PyAV", "imageio_ffmpeg": "imageio-ffmpeg"}
"""PyAV decodes the finished video for the record; SGLang encodes through imageio-ffmpeg or ffmpeg."""


def check_media(bad: Severity = Severity.ERROR) -> Iterator[Check]:
    """SGLang muxes H.264 and AAC with ffmpeg and refuses its own result when ffprobe is missing.

    Args:
        bad: how a fault weighs: a target that may do without a video takes it as a warning.
    """
    instead = (
        "" if bad is Severity.ERROR else "; without it the record holds digests of the output tensors and no video"
    )
    missing = [program for program in ("ffmpeg", "ffprobe") if shutil.which(program) is None]
    for program in ("ffmpeg", "ffprobe"):
        found = "not on PATH" if program in missing else str(shutil.which(program))
        yield judged(program, program not in missing, found, "on PATH", INSTALL + instead, bad=bad)
    if not missing:
        yield encode_one_frame(bad, instead)
    for module, name in MODULES.items():
        fault = import_fault(module)
        remedy = f"install the locked {name}: `make demo` does{instead}"
        yield judged(name, not fault, fault or "can be imported", "can be imported", remedy, bad=bad)


def import_fault(module: str) -> str:
    """Why a module cannot be imported; empty when it can."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a library that the extension links is broken
        return f"cannot be imported: {without_folders(str(error))}"
    return ""


def without_folders(text: str) -> str:
    """A message of another program with file names alone: what is found goes into the record, which holds no path."""
    return re.sub(r"(?<!\S)/?(?:[^\s/]+/)+", "", text)


def encode_one_frame(bad: Severity = Severity.ERROR, instead: str = "") -> Check:
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
        needed, remedy = "H.264 with libx264 and AAC", INSTALL + instead
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            return judged("video encoder", False, str(error), needed, remedy, bad=bad)
    lines = done.stderr.strip().splitlines()
    said = without_folders(lines[-1]) if lines else f"code {done.returncode}"
    found = "H.264 and AAC encoded" if done.returncode == 0 else said
    return judged("video encoder", done.returncode == 0, found, needed, remedy, bad=bad)
