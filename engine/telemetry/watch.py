"""`python -m engine.telemetry.watch FOLDER SESSION GPUS INTERVAL`: samples until standard input closes."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config.telemetry import GpuLost, Line, TelemetryEnd, TelemetryStart, Xid
from engine import nvml
from engine.cgroup import oom_kills
from engine.evidence import mend_torn_line
from engine.telemetry.gpu import GpuWatcher
from engine.telemetry.host import HostWatcher

LOOKS_A_SECOND = 10
"""How often used memory and Xid errors are looked at between samples."""


class Log:
    """One telemetry file of this session: each line one append, so that a kill leaves at most one torn line."""

    def __init__(self, path: Path, started: float) -> None:
        if path.exists():
            mend_torn_line(path)
        self._started, self.samples, self.open = started, 0, True
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def now(self) -> float:
        """Seconds since the session's start."""
        return round(time.monotonic() - self._started, 3)

    def write(self, line: Line) -> None:
        """Append one line."""
        os.write(self._descriptor, line.model_dump_json().encode() + b"\n")


def watch(folder: Path, session: int, gpus: int, interval: float, wait: Callable[[float], bool]) -> None:
    """Sample until `wait` says that it is over.

    Args:
        folder: where the files go.
        session: the arm's session.
        gpus: how many GPUs to watch.
        interval: seconds between samples.
        wait: sleeps for so many seconds; True when the end was asked for meanwhile.
    """
    started, killed_before = time.monotonic(), oom_kills()
    host, host_log = HostWatcher(session), Log(folder / "telemetry-host.jsonl", started)
    host_log.write(
        TelemetryStart(t=0.0, clock=started, interval=interval, gpu=None, uuid_sha256=None, xid_watched=False)
    )
    logs = [Log(folder / f"telemetry-gpu{index}.jsonl", started) for index in range(gpus)]
    with contextlib.ExitStack() as stack:
        watchers = begin(stack, logs, session, interval, started)
        due, over = started, False
        while not over:
            host_log.write(host.sample(host_log.now()))
            host_log.samples += 1
            for watcher, log in watchers.items():
                observe(watcher, log, full=True)
            due += interval
            while not over and (left := due - time.monotonic()) > 0:
                over = wait(min(left, 1 / LOOKS_A_SECOND) if watchers else left)
                for watcher, log in watchers.items():
                    observe(watcher, log, full=False)
            due = max(due, time.monotonic() - interval)  # after a suspended second there is no burst of samples
        for watcher, log in watchers.items():  # what was used at most since the last sample, up to the arm's end
            observe(watcher, log, full=True)
        host_log.write(TelemetryEnd(t=host_log.now(), samples=host_log.samples, oom_kills=oom_kills() - killed_before))
        for log in logs:
            log.write(TelemetryEnd(t=log.now(), samples=log.samples, oom_kills=None))


def begin(
    stack: contextlib.ExitStack, logs: list[Log], session: int, interval: float, started: float
) -> dict[GpuWatcher, Log]:
    """A watcher for every GPU that answers; the others' files say why there is none."""
    watchers: dict[GpuWatcher, Log] = {}
    binding: Any = None
    reason = "no GPU"
    if logs:
        try:
            binding = stack.enter_context(nvml.session())
        except nvml.NvmlAbsent as absent:
            reason = f"NVML: {absent.text}"
    for index, log in enumerate(logs):
        watcher = None
        if binding is not None:
            try:
                watcher = GpuWatcher(binding, index, session)
            except binding.NVMLError as error:
                reason = str(error)
        log.write(
            TelemetryStart(
                t=0.0,
                clock=started,
                interval=interval,
                gpu=index,
                uuid_sha256=watcher.uuid_sha256 if watcher else None,
                xid_watched=bool(watcher and watcher.hears_xid),
            )
        )
        if watcher:
            watchers[watcher] = log
        else:
            log.write(GpuLost(t=log.now(), reason=reason))
            log.open = False
    return watchers


def observe(watcher: GpuWatcher, log: Log, *, full: bool) -> None:
    """A sample, or the quick look between two; a board that stops answering is written down once and left alone."""
    import pynvml

    if not log.open:
        return
    try:
        for number in watcher.xids():
            log.write(Xid(t=log.now(), number=number))
        if full:
            log.write(watcher.sample(log.now()))
            log.samples += 1
        else:
            watcher.look()
    except pynvml.NVMLError as error:
        log.write(GpuLost(t=log.now(), reason=str(error)))
        log.open = False


def standard_input_closes(seconds: float) -> bool:
    """Sleep; True as soon as standard input has come to its end."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


if __name__ == "__main__":
    watch(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), standard_input_closes)
