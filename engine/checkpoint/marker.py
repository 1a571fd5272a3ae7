"""What was verified already, so that a start does not hash 144 GB again.

A file counts as unchanged while size, modification time (nanoseconds) and inode are what they were when its digest was
taken. Who wants certainty against somebody who sets times back asks for `--rehash`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pydantic import Field, ValidationError

from config.canonical import sha256_bytes
from config.record import CheckpointFile
from config.schema import Model, Sha256
from engine.checkpoint.hashing import Digest
from engine.evidence import write_model

STATE = ".sol-fetch"
"""Folder beside the partition: the hub's listing, the marker, part files, the lock."""


class Seen(Model):
    """One file as it was when it was hashed."""

    bytes: int
    mtime_ns: int
    inode: int
    sha256: Sha256
    git_oid: str = ""


class Marker(Model):
    """`verified.json`: by path relative to the checkpoint's root."""

    schema_version: int = Field(default=1, ge=1, le=1)
    files: dict[str, Seen] = {}

    def digest(self, root: Path, path: str) -> Digest | None:
        """The recorded digest of a file, or None where it is unknown or the file has changed since."""
        seen = self.files.get(path)
        if seen is None:
            return None
        found = (root / path).stat()
        if (found.st_size, found.st_mtime_ns, found.st_ino) != (seen.bytes, seen.mtime_ns, seen.inode):
            return None
        return Digest(seen.sha256, seen.git_oid)


def seen(found: Digest, before: os.stat_result) -> Seen:
    """The entry of a file that was just hashed. `before`: its stat from before, so that a change meanwhile shows."""
    return Seen(
        bytes=before.st_size,
        mtime_ns=before.st_mtime_ns,
        inode=before.st_ino,
        sha256=found.sha256,
        git_oid=found.git_oid,
    )


def places(root: Path, cache: Path, name: str) -> tuple[Path, Path]:
    """Where a state file may lie: beside the checkpoint, or in the cache for one on a read-only mount."""
    return root / STATE / f"{name}.json", cache / "read-only" / sha256_bytes(
        str(root.resolve()).encode()
    ) / f"{name}.json"


def read(root: Path, cache: Path) -> Marker:
    """The marker of a checkpoint; an empty one where there is none or where it cannot be understood."""
    for place in places(root, cache, "verified"):
        with contextlib.suppress(OSError, ValidationError):
            return Marker.model_validate_json(place.read_bytes())
    return Marker()


def keep(root: Path, cache: Path, name: str, model: Model) -> bool:
    """Keep a state file, beside the checkpoint or else in the cache; False where neither can be written."""
    for place in places(root, cache, name):
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_model(place, model)
            return True
    return False


def files(marker: Marker, paths: list[str]) -> tuple[CheckpointFile, ...]:
    """The record's form of verified files, sorted by path."""
    return tuple(
        CheckpointFile(path=path, bytes=marker.files[path].bytes, sha256=marker.files[path].sha256)
        for path in sorted(paths)
    )
