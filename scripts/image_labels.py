#!/usr/bin/env python3
"""Write the pins of every recipe as OCI labels into docker/docker-bake.hcl, which cannot read files.

    scripts/image_labels.py            writes them
    scripts/image_labels.py --check    writes nothing; exit 1 when they are not what it would write

Run it after any change of a recipe. The values are those of docker/seal.py, which puts them into the image as well;
what only a build knows (revision, which kernels could be built) is not among them. Standard library only.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
BAKE = Path("docker/docker-bake.hcl")
HEAD = "# ---------------------------------------------------------------- labels, written by scripts/image_labels.py\n"
KERNELS = "org.sol-h3.kernels"


def load_seal() -> ModuleType:
    """docker/seal.py."""
    spec = importlib.util.spec_from_file_location("seal", ROOT / "docker/seal.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def labels(root: Path, target: str) -> dict[str, str]:
    """Labels of one image that its recipe gives; not those of the base image, which is an argument of the build."""
    found = load_seal().labels(root / "images" / target, "", "")
    return {name: value for name, value in found.items() if name.startswith("org.sol-h3.") and name != KERNELS}


def written(root: Path) -> str:
    """docker-bake.hcl as it should be."""
    text, head, _ = (root / BAKE).read_text("utf-8").partition(HEAD)
    if not head:
        raise SystemExit(f"{BAKE} has no line {HEAD.strip()!r}")
    blocks = []
    for folder in sorted(path.parent for path in root.glob("images/*/requirements.lock")):
        base = "DEBIAN_BASE" if folder.name in ("cpu", "verify") else "CUDA_BASE"
        values = {f"org.opencontainers.image.base.{part}": f"base_{part}({base})" for part in ("name", "digest")}
        values |= {name: f'"{value}"' for name, value in labels(root, folder.name).items()}
        lines = "".join(f'    "{name}" = {value}\n' for name, value in values.items())
        blocks.append(f'\ntarget "labels-{folder.name}" {{\n  labels = {{\n{lines}  }}\n}}\n')
    return text + head + "".join(blocks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when labels would change")
    arguments = parser.parse_args()
    text, path = written(ROOT), ROOT / BAKE
    same = path.read_text("utf-8") == text
    print(f"{BAKE}: {'as the recipes say' if same else 'labels changed'}")
    if not arguments.check:
        path.write_text(text, encoding="utf-8")
    return 1 if arguments.check and not same else 0


if __name__ == "__main__":
    sys.exit(main())
