"""Whether a record is being written: seen from another container, after a kill, and where a number is used again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from config.errors import UsageError
from config.hold import held, hold, pid_namespace, started
from config.lock import resolve
from engine.evidence import RunRecord
from entrypoints.signing import sign_record
from verify import reader
from verify.files import Files
from verify.reader import boot_hash, read_status

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
WRITER = textwrap.dedent(
    """
    import os, sys, time
    from pathlib import Path
    from config.hold import hold
    from engine.evidence import RunRecord
    with hold(Path(sys.argv[1])) as free:
        RunRecord(Path(sys.argv[1])).set_status("running")
        print(free, os.getpid(), flush=True)
        time.sleep(600)
    """
)

Writer = Callable[..., tuple[subprocess.Popen[str], int]]


def state(record: Path) -> str:
    return read_status(Files(record)).state


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return RunRecord.create(tmp_path, resolve("cpu")).path


@pytest.fixture
def writer() -> Iterator[Writer]:
    """Starts a process that holds a record and says that it is running; ends it after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(record: Path, *before: str) -> tuple[subprocess.Popen[str], int]:
        command = [*before, sys.executable, "-c", WRITER, str(record)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        free, pid = process.stdout.readline().split()
        assert free == "True"
        return process, int(pid)

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def container() -> list[str]:
    """What puts a command into a PID namespace of its own."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a PID namespace")
    return UNSHARE


def wait_until_free(record: Path) -> None:
    deadline = time.monotonic() + 20
    while held(record) and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_record_written_in_another_container_is_running_and_is_not_signed(
    record: Path, writer: Writer, container: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("config.hold.PATIENCE_SECONDS", 0.2)
    _, pid = writer(record, *container)
    fields = json.loads((record / "status").read_text())
    fields["pid"] = 1 << 30  # a number that no process has outside
    (record / "status").write_text(json.dumps(fields) + "\n")
    assert fields["pid_namespace"] != pid_namespace() and pid < 1000
    assert state(record) == "running"
    with pytest.raises(UsageError, match="is still being written"):
        sign_record(record, None)
    assert not (record / "attestation.json").exists()


def test_a_record_whose_container_was_killed_is_aborted_whoever_has_the_number_now(
    record: Path, writer: Writer, container: list[str]
) -> None:
    process, pid = writer(record, *container)
    assert Path(f"/proc/{pid}").exists(), "the number is one that a process outside has, as 1 always is"
    process.kill()
    process.wait()
    wait_until_free(record)
    found = read_status(Files(record))
    assert found.state == "aborted" and f"process {pid} is gone" in found.reason
    sign_record(record, None)
    assert json.loads((record / "status").read_text())["state"] == "aborted"
    assert (record / "attestation.json").exists()


def test_a_killed_process_lets_go_of_its_record(record: Path, writer: Writer) -> None:
    process, _ = writer(record)
    assert state(record) == "running" and held(record)
    process.kill()
    process.wait()
    assert state(record) == "aborted" and held(record) is False


def test_a_number_that_another_process_has_now_is_not_the_run(record: Path) -> None:
    assert state(record) == "running"
    fields = json.loads((record / "status").read_text())
    assert (fields["pid"], fields["started"]) == (os.getpid(), started(os.getpid()))
    (record / "status").write_text(json.dumps({**fields, "started": fields["started"] - 1}) + "\n")
    assert state(record) == "aborted"


def test_a_zombie_is_not_the_run(record: Path, writer: Writer) -> None:
    process, _ = writer(record)
    process.kill()
    wait_until_free(record)
    assert Path(f"/proc/{process.pid}").exists()
    assert state(record) == "aborted"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pid_namespace": 1}, "running"),  # another container's number means nothing: rather wait
        ({"pid_namespace": pid_namespace(), "started": started(os.getpid())}, "running"),
        ({"pid_namespace": pid_namespace(), "started": 1}, "aborted"),
        ({}, "running"),
        ({"pid": 1 << 30}, "aborted"),
        ({"pid_namespace": 1, "host_hash": "0" * 16}, "aborted"),
    ],
)
def test_without_locks_the_process_is_looked_for(
    record: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], expected: str
) -> None:
    monkeypatch.setattr(reader, "held", lambda directory: None)
    status = {"state": "running", "reason": "", "pid": os.getpid(), "host_hash": boot_hash(), **fields}
    (record / "status").write_text(json.dumps(status) + "\n")
    assert state(record) == expected


def test_a_status_of_an_earlier_release_is_read(record: Path) -> None:
    (record / "status").write_text('{"state":"complete","reason":"","pid":7,"host_hash":"00"}\n')
    found = read_status(Files(record))
    assert (found.state, found.pid_namespace, found.started) == ("complete", 0, 0)


def test_readers_do_not_keep_a_writer_out_and_a_second_writer_is(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("config.hold.PATIENCE_SECONDS", 0.2)
    assert held(record) is False and held(record) is False
    with hold(record) as first, hold(record) as second:
        assert (first, second) == (True, False)
        assert held(record) is True
    assert held(record) is False
    assert held(record / "absent") is None
