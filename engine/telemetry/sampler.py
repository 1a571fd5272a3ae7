"""The run's handle on the process that samples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

INTERVAL_SECONDS = 1.0
GRACE_SECONDS = 5.0


class Sampler:
    """Samples an arm until `stop`. When the run is killed, the sampler ends by itself: its standard input closes."""

    def __init__(self, folder: Path, session: int, gpus: int, *, interval: float = INTERVAL_SECONDS) -> None:
        """Start it.

        Args:
            folder: arms/<arm> of the record.
            session: the arm's process id, which is its session's: every process of the session is the arm's.
            gpus: how many GPUs to watch, from the first; 0 on a CPU target.
            interval: seconds between samples.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.telemetry.watch", str(folder), str(session), str(gpus), str(interval)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is the run's to handle
        )

    @property
    def pid(self) -> int:
        """The sampling process."""
        return self._process.pid

    def stop(self) -> None:
        """Let it write its last lines, and end it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(GRACE_SECONDS)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
