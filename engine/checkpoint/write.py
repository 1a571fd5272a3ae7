"""`python -m engine.checkpoint.write PRESET SEED ROOT`: the process that writes a synthetic checkpoint.

`python -m engine.checkpoint.write --list PRESET SEED` writes the list of the cached one's files into
config/checkpoint, where a release ships it. Whoever changes `synthesise.py` runs it and commits the difference.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(preset: str, seed: str, root: str) -> None:
    """Write the checkpoint; prints a line a part."""
    os.environ["SGLANG_DIFFUSION_PLATFORM_OVERRIDE"] = "cpu"
    from engine.h3.cpu import declare_torchvision_operators

    declare_torchvision_operators()
    from engine.checkpoint.synthesise import synthesise

    synthesise(Path(root), preset, int(seed), on_part=lambda part: print("part", part, flush=True))


def write_list(preset: str, seed: str) -> None:
    """List a cached synthetic checkpoint's files as they are now."""
    from config.schema import Checkpoint
    from engine.checkpoint.store import checkpoint_folder, list_files, manifest_path

    checkpoint = Checkpoint.model_validate({"kind": "synthetic", "preset": preset, "seed": int(seed)})
    rows = (f"{file.path}\t{file.bytes}\t{file.sha256}" for file in list_files(checkpoint_folder(checkpoint)))
    head = (
        f"# Synthetic checkpoint, preset {preset}, seed {seed}: written by `python -m engine.checkpoint.write --list`"
    )
    manifest_path(checkpoint).write_text("\n".join([head, "path\tbytes\tsha256", *rows]) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        write_list(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
