"""Decoded frames of two videos, compared."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np


def luma(path: Path, width: int = 448, height: int = 256) -> np.ndarray:
    """All frames' luma, float64 [frames, height, width], through ffmpeg."""
    raw = subprocess.run(
        ["ffmpeg", "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "gray", "-"],
        check=True,
        capture_output=True,
    ).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width).astype(np.float64)


def psnr(one: Path, other: Path) -> float:
    """Peak signal-to-noise ratio of the luma, dB; infinite for equal frames."""
    a, b = luma(one), luma(other)
    assert a.shape == b.shape
    error = float(((a - b) ** 2).mean())
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))
