"""Whether a record is being written: the lock on its directory, and which process a number means.

The lock is `flock` on the directory itself: it needs no file, ends with its holder however that ends, and counts in
every container that has the directory. The process in `status` is for file systems without such locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_SECONDS = 2.0
"""A reader that asks holds the lock for an instant; whoever wants to write tries again for so long."""


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[bool]:
    """Hold the directory's lock; yields whether nobody else does. A file system without locks gives it to everybody.

    Raises:
        OSError: the directory cannot be opened.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (got := _lock(descriptor, fcntl.LOCK_EX)) is False and time.monotonic() < deadline:
            time.sleep(0.05)
        yield got is not False
    finally:
        os.close(descriptor)


def held(directory: Path) -> bool | None:
    """Whether a process holds the directory's lock; None where that cannot be asked."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        got = _lock(descriptor, fcntl.LOCK_SH)
        return None if got is None else not got
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool | None:
    """Whether the lock was got; None where the file system has none."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def pid_namespace() -> int:
    """What tells this process's PID namespace from the others of this boot; 0 where the kernel does not say."""
    with contextlib.suppress(OSError):
        if match := re.search(r"\d+", os.readlink("/proc/self/ns/pid")):
            return int(match[0])
    return 0


def started(pid: int) -> int:
    """When a process of this namespace started, in clock ticks since boot; 0 where there is none, or only its
    remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0
