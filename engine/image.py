"""The container image that this process runs in: what it says of itself, and whether its files are still those.

docker/seal.py writes both at the end of a build. Outside an image there is nothing to read, and nothing differs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from config.canonical import sha256_file

FOLDER = Path("/opt/sol/image")
# Whatever lies here and is not listed was added later, and could be code that Python imports by itself.
CLOSED = Path("/opt/sol")


def image_labels(folder: Path = FOLDER) -> dict[str, str]:
    """The image's labels: source revision, recipe, base and git pins; empty outside an image.

    Raises:
        OSError, ValueError: image.json is there and cannot be read.
    """
    path = folder / "image.json"
    if not path.is_file():
        return {}
    return {str(name): str(value) for name, value in json.loads(path.read_text("utf-8"))["labels"].items()}


def changed_files(folder: Path = FOLDER, closed: Path = CLOSED) -> list[str]:
    """Files that differ from the image's list, are missing, or were added to /opt/sol since; empty outside an image.

    Args:
        folder: where files.sha256 lies, `sha256sum` lines with absolute paths.
        closed: the directory in which every file must be listed, the folder itself excepted.

    Raises:
        OSError: the list cannot be read.
    """
    listed = folder / "files.sha256"
    if not listed.is_file():
        return []
    expected = {path: digest for digest, path in _lines(listed.read_text("utf-8"))}
    changed = [path for path, digest in expected.items() if not _same(Path(path), digest)]
    added = (
        str(Path(place) / name)
        for place, _, names in os.walk(closed)
        if not Path(place).is_relative_to(folder)
        for name in names
        if not (Path(place) / name).is_symlink()
    )
    return sorted([*changed, *(path for path in added if path not in expected)])


def _lines(text: str) -> list[tuple[str, str]]:
    return [(line[:64], line[66:]) for line in text.splitlines()]


def _same(path: Path, digest: str) -> bool:
    try:
        return sha256_file(path) == digest
    except OSError:
        return False
