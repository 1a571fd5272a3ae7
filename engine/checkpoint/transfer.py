"""Jobs for the hub, with patience that ends: retries, waits that a server asks for, a watchdog, a second transport."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.errors import CheckpointError, EnvironmentRefused, Interrupted

POLL_SECONDS = 0.1
START_SECONDS = 120.0
"""For a worker to load its libraries, from a slow disk at worst. The watchdog's time begins after that."""


@dataclass(frozen=True)
class Patience:
    """When a transfer counts as stalled, and how often one that does not get on is tried again.

    stall_seconds, stall_bytes: fewer new bytes in that time, and the worker is ended. 64 KiB a minute is far below any
    line on which 144 GB would arrive within a month. attempts: in a row, without that much progress between them.
    """

    stall_seconds: float = 60.0
    stall_bytes: int = 64 * 1024
    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 300.0


class Failure(Exception):
    """One attempt that failed; kinds as in the worker, and `stalled` for one that the watchdog ended."""

    def __init__(self, kind: str, text: str, wait: float | None = None) -> None:
        self.kind, self.text, self.wait = kind, text, wait
        super().__init__(text)


class Worker:
    """The parent's handle on one worker process. Used by one thread; started at the first job and after each kill."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def ask(self, job: dict[str, Any], patience: Patience, progress: Callable[[], int]) -> Any:
        """Give it one job and wait for the answer.

        Args:
            job: as the worker reads it.
            patience: the watchdog's limits.
            progress: how many bytes there are by now.

        Raises:
            Failure: it failed, or stalled and was ended.
            Interrupted: `stop` was set.
        """
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        if not self._ready:
            self._await(process, lambda waited: waited > START_SECONDS, "did not start")
            self._ready = process.stdout.readline() == b"ready\n"
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        mark, marked = progress(), 0.0

        def stalled(waited: float) -> bool:
            nonlocal mark, marked
            if (now := progress()) - mark >= patience.stall_bytes:
                mark, marked = now, waited
            return waited - marked > patience.stall_seconds

        self._await(process, stalled, f"too few bytes came in {patience.stall_seconds:g} s")
        line = process.stdout.readline()
        if not line:
            self.close()
            raise Failure("retry", f"the worker process ended with code {process.returncode}")
        answer = json.loads(line)
        if "refused" in answer:
            raise Failure(answer["refused"], answer["text"], answer["wait"])
        return answer["result"]

    def _await(self, process: subprocess.Popen[bytes], hopeless: Callable[[float], bool], text: str) -> None:
        """Wait until the process says something. Asks again and again, with the seconds waited, whether to go on.

        Raises:
            Failure: it is hopeless; the process was ended.
            Interrupted: `stop` was set.
        """
        assert process.stdout is not None
        began = time.monotonic()
        while not select.select([process.stdout], [], [], POLL_SECONDS)[0]:
            if self._stop.is_set():
                self.close()
                raise Interrupted("the fetch was stopped")
            if hopeless(time.monotonic() - began):
                self.close()
                raise Failure("stalled", text)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._ready = False
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.checkpoint.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]
            self._process = None


def persist(
    worker: Worker,
    job: dict[str, Any],
    patience: Patience,
    stop: threading.Event,
    *,
    what: str,
    progress: Callable[[], int] = lambda: 0,
    say: Callable[[str], None] = lambda text: None,
    fell_back: Callable[[], None] = lambda: None,
) -> Any:
    """A job's result, after as many attempts as there is patience for.

    Args:
        what: the job in words, for messages.
        progress: bytes that are there by now; the patience begins anew when enough of them came.
        say: gets a line about each attempt that failed.
        fell_back: called when Xet is given up for plain HTTP.

    Raises:
        CheckpointError: refused, or no attempt got on.
        EnvironmentRefused: the disk is full or not writable.
        Interrupted: `stop` was set.
    """
    failures, wait = 0, patience.first_wait
    while True:
        before = progress()
        try:
            return worker.ask(job, patience, progress)
        except Failure as failure:
            if failure.kind in ("denied", "missing", "disk"):
                raise final(failure, job, what) from None
            if progress() - before >= patience.stall_bytes:
                failures, wait = 0, patience.first_wait
            failures += 1
            if job.get("transport") == "xet":
                # A Xet client that stalls goes on stalling (xet-core 850); plain HTTP resumes at the same byte.
                job = {**job, "transport": "http"}
                fell_back()
                say(f"{what}: Xet failed ({failure.text}); going on over HTTP")
                continue
            if failures >= patience.attempts:
                raise CheckpointError(
                    f"{what}: {failures} attempts in a row did not get on, the last one: {failure.text}",
                    needed=f"a connection to {job['endpoint']} that delivers",
                    remedy="check network and proxy and type the same command again; what arrived is kept",
                ) from None
            pause = min(failure.wait if failure.wait is not None else wait, patience.longest_wait)
            say(f"{what}: {failure.text}; attempt {failures + 1} of {patience.attempts} in {pause:g} s")
            if stop.wait(pause):
                raise Interrupted("the fetch was stopped") from None
            wait = min(2 * wait, patience.longest_wait)


def final(failure: Failure, job: dict[str, Any], what: str) -> CheckpointError | EnvironmentRefused:
    """The message for a refusal that no further attempt changes (field report 10)."""
    if failure.kind == "disk":
        return EnvironmentRefused(
            f"{what}: {failure.text}",
            needed="a writable directory with free space",
            remedy="free some space or name another directory with --dest; what arrived is kept",
        )
    repo = job["repo"]
    if failure.kind == "missing":
        return CheckpointError(
            f"{what}: not to be had from {job['endpoint']}: {failure.text}",
            needed=f"{repo} at revision {job['revision']}",
            remedy="a gated repository looks like this without a token: see `sol fetch --help`; or HF_ENDPOINT names a "
            "mirror that lacks it; or HF_HUB_OFFLINE is set",
        )
    token = "a token was sent" if job["token"] else "no token was sent"
    return CheckpointError(
        f"{what}: {job['endpoint']} refuses access ({failure.text}; {token})",
        needed=f"access to {repo}",
        remedy=f"one of three: the licence is not accepted (open https://huggingface.co/{repo} while logged in); the "
        "token is absent, expired or not passed into the container (HF_TOKEN, or HF_TOKEN_FILE naming a file or "
        "secret); or the repository's id is wrong",
    )


def part_size(path: Path) -> int:
    """Bytes of a part file; 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
