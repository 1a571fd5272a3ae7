"""Was the run made in the recipe, on the hardware and from the weights that the lock names?"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from config.canonical import sha256_json
from config.checkpoint import of_partition
from config.errors import UsageError
from config.lock import read_recipe, recipes_root
from config.record import ENVIRONMENT
from verify.findings import Scribe
from verify.reader import Record

OPEN = "a run that differs from its target is open and verifies no published claim"
_REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)\s*(;)?", re.MULTILINE)


def _differs(record: Record, say: Scribe, message: str) -> None:
    """A departure from the target: known where the record calls itself open, a contradiction where it does not."""
    if record.open:
        say.warn(message, OPEN, ENVIRONMENT)
    else:
        say.invalid(f"{message}, and the record calls itself locked", OPEN, ENVIRONMENT)


def differences(record: Record, say: Scribe) -> None:
    """What the run itself says makes it open."""
    for sentence in record.environment.differences:
        say.warn(f"open: {sentence}", OPEN, ENVIRONMENT)
    if not record.environment.image_digest and not record.target.bare_is_locked and not record.environment.differences:
        say.invalid("the run was outside an image, and the record calls itself locked", OPEN, ENVIRONMENT)
    say.conclude("the environment is the target's, the run says")


def warnings(record: Record, say: Scribe) -> None:
    """What the doctor warned of before the run."""
    for sentence in record.environment.warnings:
        say.warn(sentence, "`sol doctor` on that machine says what to do", ENVIRONMENT)
    say.conclude("the doctor warned of nothing")


def recipe(record: Record, say: Scribe) -> None:
    """The run's recipe is the lock's."""
    found, locked = record.environment.recipe_sha256, record.recipe.sha256
    if found != locked:
        _differs(record, say, f"the run's recipe has digest {found[:12]}, the lock's {locked[:12]}")
    say.conclude(f"recipe {record.recipe.image}, {locked[:12]}")


def hardware(record: Record, say: Scribe) -> None:
    """The machine is the one that the target names."""
    wanted, found = record.target.hardware, record.environment
    if wanted.kind == "cpu":
        say.ok(f"a CPU target: {found.cpu.model}, {found.cpu.cores} cores", ENVIRONMENT)
        return
    names = [(gpu.name, gpu.compute_capability) for gpu in found.gpus]
    if names != [(wanted.gpu_name, wanted.compute_capability)] * wanted.gpu_count:
        listing = ", ".join(name for name, _ in names) or "none"
        _differs(record, say, f"GPUs: {listing}; needed: {wanted.gpu_count}x {wanted.gpu_name}")
    if len({gpu.uuid_sha256 for gpu in found.gpus}) != len(found.gpus):
        say.invalid("two GPUs have one identity", "take environment.json as it was written", ENVIRONMENT)
    for gpu in found.gpus:
        if gpu.memory_mib < wanted.gpu_memory_mib:
            _differs(record, say, f"GPU {gpu.index} has {gpu.memory_mib} MiB; needed: {wanted.gpu_memory_mib}")
        if gpu.mig:
            _differs(record, say, f"GPU {gpu.index} is split by MIG")
    if _version(found.driver) < _version(wanted.driver_floor):
        _differs(record, say, f"driver {found.driver or 'unknown'}; needed: {wanted.driver_floor} or newer")
    say.conclude(f"{wanted.gpu_count}x {wanted.gpu_name}, driver {found.driver}")


def _version(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d{1,9}", text)]


def checkpoint(record: Record, say: Scribe) -> None:
    """The weights are of the kind and revision that the lock names, and their digest covers the files listed."""
    found, wanted = record.environment.checkpoint, record.target.checkpoint
    if (found.kind, found.revision) != (wanted.kind, wanted.revision):
        _differs(
            record, say, f"weights {found.kind} {found.revision}; needed: {wanted.kind} {wanted.revision}".rstrip()
        )
    if not found.files:
        say.invalid("no file of the checkpoint is listed", "run the benchmark again", ENVIRONMENT)
    if sha256_json([file.model_dump() for file in found.files]) != found.sha256:
        say.invalid("the checkpoint's digest is not that of its files", "run the benchmark again", ENVIRONMENT)
    if found.kind == "hub":
        _published_files(record, say)
    say.conclude(f"{found.kind} weights, {len(found.files)} files, {found.sha256[:12]}")


def _published_files(record: Record, say: Scribe) -> None:
    """The listed files of the partition, which is what SGLang loads, are all there, with their sizes and digests.

    The public list is of another revision than the pinned one (its header says so), but no run starts from files that
    contradict it: the fetch refuses them. Files beside it, of which it says nothing, are the run's to declare.
    """
    partition = f"{record.target.checkpoint.partition}/"
    found = [
        (file.path if file.path.startswith(partition) else partition + file.path, file.bytes, file.sha256)
        for file in record.environment.checkpoint.files
    ]
    other = [
        entry.path
        for entry in of_partition(record.target.checkpoint.partition)
        if not any(
            entry.matches(path) and size == entry.bytes and entry.sha256 in (None, digest)
            for path, size, digest in found
        )
    ]
    if other:
        shown = f"{len(other)} files of the published list are missing or have another digest, first {other[0]}"
        _differs(record, say, shown)


def sources(record: Record, say: Scribe) -> None:
    """The installed SGLang sources that the seams rely on are the pinned ones."""
    pins = _pins(record, say)
    if pins is None:
        return
    found = record.environment.sglang_sources
    changed = sorted(path for path, digest in pins.items() if found.get(path) != digest)
    if changed:
        _differs(record, say, f"{len(changed)} SGLang sources are not the pinned ones, first {changed[0]}")
    say.conclude(f"{len(pins)} SGLang sources are the pinned ones")


def _pins(record: Record, say: Scribe) -> dict[str, str] | None:
    """SHA-256 by path as our copy of the recipe pins them; None, and a reason, where our copy cannot say."""
    folder = _recipe_folder(record, say)
    if folder is None:
        return None
    pinned = tomllib.loads((folder / "image.toml").read_text("utf-8")).get("sglang", {}).get("files")
    if pinned is None:
        say.skip("the recipe pins no SGLang source")
        return None
    lines = (recipes_root() / pinned).read_text("utf-8").splitlines()
    return {path: digest for digest, path in (line.split(maxsplit=1) for line in lines if line and line[0] != "#")}


def _recipe_folder(record: Record, say: Scribe) -> Path | None:
    recipe = record.recipe
    try:
        ours = read_recipe(recipe.image)
    except UsageError:
        say.skip(f"image recipe {recipe.image!r} does not ship with this release")
        return None
    if ours.sha256 != recipe.sha256:
        say.skip(f"our copy of recipe {recipe.image} has another digest than the lock's; use the release that made it")
        return None
    return recipes_root() / recipe.image


def packages(record: Record, say: Scribe) -> None:
    """The installed packages are those of the recipe's requirements.lock."""
    folder = _recipe_folder(record, say)
    if folder is None:
        return
    if not (folder / "requirements.lock").is_file():
        say.skip(f"recipe {record.recipe.image} has no requirements.lock")
        return
    text = (folder / "requirements.lock").read_text("utf-8")
    installed = {_normal(package.name): package.version for package in record.environment.packages}
    wrong, pinned = [], 0
    for name, version, marker in _REQUIREMENT.findall(text):
        found = installed.get(_normal(name))
        if found is None and marker:
            continue  # for another Python or machine
        pinned += 1
        if found is None or found.partition("+")[0] != version.partition("+")[0]:
            wrong.append(f"{name} {found or 'missing'} instead of {version}")
    if wrong:
        shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        _packages_differ(record, say, shown)
    say.conclude(f"{pinned} packages have the locked versions")


def _packages_differ(record: Record, say: Scribe, shown: str) -> None:
    # Not INVALID in a bare run: the target allows one, and the record lists what was installed.
    if record.open or record.environment.image_digest == "":
        say.warn(f"packages differ from the lock: {shown}", "install images/<recipe>/requirements.lock", ENVIRONMENT)
    else:
        say.invalid(f"packages differ from the image's lock: {shown}", OPEN, ENVIRONMENT)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
