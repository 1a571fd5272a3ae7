"""Checks of Python, its packages, and SGLang's sources against the recipe."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import canonicalize_name

from config.schema import Target
from engine.doctor.check import Check, Severity, judged
from engine.environment import locked_versions, package_differences, sglang_pins, sglang_sources
from engine.image import image_labels

REINSTALL = "`make demo` installs the locked packages; outside a checkout: pip install --no-deps --require-hashes -r"


def check_software(target: Target) -> Iterator[Check]:
    """Python version, package versions, torch's build, SGLang's sources."""
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield judged("python", good, version, "3.11 to 3.13", "install another Python and set it up again")
    yield from packages(target)
    if importlib.util.find_spec("torch") is not None:
        yield torch_build(target)
    yield from cuda_packages(target)
    yield diffusion_part()
    yield sources(target)


def packages(target: Target) -> Iterator[Check]:
    """Installed versions against the lock."""
    remedy = f"{REINSTALL} images/{target.recipe}/requirements.lock"
    locked = locked_versions(target.recipe)
    if not locked:
        yield Check(
            name="packages",
            severity=Severity.WARNING,
            found=f"images/{target.recipe} has no requirements.lock",
            needed="a lock to compare with",
            remedy="nothing to do in this release: the image is not made yet, and the record says so",
        )
        return
    needed = f"{len(locked)} packages of the lock"
    wrong = package_differences(target.recipe)
    absent = [text for text in wrong if " absent " in text]
    # Another version makes the run open, and the record says so; an absent package makes it fail later. A GPU machine
    # that may run without an image brings its own CUDA stack, under other names.
    own_stack = target.hardware.kind == "cuda" and target.bare_is_locked and not image_labels()
    yield judged(
        "packages",
        not absent,
        f"{len(absent)} absent: {', '.join(absent[:4])}" if absent else "all there",
        needed,
        remedy,
        bad=Severity.WARNING if own_stack else Severity.ERROR,
    )
    found = f"{len(locked)} as locked" if not wrong else f"{len(wrong)} differ: {', '.join(wrong[:4])}"
    yield judged("package versions", not wrong, found, needed, remedy, bad=Severity.WARNING)


def torch_build(target: Target) -> Check:
    """A CPU target wants the CPU build: a CUDA build drags in gigabytes and other kernels.

    It is imported, since a build for another CUDA is there by name and fails at that (field report 24).
    """
    wanted = "a CPU build" if target.hardware.kind == "cpu" else "a CUDA build"
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "use the target's image, or install the locked torch again: a library of another CUDA does not load"
        return judged("torch build", False, f"cannot be imported: {error}", f"{wanted} that loads", remedy)
    cuda = torch.version.cuda
    if target.hardware.kind == "cpu":
        remedy = "remove .venv and run `make demo` again: it installs the CPU build by exact version"
        return judged("torch build", cuda is None, torch.__version__, wanted, remedy)
    found = f"{torch.__version__}, CUDA {cuda}"
    return judged("torch build", cuda is not None, found, wanted, "use the target's image")


def cuda_packages(target: Target) -> Iterator[Check]:
    """CUDA libraries of one major version: a CUDA 13 wheel on a CUDA 12 stack fails at import (field report 24)."""
    if target.hardware.kind != "cuda":
        return
    majors: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if match := re.fullmatch(r"nvidia-.*-cu(\d+)", name):
            majors.setdefault(match[1], []).append(name)
    listed = "; ".join(f"CUDA {major}: {len(names)}" for major, names in sorted(majors.items()))
    rarest = min(majors.items(), key=lambda item: len(item[1]), default=("", [""]))
    yield judged(
        "cuda packages",
        len(majors) < 2,
        listed + (f", first {rarest[1][0]}" if len(majors) > 1 else "") or "none",
        "one major version",
        f"uninstall the packages of CUDA {rarest[0]}, or use the target's image: it takes no resolver's choice",
    )


def diffusion_part() -> Check:
    """Whether the installed sglang has its diffusion part and knows MiniMax-H3 (field reports 21 and 35)."""
    try:
        found = importlib.metadata.distribution("sglang")
    except importlib.metadata.PackageNotFoundError:
        return judged("sglang", False, "not installed", "sglang with multimodal_gen and MiniMax-H3", REINSTALL)
    model = found.locate_file("sglang/multimodal_gen/runtime/models/dits/minimax_h3.py")
    good = Path(str(model)).is_file()
    text = f"sglang {found.version}" + ("" if good else " without multimodal_gen/runtime/models/dits/minimax_h3.py")
    return judged("sglang", good, text, "sglang with multimodal_gen and MiniMax-H3", "install the locked sglang")


def sources(target: Target) -> Check:
    """SGLang's installed files against the pins: the seams replace names inside them."""
    pins = sglang_pins(target.recipe)
    try:
        found = sglang_sources(target.recipe)
    except importlib.metadata.PackageNotFoundError:
        return judged("sglang sources", False, "sglang is not installed", f"{len(pins)} pinned files", REINSTALL)
    changed = sorted(path for path, digest in pins.items() if found[path] != digest)
    text = f"{len(pins)} files as pinned" if not changed else f"{len(changed)} differ, first {changed[0]}"
    return judged("sglang sources", not changed, text, "the pinned files", "reinstall sglang; edit none of its files")
