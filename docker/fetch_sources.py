"""Fetches the git sources that a recipe pins, by full commit, and keeps the folder that is used.

    fetch_sources.py image.toml GIT_TREES DESTINATION

A repository in GIT_TREES/<name> is used in place of the public one. Git itself checks every object against the commit;
where the recipe records a file list (`files`, as sha256sum writes it) the files are checked against that as well.
DESTINATION/sol-sources.pth holds what must be on Python's path; it is not written when nothing is pinned.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

CA_BUNDLE = Path("/run/secrets/ca_bundle")


def fetch(name: str, pin: dict, trees: Path, destination: Path) -> None:
    """Bring `pin`'s folder at its commit to `destination`. Raises SystemExit when anything differs from the pin."""
    commit = pin["commit"]
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise SystemExit(f"{name}: commit {commit!r} is not 40 hex digits")
    local = trees / name
    origin = f"file://{local}" if local.exists() else pin["repository"]
    environment = {
        **os.environ,
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
    if CA_BUNDLE.exists() and CA_BUNDLE.stat().st_size:
        environment["GIT_SSL_CAINFO"] = str(CA_BUNDLE)
    with tempfile.TemporaryDirectory() as scratch:
        git = ["git", "-C", scratch, "-c", "advice.detachedHead=false"]
        for command in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth", "1", origin, commit],
            ["checkout", "--quiet", "FETCH_HEAD"],
        ):
            if subprocess.run([*git, *command], env=environment).returncode:
                raise SystemExit(f"{name}: commit {commit} could not be had from {origin} (git {command[0]} failed)")
        head = subprocess.run([*git, "rev-parse", "HEAD"], env=environment, capture_output=True, text=True, check=True)
        if head.stdout.strip() != commit:
            raise SystemExit(f"{name}: {origin} gave commit {head.stdout.strip()}, not {commit}")
        source = Path(scratch) / pin["folder"]
        if not source.is_dir():
            raise SystemExit(f"{name}: {pin['folder']} does not exist at {commit}")
        shutil.copytree(source, destination / pin["folder"], symlinks=True)
        for licence in Path(scratch).glob("LICENSE*"):
            shutil.copy(licence, destination)
    (destination / "COMMIT").write_text(f"{commit}\n", encoding="utf-8")


def check(listed: str, folder: Path) -> None:
    """Compare files with a list of SHA-256. Raises SystemExit naming the first that differs."""
    for line in listed.splitlines():
        digest, _, path = line.partition("  ")
        found = folder / path
        if not found.is_file() or hashlib.sha256(found.read_bytes()).hexdigest() != digest:
            raise SystemExit(f"{path} is not the pinned file")


def main() -> None:
    recipe_file, trees, destination = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    recipe = tomllib.loads(recipe_file.read_text("utf-8"))
    destination.mkdir(parents=True, exist_ok=True)
    pin = recipe.get("sana")
    if pin is None:
        print("the recipe pins no git source")
        return
    fetch("sana", pin, trees, destination / "sana")
    if "files" in pin:
        check((recipe_file.parent / pin["files"]).read_text("utf-8"), destination / "sana" / pin["folder"])
    else:
        print("sana: no file list is recorded; the commit alone vouches for the files")
    (destination / "sol-sources.pth").write_text(f"{destination / 'sana' / pin['folder']}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
