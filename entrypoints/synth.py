"""`sol synth`: a target's synthetic checkpoint."""

from __future__ import annotations

import shutil

from config.errors import UsageError
from config.lock import load_target, target_names
from engine.checkpoint.store import checkpoint_folder, ensure, verify_synthetic
from entrypoints.console import make_console


def synthetic() -> list[str]:
    """The targets whose checkpoint is made here."""
    return [name for name in target_names() if load_target(name).checkpoint.kind == "synthetic"]


def synthesise(target: str, overrides: list[str], *, force: bool) -> None:
    """Write and verify it.

    Raises:
        UsageError: the target's checkpoint is a published one.
        EnvironmentRefused: it cannot be written.
        CheckpointError: what is there is not what ships.
    """
    checkpoint = load_target(target, overrides).checkpoint
    if checkpoint.kind != "synthetic":
        raise UsageError(f"target {target!r} runs the published checkpoint", remedy=f"choose {', '.join(synthetic())}")
    console = make_console()
    folder = checkpoint_folder(checkpoint)
    if force:
        shutil.rmtree(folder, ignore_errors=True)
    ensure(checkpoint, on_part=lambda part: console.print(f"writing {part}"))
    found, notes = verify_synthetic(checkpoint, folder)
    size = sum(file.bytes for file in found.files)
    console.print(f"{folder}: {len(found.files)} files, {size / 1e6:.0f} MB, SHA-256 of the list {found.sha256}")
    for note in notes:
        console.print(f"note: {note}")
