#!/usr/bin/env python3
"""Download every wheel of an image, checked by hash, for a build without a package index (build_image.py --wheels DIR).

    scripts/download_wheels.py cpu DIR        those of sol-cpu and sol-verify, and of the build itself
    scripts/download_wheels.py rtx4090 DIR    those of a GPU image

pip downloads, as it is set up on this machine; what it does not find in its own index is asked of the recipe's. A wheel
that lies in DIR already is not downloaded again. Needs pip in the Python that runs this, and nothing else.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = ("2_36", "2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")


def pip_download(folder: Path, python: str, machine: str) -> list[str]:
    """The command, for a Python and machine that need not be this one's."""
    tag = f"cp{python.replace('.', '')}"
    out = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
    ]
    out += ["--dest", str(folder), "--find-links", str(folder), "--python-version", python, "--implementation", "cp"]
    for abi in (tag, "abi3", "none"):
        out += ["--abi", abi]
    for name in (*(f"manylinux_{glibc}" for glibc in GLIBC), "manylinux2014", "linux"):
        out += ["--platform", f"{name}_{machine}"]
    return out


def torch_wheels(recipe: dict, python: str, machine: str) -> list[dict[str, str]]:
    """Those of [torch] for this Python and machine. Raises SystemExit when there is none."""
    tag = f"cp{python.replace('.', '')}"
    found = [
        wheel
        for wheel in recipe["torch"]["wheels"]
        if wheel["file"].split("-")[2] == tag and wheel["file"].endswith(f"_{machine}.whl")
    ]
    if not found:
        raise SystemExit(f"no torch wheel is pinned for {tag} on {machine}")
    return found


def run(words: list[str]) -> None:
    """Run pip. Raises SystemExit with its last words."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit("\n".join(done.stderr.strip().splitlines()[-6:]))


def download(target: str, folder: Path) -> None:
    """Fill `folder`. Raises SystemExit when a wheel cannot be had or is not the pinned one."""
    recipe = tomllib.loads((ROOT / "images" / target / "image.toml").read_text("utf-8"))
    python = recipe["python"]["version"]  # the base's own; the CPU recipe pins wheels for others too
    machine = platform.machine()
    folder.mkdir(parents=True, exist_ok=True)
    pip = pip_download(folder, python, machine)
    for lock in (f"images/{target}/requirements.lock", "docker/build.lock"):
        run([*pip, "-r", str(ROOT / lock)])
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch, "torch.txt")
        for wheel in torch_wheels(recipe, python, machine):
            name, version = wheel["file"].split("-")[:2]
            wanted.write_text(f"{name}=={version} --hash=sha256:{wheel['sha256']}\n")
            if subprocess.run([*pip, "-r", str(wanted)], capture_output=True).returncode:
                source = ["--find-links", wheel["url"]] if "url" in wheel else ["--index-url", recipe["torch"]["index"]]
                run([*pip, *source, "-r", str(wanted)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["cpu", "rtx4090", "h100x4", "a100x4", "h200"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    download(arguments.target, arguments.folder)
    wheels = list(arguments.folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{arguments.folder}: {len(wheels)} wheels, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
