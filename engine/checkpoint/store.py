"""Where checkpoints lie, and whether the files there are the ones that a lock asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from config.canonical import sha256_json
from config.checkpoint import FILE as PUBLISHED_MANIFEST
from config.checkpoint import parse
from config.errors import CheckpointError, EnvironmentRefused
from config.record import CheckpointFile, CheckpointFound
from config.schema import Checkpoint
from engine.checkpoint.hashing import digests
from engine.checkpoint.marker import STATE

MANIFEST_FOLDER = PUBLISHED_MANIFEST.parent
CACHE_VARIABLE = "SOL_CACHE"


def cache_root() -> Path:
    """Where the bundle keeps checkpoints: $SOL_CACHE, else $XDG_CACHE_HOME/sol-h3, else ~/.cache/sol-h3."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else user_cache()


def user_cache() -> Path:
    """Small things about checkpoints that lie where nothing can be written: $XDG_CACHE_HOME/sol-h3, else
    ~/.cache/sol-h3."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sol-h3"


def checkpoint_folder(checkpoint: Checkpoint) -> Path:
    """The directory of a checkpoint below the cache; SGLang wants its last part to be the model's name."""
    if checkpoint.kind == "synthetic":
        return cache_root() / f"synthetic-{checkpoint.preset}-seed{checkpoint.seed}" / "MiniMax-H3"
    return cache_root() / f"hub-{checkpoint.revision[:12]}" / "MiniMax-H3"


def manifest_path(checkpoint: Checkpoint) -> Path:
    """The shipped list of a synthetic checkpoint's files. Only seed 0 ships one; other seeds are other weights, hence
    open."""
    return MANIFEST_FOLDER / f"synthetic-{checkpoint.preset}-seed{checkpoint.seed}.tsv"


def list_files(folder: Path) -> tuple[CheckpointFile, ...]:
    """Every file of a checkpoint with size and SHA-256, sorted by path.

    Raises:
        OSError: a file cannot be read.
    """
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return digest_files(folder, sorted(path.as_posix() for path in paths if path.parts[0] != STATE))


def digest_files(folder: Path, paths: Sequence[str]) -> tuple[CheckpointFile, ...]:
    """Size and SHA-256 of files named relative to a folder, in the order given.

    Raises:
        OSError: a file cannot be read.
    """
    found = digests([folder / path for path in paths])
    return tuple(
        CheckpointFile(path=path, bytes=(folder / path).stat().st_size, sha256=digest.sha256)
        for path, digest in zip(paths, found, strict=True)
    )


def found(checkpoint: Checkpoint, files: tuple[CheckpointFile, ...]) -> CheckpointFound:
    """What the record says of the files."""
    digest = sha256_json([file.model_dump() for file in files])
    return CheckpointFound(kind=checkpoint.kind, revision=checkpoint.revision, sha256=digest, files=files)


def verify_synthetic(checkpoint: Checkpoint, folder: Path) -> tuple[CheckpointFound, list[str]]:
    """Hash a synthetic checkpoint and compare it with its list.

    Returns:
        what was found, and sentences that make the run open: no list ships for this seed.

    Raises:
        CheckpointError: a file is missing, cut, changed or surplus.
    """
    remedy = "`sol synth TARGET --force` writes it anew"
    try:
        files = list_files(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}", needed="readable files", remedy=remedy) from error
    manifest = manifest_path(checkpoint)
    if not manifest.is_file():
        return found(checkpoint, files), [f"no list of files ships for synthetic weights with seed {checkpoint.seed}"]
    expected = {entry.path: entry for entry in parse(manifest.read_text("utf-8"))}
    for file in files:
        known = expected.pop(file.path, None)
        if known is None:
            raise CheckpointError(f"{folder / file.path} does not belong to the checkpoint", remedy=remedy)
        if (file.bytes, file.sha256) != (known.bytes, known.sha256):
            raise CheckpointError(
                f"{folder / file.path} has {file.bytes} bytes and SHA-256 {file.sha256[:16]}…",
                needed=f"{known.bytes} bytes and SHA-256 {str(known.sha256)[:16]}…",
                remedy=remedy,
            )
    if expected:
        raise CheckpointError(f"{folder / min(expected)} is missing", remedy=remedy)
    return found(checkpoint, files), []


def ensure(checkpoint: Checkpoint, *, on_part: Callable[[str], None] = lambda part: None) -> Path:
    """The folder of a synthetic checkpoint, which is written when it is not there.

    Raises:
        EnvironmentRefused: it cannot be written.
    """
    folder = checkpoint_folder(checkpoint)
    if not folder.is_dir():
        write_synthetic(checkpoint, on_part=on_part)
    return folder


def write_synthetic(checkpoint: Checkpoint, *, on_part: Callable[[str], None] = lambda part: None) -> None:
    """Write a synthetic checkpoint in a process of its own: it builds SGLang's modules to learn their shapes.

    Raises:
        EnvironmentRefused: the process failed; its last line is in the message.
    """
    command = [sys.executable, "-P", "-m", "engine.checkpoint.write", checkpoint.preset, str(checkpoint.seed)]
    root = checkpoint_folder(checkpoint).parent
    process = subprocess.Popen([*command, str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("part "):
            on_part(line.removeprefix("part ").strip())
    _, errors = process.communicate()
    if process.returncode:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        raise EnvironmentRefused(
            f"the synthetic checkpoint could not be written to {root}: {last}",
            needed="a writable directory with 1 GB free, and the packages of images/cpu/requirements.lock",
            remedy=f"free some space or set {CACHE_VARIABLE} elsewhere; `sol doctor cpu` checks the packages",
        )
