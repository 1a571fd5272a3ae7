"""Checks of the machine itself: disk, writable places, who runs, ports, processors, the kind of machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from config.checkpoint import of_partition
from config.schema import Target
from engine.checkpoint.marker import STATE
from engine.checkpoint.store import cache_root, checkpoint_folder, user_cache
from engine.doctor.check import Check, Severity, judged
from engine.environment import compile_cache_folders
from engine.h3.server_arguments import free_ports

MOUNTS = Path("/proc/self/mounts")
KERNEL_VERSION = Path("/proc/version")
REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "gpfs", "beegfs", "9p", "afs"})
VOLATILE = frozenset({"tmpfs", "overlay"})
RECORD_GIB = 0.1
SPILL_GIB = {"hub": 24.0, "synthetic": 0.5}
"""What weights on disk take beside the checkpoint while a run lasts, by its kind: the sorted rows of Q, K and V (50
layers of 3 x 7168 x 5376 in BF16, 11.6 GB) and the video VAE (10.4 GB), which stand in no file as they are used."""
COMPLETE_GIB = 0.0
"""What a checkpoint that is there still takes."""


def check_host(target: Target, out: Path) -> Iterator[Check]:
    """Disk against the target's need, the places that a run writes to, and the machine."""
    yield from disk(target, out)
    yield writable(
        "runs directory", out, "pass --out DIR with a directory that you may write; mount one into a container"
    )
    yield cache_directory(target)
    yield writable("temporary directory", Path(tempfile.gettempdir()), "set TMPDIR to a directory that you may write")
    yield from compile_caches(target)
    yield user(out)
    yield ports()
    yield processors()
    yield machine(target)


def cache_directory(target: Target) -> Check:
    """Where checkpoints lie must be writable only while something is missing: a complete one may be read-only."""
    if target.checkpoint.kind == "hub" and missing_gib(target) == COMPLETE_GIB:
        return judged("cache directory", True, "the checkpoint is complete", "complete, or writable", "")
    return writable("cache directory", cache_root(), "set SOL_CACHE to a directory that you may write")


def existing(path: Path) -> Path:
    """The closest part of a path that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def disk(target: Target, out: Path) -> Iterator[Check]:
    """Free space where the record goes and, as far as the checkpoint is absent, where that goes (field report 11)."""
    places = {"runs": (out, RECORD_GIB), "cache": (cache_root(), missing_gib(target))}
    if target.offload.mapped:
        root, before = spill_root(), missing_gib(target) if spill_root() == cache_root() else 0.0
        places["offload"] = (root, before + SPILL_GIB[target.checkpoint.kind])
    for name, (path, needed) in places.items():
        free = shutil.disk_usage(existing(path)).free / 2**30
        yield judged(
            f"disk ({name})",
            free >= needed,
            f"{free:.2f} GiB free",
            f"{needed:.4g} GiB",
            "free some space, or choose another directory with --out or SOL_CACHE",
        )


def spill_root() -> Path:
    """Where weights that stand in no file would go: the cache of checkpoints, or the user's where that is read-only."""
    return next((root for root in (cache_root(), user_cache()) if os.access(existing(root), os.W_OK)), user_cache())


def missing_gib(target: Target) -> float:
    """Disk that the checkpoint still takes: the target's need less what a fetch has brought already."""
    folder = checkpoint_folder(target.checkpoint)
    if target.checkpoint.kind == "synthetic":
        return COMPLETE_GIB if folder.is_dir() else target.hardware.disk_gib
    parts = [folder / target.checkpoint.partition, folder / STATE / "parts"]
    there = sum(path.stat().st_size for part in parts for path in part.rglob("*") if path.is_file())
    if there >= sum(entry.bytes for entry in of_partition(target.checkpoint.partition)):
        return COMPLETE_GIB
    return max(target.hardware.disk_gib - there / 2**30, RECORD_GIB)


def writable(name: str, path: Path, remedy: str, *, bad: Severity = Severity.ERROR) -> Check:
    """Whether a file can be made in a directory, or in the one that it will be made in (field report 18)."""
    place = existing(path)
    try:
        with tempfile.TemporaryFile(dir=place) as handle:
            handle.write(b"\0")
        return judged(name, True, "writable", "writable", remedy)
    except OSError as error:
        return judged(name, False, f"{place}: {error.strerror}", "writable", remedy, bad=bad)


def compile_caches(target: Target) -> Iterator[Check]:
    """Where Triton, inductor and CUDA keep what they compiled: writable, local, lasting (field reports 18 and 19)."""
    if target.hardware.kind != "cuda":
        return
    folders = compile_cache_folders()
    for variable, path in folders.items():
        yield writable(variable, path, f"set {variable}, or HOME, to a directory that you may write")
    kind = filesystem(folders["TRITON_CACHE_DIR"])
    yield judged(
        "compile caches",
        kind not in REMOTE | VOLATILE,
        f"on {kind}",
        "a local disk that outlives the container",
        "mount a volume for the caches: on a network file system locks fail, in memory or inside the container every "
        "start compiles anew",
        bad=Severity.WARNING,
    )


def filesystem(path: Path) -> str:
    """Type of the file system that holds a path, as the kernel names it."""
    place, best, kind = str(existing(path).resolve()), "", "unknown"
    for line in MOUNTS.read_text().splitlines():
        _, mount, found, *_ = line.split()
        mount = mount.encode().decode("unicode_escape")
        if len(mount) >= len(best) and (place == mount or place.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, found
    return kind


def user(out: Path) -> Check:
    """Whether what the run writes will belong to whoever started it (field report 28)."""
    as_root, owner = os.geteuid() == 0, existing(out).stat().st_uid
    return judged(
        "user",
        not (as_root and owner != 0),
        f"uid {os.geteuid()}; the runs directory belongs to uid {owner}",
        "the owner of the runs directory",
        'start the container with --user "$(id -u):$(id -g)": else the record belongs to root',
        bad=Severity.WARNING,
    )


def ports() -> Check:
    """Whether this machine hands out local TCP ports: SGLang's processes talk through two of them."""
    try:
        free_ports(2)
        return judged("local ports", True, "2 free", "2 free", "")
    except OSError as error:
        return judged("local ports", False, str(error.strerror), "2 free", "allow sockets on 127.0.0.1")


def processors() -> Check:
    """Cores that the process may use."""
    cores = len(os.sched_getaffinity(0))
    return judged("cpu count", cores >= 2, f"{cores}", "2 or more", "give the process more cores", bad=Severity.WARNING)


def machine(target: Target) -> Check:
    """WSL is unsupported on a GPU: it caps pinned memory and hides NVML's counters (field report 15)."""
    try:
        text = KERNEL_VERSION.read_text().lower()
    except OSError:
        text = ""
    wsl = "microsoft" in text
    return judged(
        "machine",
        not (wsl and target.hardware.kind == "cuda"),
        "WSL" if wsl else "Linux",
        "Linux itself",
        "use Linux: under WSL pinned memory is capped and telemetry has holes; a result from it is not comparable",
        bad=Severity.WARNING,
    )
