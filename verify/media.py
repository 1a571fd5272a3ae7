"""What is really inside an mp4: decoded with PyAV, in a process that may crash without harm."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from config.errors import InvalidRecord
from config.record import Media
from verify.strictjson import parse, parse_model

ROOT = str(Path(__file__).resolve().parent.parent)
# Isolated from the environment, but with our own search path: PyAV is where we found it.
PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from verify.decoder import main; main()"
PATIENCE = 1800.0  # seconds; a minute of 1344x768 decodes in a few
REMEDY = "take the file as it was written"


class MediaUnavailable(Exception):
    """PyAV is not installed; the message says how to get it."""


def probe(data: bytes, where: str) -> Media:
    """Decode every frame and every audio sample of an mp4.

    Raises:
        MediaUnavailable: PyAV is not installed.
        InvalidRecord: the bytes cannot be decoded, or are not one yuv420p video and one audio stream of a sane size.
    """
    if importlib.util.find_spec("av") is None:
        raise MediaUnavailable("PyAV is not installed: pip install 'sol-h3[media]'")
    command = [sys.executable, "-I", "-c", PROGRAM, json.dumps([ROOT, *sys.path])]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise InvalidRecord(f"{where} cannot be decoded: it takes for ever", remedy=REMEDY) from None
    if done.returncode:
        how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise InvalidRecord(f"{where} cannot be decoded: the decoder {how} {' '.join(last)}".rstrip(), remedy=REMEDY)
    found = parse(done.stdout, f"{where}, decoded")
    if isinstance(found, dict) and "fault" in found:
        raise InvalidRecord(f"{where} {found['fault']}", remedy=REMEDY)
    media: Media = parse_model(Media, done.stdout, f"{where}, decoded")
    return media
