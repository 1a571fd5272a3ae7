"""The record's writer: whole files, whole lines, a last word that needs no disk."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from config.errors import EnvironmentRefused
from config.lock import resolve
from config.record import EVENT, ArmEnd, LoadEnd, RequestStart, Status
from engine.evidence import STATUS_BYTES, EventLog, RunRecord, write_atomically


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    return RunRecord.create(tmp_path, resolve("cpu"))


def test_a_new_record_says_running_and_holds_its_lock(record: RunRecord) -> None:
    status = record.status()
    assert (status.state, status.pid) == ("running", os.getpid())
    lock = json.loads((record.path / "lock.json").read_text())
    assert lock["digest"] == resolve("cpu").digest


def test_two_records_of_one_second_have_two_names(tmp_path: Path) -> None:
    lock = resolve("cpu")
    assert len({RunRecord.create(tmp_path, lock).path for _ in range(20)}) == 20


def test_the_status_keeps_its_size_so_that_a_full_disk_takes_the_last_word(record: RunRecord) -> None:
    inode = (record.path / "status").stat().st_ino
    record.set_status("aborted", "x" * 5000)
    assert (record.path / "status").stat().st_size == STATUS_BYTES
    for letters in ("\N{PILE OF POO}" * 600, "\x00" * 600, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 600):
        record.set_status("aborted", letters)
        assert (record.path / "status").stat().st_size == STATUS_BYTES
        assert record.status().reason == letters[: len(record.status().reason)] != ""
    assert (record.path / "status").stat().st_ino == inode
    assert record.status().state == "aborted"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_place_is_one_message(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    with pytest.raises(EnvironmentRefused, match="no run record can be written"):
        RunRecord.create(blocked, resolve("cpu"))


def test_sequence_numbers_go_on_in_a_second_process_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "events-rank0.jsonl"
    log = EventLog(path, "driver", time.monotonic())
    log.write(LoadEnd, seconds=1.0)
    log.write(LoadEnd, seconds=2.0)
    log.close()
    with path.open("ab") as handle:
        handle.write(b'{"event":"load_end","t":1')
    EventLog(path, "worker", time.monotonic()).write(LoadEnd, seconds=3.0)
    EventLog(path, "driver", time.monotonic()).write(ArmEnd, outcome="complete")
    events = [EVENT.validate_json(line) for line in path.read_bytes().splitlines()]
    assert [(event.source, event.seq) for event in events] == [
        ("driver", 0),
        ("driver", 1),
        ("worker", 0),
        ("driver", 2),
    ]


def test_kill_9_at_any_moment_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events-rank0.jsonl"
    script = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from config.record import LoadEnd
        from engine.evidence import EventLog
        log = EventLog(Path({str(path)!r}), "worker", time.monotonic())
        while True:
            log.write(LoadEnd, seconds=1.0)
        """
    )
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", script])
        before = path.stat().st_size if path.exists() else 0
        while not path.exists() or path.stat().st_size < before + 10_000:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    numbers = [json.loads(line)["seq"] for line in path.read_bytes().splitlines()]
    assert numbers == list(range(len(numbers)))


def test_a_line_that_a_full_disk_cut_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events-rank0.jsonl"
    log = EventLog(path, "driver", time.monotonic())
    log.write(LoadEnd, seconds=1.0)
    whole = path.read_bytes()
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        with pytest.raises(OSError, match="10 were written"):
            log.write(LoadEnd, seconds=2.0)
    assert path.read_bytes() == whole
    log.write(ArmEnd, outcome="complete")
    assert [json.loads(line)["seq"] for line in path.read_bytes().splitlines()] == [0, 1]


def test_an_arm_that_could_not_end_itself_gets_an_end(record: RunRecord) -> None:
    path = record.arm_folder("dense") / "events-rank0.jsonl"
    EventLog(path, "driver", time.monotonic() - 5).write(LoadEnd, seconds=5.0)
    record.end_arm("dense", "aborted", "killed")
    last = list(record.events("dense"))[-1]
    assert (last["event"], last["outcome"], last["seq"]) == ("arm_end", "aborted", 1)
    assert last["t"] >= 5


def test_sample_numbers_go_on_where_the_arm_stopped(record: RunRecord) -> None:
    assert record.next_sample("dense") == 0
    (record.arm_folder("dense") / "sample-0").mkdir()
    (record.arm_folder("dense") / "sample-11").mkdir()
    assert record.next_sample("dense") == 12


def test_what_a_kill_left_half_done_is_discarded_before_a_record_is_added_to(record: RunRecord) -> None:
    arm = record.arm_folder("dense")
    for name in ("sample-0/timing.json", "sample-0/out.mp4", "sample-1/out.mp4", "sample-1/out.mp4.tmp"):
        (arm / name).parent.mkdir(exist_ok=True)
        (arm / name).write_bytes(b"")
    (record.path / ".benchmark.json.7.partial").write_bytes(b"")
    log = EventLog(arm / "events-rank0.jsonl", "driver", time.monotonic())
    log.write(RequestStart, sample=1, phase="measured", seed=0, num_inference_steps=5)
    record.discard_unfinished()
    files = {path.relative_to(record.path).as_posix() for path in record.path.rglob("*") if path.is_file()}
    assert files == {
        "status",
        "lock.json",
        "arms/dense/events-rank0.jsonl",
        "arms/dense/sample-0/timing.json",
        "arms/dense/sample-0/out.mp4",
    }
    assert record.next_sample("dense") == 2


def test_the_status_line_parses_as_its_model(record: RunRecord) -> None:
    Status.model_validate_json((record.path / "status").read_bytes())
