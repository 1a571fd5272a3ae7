#!/usr/bin/env python3
"""Refuse pins that do not pin: short commits, image tags without a digest, wheels without a hash.

    scripts/check_pins.py             every recipe, lock, Dockerfile, compose and workflow file; no network
    scripts/check_pins.py --online    also ask registries, indexes and GitHub whether each pin is what they serve

Exit 0 when nothing is wrong, 1 with one line a fault. Online, a pin marked `unconfirmed` that turns out right is
printed as `confirmed`: change its status by hand, the change is reviewed like any other. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMIT = re.compile(r"[0-9a-f]{40}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
IMAGE_REFERENCE = re.compile(r"\b((?:nvidia/cuda|debian|ubuntu|python|lmsysorg/sglang):[\w.-]+)(@\S*?)?(?=[\"'}\s]|$)")


def tables(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every table of a TOML document with its dotted name."""
    if isinstance(node, dict):
        yield path, node
        for key, value in node.items():
            yield from tables(value, f"{path}.{key}".strip("."))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from tables(value, f"{path}[{index}]")


def recipe_faults(text: str) -> Iterator[str]:
    """What an image.toml pins loosely."""
    for path, table in tables(tomllib.loads(text)):
        for key, value in table.items():
            if key in ("commit", "sglang_commit", "revision") and not COMMIT.fullmatch(str(value)):
                yield f"[{path}] {key} {value!r} is not a commit of 40 hex digits"
            if key in ("digest", "index_digest", "container_digest") and not DIGEST.fullmatch(str(value)):
                yield f"[{path}] {key} {value!r} is not sha256: and 64 hex digits"
        if path.startswith("torch.wheels[") and not re.fullmatch(r"[0-9a-f]{64}", table.get("sha256", "")):
            yield f"[{path}] {table.get('file', 'a wheel')} has no sha256"
        if path == "base_image" and not {"digest", "index_digest"} <= table.keys():
            yield f"[{path}] {table.get('name')} has no digest"


def lock_faults(text: str) -> Iterator[str]:
    """What a requirement lock pins loosely."""
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, *options = line.split()
        hashes = [option for option in options if option.startswith("--hash=")]
        if not re.fullmatch(r"[A-Za-z0-9._-]+==[^=*,]+", name):
            yield f"{name} is not pinned to one version"
        if not hashes or not all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", option) for option in hashes):
            yield f"{name} has no SHA-256 hash"


def reference_faults(text: str) -> Iterator[str]:
    """Base images of a Dockerfile, bake or compose file without a digest."""
    for line in text.splitlines():
        code = line.split("#", 1)[0]
        for name, digest in IMAGE_REFERENCE.findall(code):
            if not DIGEST.fullmatch(digest.lstrip("@")):
                yield f"{name} has no digest"


def workflow_faults(text: str) -> Iterator[str]:
    """Actions of a workflow that are not pinned to a commit."""
    for action in re.findall(r"uses:\s*(\S+)", text):
        if not action.startswith("./") and not COMMIT.fullmatch(action.partition("@")[2]):
            yield f"action {action} is not pinned to a commit of 40 hex digits"


CHECKS: tuple[tuple[str, Callable[[str], Iterator[str]]], ...] = (
    ("images/*/image.toml", recipe_faults),
    ("images/*/requirements*.lock", lock_faults),
    ("docker/*.lock", lock_faults),
    ("docker/Dockerfile", reference_faults),
    ("docker/*.hcl", reference_faults),
    ("compose.yaml", reference_faults),
    (".github/workflows/*.yml", workflow_faults),
)


def faults(root: Path) -> list[str]:
    """Every fault of a checkout, `file: what`. A pattern that matches no file is a fault too."""
    out = []
    for pattern, check in CHECKS:
        paths = sorted(root.glob(pattern))
        if not paths:
            out.append(f"{pattern}: no such file")
        for path in paths:
            out += [f"{path.relative_to(root)}: {fault}" for fault in check(path.read_text("utf-8"))]
    return out


# ---------------------------------------------------------------- at the source


def get(url: str, headers: dict[str, str] | None = None) -> tuple[bytes, dict[str, str]]:
    request = urllib.request.Request(url, headers=headers or {})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read(), dict(answer.headers)


def ask_registry(name: str, digest: str) -> str:
    """ "" when the tag of a Docker Hub image resolves to this index or lists this manifest, else what was found."""
    repository, _, tag = name.partition(":")
    repository = repository if "/" in repository else f"library/{repository}"
    scope = f"https://auth.docker.io/token?service=registry.docker.io&scope=repository:{repository}:pull"
    token = json.loads(get(scope)[0])["token"]
    kinds = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"
    body, _ = get(
        f"https://registry-1.docker.io/v2/{repository}/manifests/{tag}",
        {"Authorization": f"Bearer {token}", "Accept": kinds},
    )
    known = {f"sha256:{hashlib.sha256(body).hexdigest()}"}
    known |= {manifest["digest"] for manifest in json.loads(body).get("manifests", [])}
    return "" if digest in known else f"{name} is now {sorted(known)[:3]}"


def ask_index(wheel: dict[str, str], index: str) -> str:
    """ "" when the index gives this file the pinned hash, else what it gives. Downloads nothing but the listing."""
    project = wheel["file"].split("-", 1)[0].replace("_", "-")
    page, _ = get(f"{index.rstrip('/')}/{project}/")
    for quoted in (urllib.parse.quote(wheel["file"]), wheel["file"]):
        if found := re.search(re.escape(quoted) + r"#sha256=([0-9a-f]{64})", page.decode()):
            return "" if found[1] == wheel["sha256"] else f"{wheel['file']} has SHA-256 {found[1]}"
    return f"{wheel['file']} is not in {index}"


def ask_git(repository: str, commit: str) -> str:
    """ "" when the server gives out this commit, else git's last line."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["git", "init", "--quiet", scratch], check=True)
        fetch = ["git", "-C", scratch, "fetch", "--quiet", "--depth", "1", "--filter=blob:none", repository, commit]
        done = subprocess.run(fetch, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no answer"])[-1]


def online(root: Path) -> list[tuple[str, str, str]]:
    """(pin, status in its recipe, what is wrong at the source or ""), every distinct pin once."""
    questions: dict[str, tuple[str, Callable[[], str]]] = {}
    for path in sorted(root.glob("images/*/image.toml")):
        recipe = tomllib.loads(path.read_text("utf-8"))
        if base := recipe.get("base_image"):
            for key in ("index_digest", "digest"):
                questions[f"{base['name']} {base[key]}"] = (
                    base["status"],
                    partial(ask_registry, base["name"], base[key]),
                )
        for wheel in recipe["torch"]["wheels"]:
            questions[wheel["file"]] = wheel["status"], partial(ask_index, wheel, recipe["torch"]["index"])
        for name in ("sglang", "sana"):
            if pin := recipe.get(name):
                where = pin["repository"], pin["commit"]
                questions[" ".join(where)] = pin["status"], partial(ask_git, *where)
    out = []
    for pin, (status, ask) in questions.items():
        try:
            wrong = ask()
        except (urllib.error.URLError, OSError, KeyError, ValueError) as error:
            wrong = f"not asked: {error}"
        out.append((pin, status, wrong))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--online", action="store_true", help="ask registries, indexes and GitHub")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    found = faults(arguments.root)
    if arguments.online:
        for pin, status, wrong in online(arguments.root):
            print(f"{'not confirmed' if wrong else 'confirmed'}: {pin} (marked {status})")
            found += [f"{pin}: {wrong}"] if wrong else []
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
