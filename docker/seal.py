"""The last step of an image: what is in it, in three files under /opt/sol/image.

    seal.py RECIPE BASE DEBIAN_BASE CUDA_BASE REVISION

image.json      the image's labels (revision, recipe, pins) and the digest of files.sha256; its own SHA-256 is the
                image's content digest, which a run record names
files.sha256    SHA-256 of every file that a run can execute or read as code, as `sha256sum -c` reads it
sbom.cdx.json   CycloneDX 1.5: Python distributions, system packages, git sources

The same tree gives the same bytes: no clock, no random number.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
import urllib.parse
from pathlib import Path
from typing import Any

OUT = Path("/opt/sol/image")
# Not /usr/local/cuda: gigabytes that the base image's digest already names.
COVERED = ("/opt/sol", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/local/bin", "/usr/local/lib")


def sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def file_list() -> str:
    """A line a regular file below COVERED, sorted by path; links are covered by what they point to."""
    paths = (
        Path(folder) / name
        for root in COVERED
        for folder, folders, names in os.walk(root)
        if not folder.startswith(str(OUT))
        for name in names
    )
    regular = sorted(path for path in paths if path.is_file() and not path.is_symlink())
    return "".join(f"{sha256(path)}  {path}\n" for path in regular)


def recipe_sha256(recipe: Path) -> str:
    """Digest of the recipe's two files, as a lock holds it: SHA-256 of their digests in canonical JSON."""
    names = ("image.toml", "requirements.lock")
    files = {name: sha256(recipe / name) if (recipe / name).is_file() else None for name in names}
    return hashlib.sha256(json.dumps(files, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def labels(recipe: Path, base: str, revision: str) -> dict[str, str]:
    """The image's labels; a pin that its recipe has not is left out."""
    out = {
        "org.opencontainers.image.revision": revision,
        "org.opencontainers.image.base.name": base.partition("@")[0],
        "org.opencontainers.image.base.digest": base.partition("@")[2],
        "org.sol-h3.recipe.sha256": recipe_sha256(recipe),
        "org.sol-h3.requirements.sha256": sha256(recipe / "requirements.lock"),
    }
    if (recipe / "image.toml").is_file():
        pins = tomllib.loads((recipe / "image.toml").read_text("utf-8"))
        out["org.sol-h3.torch"] = pins["torch"]["version"]
        out["org.sol-h3.sglang.commit"] = pins["sglang"]["commit"]
        out["org.sol-h3.sana.commit"] = pins.get("sana", {}).get("commit", "")
    kernels = Path("/opt/sol/kernels/kernels.json")
    if kernels.is_file():
        out["org.sol-h3.kernels"] = json.loads(kernels.read_text("utf-8"))["state"]
    return {name: value for name, value in sorted(out.items()) if value}


def components(found: dict[str, str]) -> list[dict[str, Any]]:
    """Every Python distribution, system package and git source, sorted by package URL."""
    out = []
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        record = distribution.read_text("RECORD") or ""
        quoted = urllib.parse.quote(version)
        out.append(
            {
                "type": "library",
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{quoted}",
                "properties": [{"name": "sol:record.sha256", "value": hashlib.sha256(record.encode()).hexdigest()}],
            }
        )
    system = distribution_id()
    query = ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\t${Architecture}\n"]
    for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines():
        name, version, architecture = line.split("\t")
        purl = f"pkg:deb/{system}/{name}@{urllib.parse.quote(version, safe='')}?arch={architecture}"
        out.append({"type": "library", "name": name, "version": version, "purl": purl})
    if commit := found.get("org.sol-h3.sana.commit"):
        out.append({"type": "library", "name": "Sana", "version": commit, "purl": f"pkg:github/nvlabs/sana@{commit}"})
    return sorted(out, key=lambda component: component["purl"])


def distribution_id() -> str:
    """`debian` or `ubuntu`."""
    lines = Path("/etc/os-release").read_text("utf-8").splitlines()
    return next(line.partition("=")[2].strip('"') for line in lines if line.startswith("ID="))


def write(name: str, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    (OUT / name).write_text(text, encoding="utf-8")


def main() -> None:
    recipe, kind, debian, cuda, revision = Path(sys.argv[1]), *sys.argv[2:6]
    OUT.mkdir(parents=True, exist_ok=True)
    found = labels(recipe, cuda if kind == "cuda" else debian, revision)
    target = os.environ.get("SOL_TARGET", "verify")
    listed = file_list()
    (OUT / "files.sha256").write_text(listed, encoding="utf-8")
    image = {
        "schema_version": 1,
        "target": target,
        "labels": found,
        "files_sha256": hashlib.sha256(listed.encode()).hexdigest(),
    }
    write("image.json", image)
    sbom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "name": f"sol-{target}",
                "version": revision,
                "properties": [{"name": name, "value": value} for name, value in found.items()],
            }
        },
        "components": components(found),
    }
    write("sbom.cdx.json", sbom)


if __name__ == "__main__":
    main()
