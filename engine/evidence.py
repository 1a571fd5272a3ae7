"""The run record's writer. Nothing that was finished is lost: whole files appear by rename, event lines by one append
each."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from config.canonical import sha256_bytes
from config.errors import EnvironmentRefused
from config.hold import pid_namespace, started
from config.lock import Lock, lock_json
from config.record import ENVIRONMENT, LOCK, STATUS, Environment, Event, Outcome, Status

STATUS_BYTES = 1024
"""`status` keeps one size, so that the last word can be written in place on a full disk."""

GATE_FILE = re.compile(r"gate-rank\d+\.(?:json|safetensors)")


def utc_now() -> str:
    """Now, as the record writes times."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def boot_hash() -> str:
    """16 hex digits of the boot id's SHA-256, or empty where the kernel tells none."""
    with contextlib.suppress(OSError):
        return sha256_bytes(Path("/proc/sys/kernel/random/boot_id").read_bytes().strip())[:16]
    return ""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old bytes, or all of the new ones, whenever the process is killed.

    Raises:
        OSError: the disk is full or the folder not writable; the old file is untouched.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_model(path: Path, model: BaseModel) -> None:
    """Write one model as indented JSON with sorted keys, atomically."""
    text = json.dumps(model.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False)
    write_atomically(path, (text + "\n").encode())


class EventLog:
    """Appends to events-rank<N>.jsonl. Several processes may hold one file: each line is one `write` of an O_APPEND
    descriptor."""

    def __init__(self, path: Path, source: Literal["driver", "worker"], started: float) -> None:
        """Open or create the file; sequence numbers go on where an earlier process of the same source stopped.

        Args:
            path: the file.
            source: who writes.
            started: `time.monotonic()` when the arm's process began; event times count from it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._source, self._started = source, started
        self._sequence = _next_sequence(path, source)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, kind: type[Event], /, **fields: Any) -> None:
        """Append one event.

        Raises:
            OSError: the line could not be written whole.
        """
        elapsed = round(time.monotonic() - self._started, 6)
        event = kind(t=elapsed, seq=self._sequence, source=self._source, **fields)
        line = event.model_dump_json().encode() + b"\n"
        before = os.fstat(self._descriptor).st_size
        if (written := os.write(self._descriptor, line)) != len(line):
            os.ftruncate(self._descriptor, before)  # a torn line would swallow the next one
            raise OSError(errno.ENOSPC, f"event of {len(line)} bytes: {written} were written")
        self._sequence += 1

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _next_sequence(path: Path, source: str) -> int:
    if not path.exists():
        return 0
    mend_torn_line(path)
    numbers = (json.loads(line) for line in path.read_bytes().splitlines())
    return max((event["seq"] + 1 for event in numbers if event["source"] == source), default=0)


def mend_torn_line(path: Path) -> None:
    """Cut a last line that a kill or a full disk left incomplete, so that the next event starts a line of its own."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)


class RunRecord:
    """A record being written. The parent process owns it; an arm's process writes inside arms/<arm> only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, out: Path, lock: Lock) -> RunRecord:
        """A new record under `out`, with its lock, and a status that says running.

        Raises:
            EnvironmentRefused: the directory cannot be made or written.
        """
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{lock.target}-{secrets.token_hex(4)}"
        record = cls(out / name)
        try:
            record.path.mkdir(parents=True)
            record._reserve_status()
            record.set_status("running")
            write_atomically(record.path / LOCK, lock_json(lock))
        except OSError as error:
            raise EnvironmentRefused(
                f"no run record can be written under {out}: {error.strerror}",
                needed="a writable directory with free space",
                remedy="pass --out DIR, or free some space",
            ) from error
        return record

    def _reserve_status(self) -> None:
        with (self.path / STATUS).open("wb") as handle:
            handle.write(b" " * (STATUS_BYTES - 1) + b"\n")
            handle.flush()
            os.fsync(handle.fileno())

    def set_status(self, state: Literal["running", "complete", "aborted"], reason: str = "") -> None:
        """Write `status` in place: no new disk block is needed for the last word of a run on a full disk."""
        status = Status(
            state=state,
            reason="",
            pid=os.getpid(),
            host_hash=boot_hash(),
            pid_namespace=pid_namespace(),
            started=started(os.getpid()),
        )
        reason, line = reason[:600], b" " * STATUS_BYTES
        while len(line) >= STATUS_BYTES:  # letters beyond ASCII take more bytes, a control character six
            line = status.model_copy(update={"reason": reason}).model_dump_json().encode()
            reason = reason[: len(reason) * 9 // 10]
        descriptor = os.open(self.path / STATUS, os.O_WRONLY)
        try:
            os.pwrite(descriptor, line.ljust(STATUS_BYTES - 1) + b"\n", 0)
        finally:
            os.close(descriptor)

    def status(self) -> Status:
        """The status as it stands."""
        return Status.model_validate_json((self.path / STATUS).read_bytes().strip())

    def write_environment(self, environment: Environment) -> None:
        """Write environment.json."""
        write_model(self.path / ENVIRONMENT, environment)

    def arm_folder(self, arm: str) -> Path:
        """arms/<arm>, made when it is not there."""
        folder = self.path / "arms" / arm
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def next_sample(self, arm: str) -> int:
        """The first sample number that the arm has not used, not even for a sample that was cut."""
        numbers = [int(path.name.removeprefix("sample-")) for path in (self.path / "arms" / arm).glob("sample-*")]
        numbers += [event["sample"] for event in self.events(arm) if "sample" in event]
        return max(numbers, default=-1) + 1

    def discard_unfinished(self) -> None:
        """Remove what a kill left half done: partial files, and the samples that have no timing.json but for a gate.

        A record that is added to must hold nothing that has no place in a record. The events keep telling of the cut,
        and of the gate: its report and its slice stay, red or green.
        """
        for path in self.path.rglob(".*.partial"):
            path.unlink()
        for folder in self.path.glob("arms/*/sample-*"):
            if (folder / "timing.json").is_file():
                continue
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif not GATE_FILE.fullmatch(path.name):
                    path.unlink()
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def events(self, arm: str, rank: int = 0) -> Iterator[dict[str, Any]]:
        """The arm's events so far; a torn last line is left out."""
        path = self.path / "arms" / arm / f"events-rank{rank}.jsonl"
        if path.exists():
            for line in path.read_bytes().split(b"\n")[:-1]:
                yield json.loads(line)

    def end_arm(self, arm: str, outcome: Outcome, reason: str) -> None:
        """Write an arm's last event for a process that could not."""
        from config.record import ArmEnd

        path = self.arm_folder(arm) / "events-rank0.jsonl"
        last = max((event["t"] for event in self.events(arm)), default=0.0)
        log = EventLog(path, "driver", time.monotonic() - last)
        log.write(ArmEnd, outcome=outcome, reason=reason)
        log.close()
