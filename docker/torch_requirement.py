"""Prints the requirement file of what a recipe's [torch] pins for this Python and machine, to be installed by hash.

    torch_requirement.py image.toml WHEELS

A wheel that lies in WHEELS is taken from there by pip.sh; otherwise from its URL, or from the recipe's index where no
URL is pinned. Nothing in the installed metadata tells the two apart.
"""

from __future__ import annotations

import platform
import sys
import tomllib
from pathlib import Path


def lines(recipe: dict, present: bool) -> list[str]:
    """Requirement lines; raises SystemExit when torch has no wheel for this Python and machine."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    out, names = [], []
    for wheel in recipe["torch"]["wheels"]:
        name, version, python, _, platforms = wheel["file"].removesuffix(".whl").split("-", 4)
        if python != tag or not platforms.endswith(f"_{platform.machine()}"):
            continue
        names.append(name)
        if not present:
            index = f"--extra-index-url {recipe['torch']['index']}"
            out.append(f"--find-links {wheel['url']}" if "url" in wheel else index)
        out.append(f"{name}=={version} --hash=sha256:{wheel['sha256']}")
    if "torch" not in names:
        raise SystemExit(f"no torch wheel is pinned for {tag} on {platform.machine()}")
    return list(dict.fromkeys(out))


def main() -> None:
    recipe = tomllib.loads(Path(sys.argv[1]).read_text("utf-8"))
    print("\n".join(lines(recipe, present=any(Path(sys.argv[2]).glob("*.whl")))))


if __name__ == "__main__":
    main()
