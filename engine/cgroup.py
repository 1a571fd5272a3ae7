"""The process's memory control groups: what they leave, and whether the kernel killed somebody in them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and use, in version 2 and version 1."""
NO_LIMIT = 1 << 60
"""Version 1 writes "no limit" as a number beyond this."""


def folders() -> list[Path]:
    """The process's control group of either version, and all above it, from the root down.

    Inside a container the root is the container's own group, whatever /proc/self/cgroup says.
    """
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        lines = []
    out = [ROOT, ROOT / "memory"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root, parts = ROOT / controllers, [part for part in path.split("/") if part not in ("", "..")]
            out += [root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return list(dict.fromkeys(out))


def cgroup_left_mib() -> int | None:
    """What the control groups leave the process, MiB: the least of all levels; None where none limits it."""
    left: list[int] = []
    for folder in folders():
        for limit, used in FILES:
            try:
                text = (folder / limit).read_text().strip()
                if text != "max" and int(text) < NO_LIMIT:
                    left.append((int(text) - int((folder / used).read_text())) // 2**20)
            except (OSError, ValueError):
                continue
    return min(left, default=None)


def oom_kills() -> int:
    """How many processes of the innermost group (and those below it) the kernel has killed for memory so far.

    A process that was killed for memory and one that somebody killed both end by signal 9: this count tells them apart.
    """
    for folder in reversed(folders()):
        for name in ("memory.events", "memory.oom_control"):
            try:
                fields = dict(line.split() for line in (folder / name).read_text().splitlines())
                return int(fields["oom_kill"])
            except (OSError, ValueError, KeyError):
                continue
    return 0
