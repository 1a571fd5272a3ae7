#!/usr/bin/env python3
"""Build images with `docker buildx bake`, with the revision and pins of this checkout.

    scripts/build_image.py cpu verify                      sol-cpu and sol-verify, into the engine
    scripts/build_image.py rtx4090 --oci rtx4090.tar       an OCI archive instead, the same bytes each time
    scripts/build_image.py cpu --local-base                on local/debian:bookworm (scripts/docker_engine.sh base)
    scripts/build_image.py cpu --wheels DIR --git-trees DIR   without a package index and GitHub

Needs an engine with buildx. What it starts is printed first. Standard library only: a host that builds needs no virtual
environment.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import image_labels

ROOT = Path(__file__).resolve().parents[1]
LOCAL_BASE = "local/debian:bookworm"
BAKE = Path("docker/docker-bake.hcl")


def git(root: Path, *arguments: str) -> str:
    """Output of git, or "" where there is no git or no checkout."""
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def revision(root: Path) -> str:
    """The commit, with + when tracked files differ from it; `unknown` outside a checkout."""
    head = git(root, "rev-parse", "HEAD")
    return (head + ("+" if git(root, "status", "--porcelain", "--untracked-files=no") else "")) if head else "unknown"


def command(root: Path, arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The bake command and the variables that it reads."""
    variables = {"SOL_REVISION": revision(root)}
    if arguments.local_base:
        variables |= {"DEBIAN_BASE": LOCAL_BASE, "CUDA_BASE": LOCAL_BASE, "KERNELS": "triton"}
        variables |= {"DEBIAN_SNAPSHOT": "", "UBUNTU_SNAPSHOT": ""}
    if arguments.ca_bundle:
        variables["SOL_CA_BUNDLE"] = str(arguments.ca_bundle.absolute())
    out = ["docker", "buildx", "bake", "-f", str(BAKE), "--provenance=false", f"--progress={arguments.progress}"]
    out += ["--no-cache"] if arguments.no_cache else []
    for target in arguments.targets:
        name = f"sol-{target}"
        for label, value in image_labels.labels(root, target).items():
            out += ["--set", f"{name}.labels.{label}={value}"]
        for context, folder in (("wheels", arguments.wheels), ("git-trees", arguments.git_trees)):
            out += ["--set", f"{name}.contexts.{context}={folder.absolute()}"] if folder else []
        # BuildKit rewrites timestamps for an archive alone: an image that it unpacks for use keeps those of the build.
        kind = "compression=uncompressed,force-compression=true"
        where = f"type=image,unpack=true,name={name},{kind}"
        if arguments.oci:
            where = f"type=oci,dest={arguments.oci.absolute()},{kind},rewrite-timestamp=true"
        out += ["--set", f"{name}.output={where}"]
    return [*out, *(f"sol-{target}" for target in arguments.targets)], variables


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", choices=["cpu", "verify", "rtx4090", "h100x4", "a100x4", "h200"])
    parser.add_argument("--oci", type=Path, metavar="FILE", help="write an OCI archive; one target")
    parser.add_argument(
        "--local-base", action="store_true", help=f"build on {LOCAL_BASE}; of the kernels, those that need no nvcc"
    )
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="take wheels from here and ask no index")
    parser.add_argument("--git-trees", type=Path, metavar="DIR", help="take git sources from here (DIR/sana)")
    parser.add_argument("--ca-bundle", type=Path, metavar="FILE", help="certificates of a proxy, for the build alone")
    parser.add_argument("--no-cache", action="store_true", help="run every step anew")
    parser.add_argument("--progress", default="auto", help="auto, plain or quiet")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.oci and len(arguments.targets) != 1:
        parser.error("--oci takes one target")
    words, variables = command(arguments.root, arguments)
    print(
        " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
        shlex.join(words),
        file=sys.stderr,
    )
    return subprocess.run(words, cwd=arguments.root, env={**os.environ, **variables}).returncode


if __name__ == "__main__":
    sys.exit(main())
