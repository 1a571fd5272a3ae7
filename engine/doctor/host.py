"""Checks of the machine itself: memory, disk, writable places, ports."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from config.schema import Target
from engine.checkpoint.store import cache_root, checkpoint_folder
from engine.doctor.check import Check, Severity, judged
from engine.environment import memory_mib
from engine.h3.server_arguments import free_ports

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def check_host(target: Target, out: Path) -> Iterator[Check]:
    """Memory and disk against the target's need, and the places that a run writes to."""
    yield memory(target)
    yield from disk(target, out)
    yield writable("runs directory", out, "pass --out DIR with a directory that you may write")
    yield writable("cache directory", cache_root(), "set SOL_CACHE to a directory that you may write")
    yield writable("temporary directory", Path(tempfile.gettempdir()), "set TMPDIR to a directory that you may write")
    yield ports()
    cores = len(os.sched_getaffinity(0))
    yield judged("cpu count", cores >= 2, f"{cores}", "2 or more", "give the process more cores", bad=Severity.WARNING)


def available_mib() -> int:
    """Memory that the run may take: MemAvailable, or what its control group leaves if that is less."""
    available = memory_mib()[1]
    try:
        limit = CGROUP_LIMIT.read_text().strip()
        if limit != "max":
            available = min(available, (int(limit) - int(CGROUP_USED.read_text())) // 2**20)
    except (OSError, ValueError):
        pass
    return available


def memory(target: Target) -> Check:
    """Memory available to the run."""
    needed, found = target.hardware.host_memory_gib, available_mib() / 1024
    return judged(
        "host memory",
        found >= needed,
        f"{found:.1f} GiB available",
        f"{needed:g} GiB",
        "end other programs, or raise the container's memory limit",
    )


def existing(path: Path) -> Path:
    """The closest part of a path that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def disk(target: Target, out: Path) -> Iterator[Check]:
    """Free space where the record goes and, while the checkpoint is absent, where that goes."""
    absent = not checkpoint_folder(target.checkpoint).is_dir()
    record_gib = 0.1
    places = {"runs": (out, record_gib), "cache": (cache_root(), target.hardware.disk_gib if absent else 0.05)}
    for name, (path, needed) in places.items():
        free = shutil.disk_usage(existing(path)).free / 2**30
        yield judged(
            f"disk ({name})",
            free >= needed,
            f"{free:.2f} GiB free",
            f"{needed:g} GiB",
            "free some space, or choose another directory with --out or SOL_CACHE",
        )


def writable(name: str, path: Path, remedy: str) -> Check:
    """Whether a file can be made in a directory (or in the one that it will be made in)."""
    place = existing(path)
    try:
        with tempfile.TemporaryFile(dir=place) as handle:
            handle.write(b"\0")
        return judged(name, True, "writable", "writable", remedy)
    except OSError as error:
        return judged(name, False, f"{place}: {error.strerror}", "writable", remedy)


def ports() -> Check:
    """Whether this machine hands out local TCP ports: SGLang's processes talk through two of them."""
    try:
        free_ports(2)
        return judged("local ports", True, "2 free", "2 free", "")
    except OSError as error:
        return judged("local ports", False, str(error.strerror), "2 free", "allow sockets on 127.0.0.1")
