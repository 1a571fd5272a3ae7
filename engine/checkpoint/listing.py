"""What a published partition consists of: the hub's listing at the pinned revision, held against the shipped list."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, ValidationError, field_validator

from config.checkpoint import ManifestEntry, entry_for, of_partition
from config.errors import CheckpointError
from config.schema import Checkpoint, Model, Sha256
from engine.checkpoint.hashing import Digest
from engine.checkpoint.marker import STATE, places

PROBE = "model_index.json"
"""Small, and first of every diffusers pipeline: asked for before anything large."""


class RemoteFile(Model):
    """One file as the hub describes it. `sha256` for files in large-file storage, `git_oid` for the others."""

    path: str
    bytes: int = Field(ge=0)
    sha256: Sha256 | None
    git_oid: str | None
    xet_hash: str | None

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        parts = PurePosixPath(path).parts
        if path.startswith("/") or ".." in parts or STATE in parts or not path.isprintable():
            raise ValueError("a path outside the checkpoint")
        return path

    def is_content(self, digest: Digest) -> bool:
        """Whether a file with this digest is the one described; one without any digest is never that."""
        if self.sha256 is not None:
            return digest.sha256 == self.sha256
        return self.git_oid is not None and digest.git_oid == self.git_oid

    @property
    def content(self) -> str:
        """A name for the content, for part files."""
        return self.sha256 or f"git-{self.git_oid}"


class Listing(Model):
    """`listing.json`: a revision is a commit, so its listing never changes and is asked for once."""

    schema_version: int = Field(default=1, ge=1, le=1)
    repo: str
    revision: str
    partition: str
    files: tuple[RemoteFile, ...] = Field(strict=False)
    listed: tuple[str, ...] = Field(strict=False, description="paths that the shipped list names")


def job(checkpoint: Checkpoint, endpoint: str, token: str | None) -> dict[str, Any]:
    """The worker's job for a listing."""
    return {
        "do": "list",
        "endpoint": endpoint,
        "token": token,
        "repo": checkpoint.repo,
        "revision": checkpoint.revision,
        "partition": checkpoint.partition,
        "probe": f"{checkpoint.partition}/{PROBE}",
    }


def reconcile(checkpoint: Checkpoint, found: Sequence[Any], entries: Sequence[ManifestEntry]) -> Listing:
    """Hold the hub's listing against the shipped list. The shipped digest wins: a file is checked against it.

    Raises:
        CheckpointError: the hub lacks a listed file, or says that it has another size or content.
    """
    where = f"{checkpoint.repo} at revision {checkpoint.revision[:12]}"
    entries = of_partition(checkpoint.partition, entries)
    try:
        files = [RemoteFile.model_validate(entry) for entry in found]
    except ValidationError as error:
        raise CheckpointError(f"the hub's listing of {where} has a file that cannot be: {error.errors()[0]}") from None
    out, seen = [], dict[str, str]()
    for file in files:
        entry = entry_for(file.path, entries)
        if entry is None:
            out.append(file)
            continue
        if entry.path in seen:
            raise CheckpointError(
                f"the hub has {seen[entry.path]} and {file.path} for one listed file", needed=entry.path
            )
        seen[entry.path] = file.path
        theirs = entry.sha256 if file.sha256 is None else file.sha256
        if (file.bytes, theirs) != (entry.bytes, entry.sha256 or theirs):
            raise CheckpointError(
                f"the hub says {file.path} has {file.bytes} bytes and SHA-256 {str(file.sha256)[:16]}…",
                needed=f"{entry.bytes} bytes and SHA-256 {str(entry.sha256)[:16]}…, as published",
                remedy=f"{where} is not what this release knows; do not use these weights, and report it",
            )
        out.append(file.model_copy(update={"sha256": entry.sha256 or file.sha256}))
    absent = [entry.path for entry in entries if entry.path not in seen]
    if absent:
        raise CheckpointError(
            f"the hub's listing of {where} lacks {len(absent)} of {len(entries)} listed files, first {absent[0]}",
            remedy=f"{checkpoint.partition} is a folder of that repository; a mirror may lack it: unset HF_ENDPOINT",
        )
    return Listing(
        repo=checkpoint.repo,
        revision=checkpoint.revision,
        partition=checkpoint.partition,
        files=tuple(sorted(out, key=lambda file: file.path)),
        listed=tuple(sorted(seen.values())),
    )


def recorded(checkpoint: Checkpoint, root: Path, cache: Path) -> Listing | None:
    """The listing that an earlier fetch kept, if it is of this revision."""
    for place in places(root, cache, "listing"):
        with contextlib.suppress(OSError, ValidationError):
            listing = Listing.model_validate_json(place.read_bytes())
            wanted = (checkpoint.repo, checkpoint.revision, checkpoint.partition)
            if (listing.repo, listing.revision, listing.partition) == wanted:
                return listing
    return None


def shipped(checkpoint: Checkpoint, root: Path, entries: Sequence[ManifestEntry]) -> tuple[Listing, list[str]]:
    """A listing without the hub: the shipped list's files as they are named in a folder, and the listed ones missing.

    Files that are not in the shipped list are left out: nothing here says what they should be.
    """
    entries = of_partition(checkpoint.partition, entries)
    folder = root / checkpoint.partition
    present = sorted(path.relative_to(root).as_posix() for path in folder.rglob("*") if path.is_file())
    files, missing = [], []
    for entry in entries:
        names = [name for name in present if entry.matches(name)]
        if len(names) != 1:
            missing.append(entry.path)
            continue
        if entry.sha256 is not None:
            files.append(RemoteFile(path=names[0], bytes=entry.bytes, sha256=entry.sha256, git_oid=None, xet_hash=None))
    listing = Listing(
        repo=checkpoint.repo,
        revision=checkpoint.revision,
        partition=checkpoint.partition,
        files=tuple(files),
        listed=tuple(file.path for file in files),
    )
    return listing, missing
