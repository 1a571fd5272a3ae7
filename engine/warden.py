"""`python -m engine.warden RECORD`: outlives a killed parent just long enough to end its arm and close its record.

The parent holds the other end of standard input. When it closes without the word `done`, the parent was killed: the
warden kills the arm's whole process group (no orphan keeps a GPU or a port) and writes `aborted` into the status.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType


class Warden:
    """The parent's handle on its warden."""

    def __init__(self, record: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.warden", str(record)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
        )

    def watch(self, group: int) -> None:
        """From now on this process group dies with the parent; 0 means none."""
        self._say(f"watch {group}")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed the warden: the run goes on without it
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def __enter__(self) -> Warden:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._say("done")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def main(record: str) -> None:
    """Wait for the parent's last word."""
    group = 0
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "done":
            return
        group = int(rest[0])
    if group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    from engine.evidence import RunRecord

    RunRecord(Path(record)).set_status("aborted", "the process that ran the benchmark was killed")


if __name__ == "__main__":
    main(sys.argv[1])
