"""One look at the host and at the arm's processes, from /proc alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

from config.telemetry import HostSample

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 2**20


def members(session: int) -> list[int]:
    """Processes of a session."""
    out = []
    for name in os.listdir(PROC):
        if name.isdigit():
            try:
                if os.getsid(int(name)) == session:
                    out.append(int(name))
            except OSError:  # gone, or another user's
                continue
    return out


def belongs(pid: int, session: int) -> bool:
    """Whether a process is of a session, or descends from one that is: a worker may begin a session of its own."""
    while pid > 1:
        try:
            if os.getsid(pid) == session:
                return True
            pid = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return False
    return False


class HostWatcher:
    """Keeps the counters of the last look, so that a sample holds what happened since."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._arm_ticks: dict[int, int] = {}
        self._busy_ticks, self._refaults, self._when = _busy_ticks(), _refaults(), time.monotonic()

    def sample(self, t: float) -> HostSample:
        """Look now."""
        resident = anonymous = locked = 0
        ticks: dict[int, int] = {}
        for pid in members(self._session):
            try:
                resident += int((PROC / str(pid) / "statm").read_text().split()[1]) * PAGE
                status = (PROC / str(pid) / "status").read_text()
                anonymous += _kib(status, "RssAnon:") * 1024
                locked += _kib(status, "VmLck:", "VmPin:") * 1024
                fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
                ticks[pid] = int(fields[11]) + int(fields[12])
            except (OSError, IndexError, ValueError):  # it ended meanwhile
                continue
        arm = sum(count - self._arm_ticks.get(pid, 0 if self._arm_ticks else count) for pid, count in ticks.items())
        now, busy, refaults = time.monotonic(), _busy_ticks(), _refaults()
        elapsed = max(now - self._when, 1e-3)
        memory = dict(line.split(":", 1) for line in (PROC / "meminfo").read_text().splitlines())
        out = HostSample(
            t=t,
            processes=len(ticks),
            rss_mib=round(resident / MIB, 1),
            anonymous_mib=round(anonymous / MIB, 1),
            pinned_mib=round(locked / MIB, 1),
            available_mib=int(memory["MemAvailable"].split()[0]) // 1024,
            page_cache_mib=int(memory["Cached"].split()[0]) // 1024,
            pressure=_pressure(),
            refaults=max(0, refaults - self._refaults),
            arm_cores=round(max(0, arm) / TICKS / elapsed, 3),
            busy_cores=round((busy - self._busy_ticks) / TICKS / elapsed, 3),
        )
        self._arm_ticks, self._busy_ticks, self._refaults, self._when = ticks, busy, refaults, now
        return out


def _kib(status: str, *names: str) -> int:
    """The sum of some lines of /proc/<pid>/status, KiB."""
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(names))


def _busy_ticks() -> int:
    """Ticks of all cores that were neither idle nor waiting for a disk."""
    fields = list(map(int, (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]))
    return sum(fields) - fields[3] - fields[4]


def _refaults() -> int:
    """Pages of files that were in the page cache, were dropped, and had to be read again."""
    for line in (PROC / "vmstat").read_text().splitlines():
        if line.startswith(("workingset_refault_file ", "workingset_refault ")):
            return int(line.split()[1])
    return 0


def _pressure() -> float | None:
    """`some avg10` of the kernel's memory pressure, percent; None where the kernel does not keep it."""
    try:
        first = (PROC / "pressure" / "memory").read_text().splitlines()[0]
        return float(first.split()[1].removeprefix("avg10="))
    except (OSError, IndexError, ValueError):
        return None
