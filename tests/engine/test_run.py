"""Processes end: a group with its grandchildren, an arm whose parent is killed, an arm that says nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from config.errors import Exit, GateFailed, InvalidRecord
from config.lock import load_target, resolve
from config.record import ArmEnd, ArmStart, LoadEnd, RequestEnd, RequestStart
from engine.evidence import EventLog, RunRecord
from engine.h3.spec import ArmSpec
from engine.run import ArmOutcome, close_arm, during, end_group, mend, requests_of, require_green, run_arm
from engine.warden import Warden

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
FAMILY = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]); time.sleep(600)"


class Quiet:
    """Sees nothing."""

    def on_arm(self, arm: str) -> None: ...

    def on_event(self, arm: str, event: dict[str, object]) -> None: ...

    def tick(self) -> None: ...


def alive(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return found


def eventually(condition: object, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def family() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, start_new_session=True, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


def test_a_group_ends_with_grandchildren_that_ignore_sigterm() -> None:
    process = family()
    assert len(alive(process.pid)) == 2
    end_group(process, 0.3)
    process.wait()
    assert eventually(lambda: not alive(process.pid))


def test_ending_a_group_that_is_gone_is_quiet() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    end_group(process, 1.0)


def test_the_warden_ends_the_arm_of_a_killed_parent_and_closes_its_record(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, resolve("cpu"))
    script = textwrap.dedent(
        f"""
        import subprocess, sys, time
        from pathlib import Path
        from engine.warden import Warden
        with Warden(Path({str(record.path)!r})) as warden:
            arm = subprocess.Popen([sys.executable, "-c", {FAMILY!r}], start_new_session=True, stdout=subprocess.PIPE)
            arm.stdout.readline()
            warden.watch(arm.pid)
            print(arm.pid, flush=True)
            time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    assert len(alive(group)) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert eventually(lambda: not alive(group))
    assert eventually(lambda: record.status().state == "aborted")
    assert "killed" in record.status().reason


def test_the_warden_of_a_finished_run_touches_nothing(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, resolve("cpu"))
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    with Warden(record.path) as warden:
        warden.watch(bystander.pid)
        warden.watch(0)
    assert record.status().state == "running"
    assert bystander.poll() is None
    end_group(bystander, 0)
    bystander.wait()


def test_an_arm_killed_before_its_last_event_is_closed_with_the_signal(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, resolve("cpu"))
    record.arm_folder("dense")
    close_arm(record, "dense", -9, "")
    close_arm(record, "dense", -9, "")
    ends = [event for event in record.events("dense") if event["event"] == "arm_end"]
    assert [(end["outcome"], end["reason"]) for end in ends] == [
        ("aborted", "the arm's process was killed by signal 9")
    ]


def test_an_arm_that_dies_at_once_has_not_the_outcome_of_the_process_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Added samples: the first process ended as complete, the second one before its first event."""
    lock = resolve("cpu")
    record = RunRecord.create(tmp_path / "runs", lock)
    log = EventLog(record.arm_folder("dense") / "events-rank0.jsonl", "driver", time.monotonic())
    log.write(ArmStart, arm="dense", rank=0, seams=())
    log.write(ArmEnd, outcome="complete")
    log.close()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *engine.h3.arm*) exit 7;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    spec = ArmSpec(
        record=str(record.path),
        arm="dense",
        lock=lock,
        checkpoint=str(tmp_path),
        requests=requests_of(lock.resolved, 1, 2),
    )
    with Warden(record.path) as warden:
        outcome = run_arm(record, spec, tmp_path / "log", warden, Quiet())
    assert outcome == ArmOutcome(arm="dense", outcome="aborted", reason="the arm's process ended with code 7")
    assert list(record.events("dense"))[-1]["outcome"] == "aborted"


def test_what_a_killed_run_left_is_mended_before_a_record_is_added_to(tmp_path: Path) -> None:
    """The run and all its processes were killed: no arm_end, lines cut in the middle, an arm that had not begun."""
    record = RunRecord.create(tmp_path, resolve("cpu"))
    log = EventLog(record.arm_folder("dense") / "events-rank0.jsonl", "driver", time.monotonic())
    log.write(ArmStart, arm="dense", rank=0, seams=())
    log.close()
    whole = {}
    for name in ("events-rank0.jsonl", "telemetry-host.jsonl"):
        path = record.arm_folder("dense") / name
        whole[name] = path.read_bytes() if path.exists() else b""
        path.write_bytes(whole[name] + b'{"event":')
    record.end_arm("fullopt", "aborted", "interrupted by SIGINT")  # while it imported its packages
    mend(record)
    mend(record)
    dense = list(record.events("dense"))
    assert [(event["event"], event["seq"]) for event in dense] == [("arm_start", 0), ("arm_end", 1)]
    assert (dense[-1]["outcome"], dense[-1]["reason"]) == (
        "aborted",
        "the process that ran the benchmark was killed",
    )
    assert (record.arm_folder("dense") / "telemetry-host.jsonl").read_bytes() == b""
    assert not (record.path / "arms/fullopt").exists()


def test_field_report_17_the_error_says_in_which_request_it_happened(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, resolve("cpu"))
    assert during(record, "dense") == "before it started"
    log = EventLog(record.arm_folder("dense") / "events-rank0.jsonl", "driver", time.monotonic())
    log.write(ArmStart, arm="dense", rank=0, seams=())
    assert during(record, "dense") == "while loading"
    log.write(LoadEnd, seconds=1.0)
    for sample, phase in ((0, "warmup"), (1, "measured")):
        log.write(RequestStart, sample=sample, phase=phase, seed=0, num_inference_steps=2)
        assert during(record, "dense") == f"in sample {sample} ({phase})"
        log.write(RequestEnd, sample=sample, seconds=1.0)
        assert during(record, "dense") == "between two requests"
    log.close()


def test_a_process_warms_up_and_then_measures() -> None:
    target = load_target("rtx4090")
    warmup, *measured = requests_of(target, 3, 4)
    assert (warmup.sample, warmup.phase, warmup.seed, warmup.num_inference_steps) == (4, "warmup", 1, 50)
    assert [(request.sample, request.phase, request.seed) for request in measured] == [
        (5, "measured", 0),
        (6, "measured", 0),
        (7, "measured", 0),
    ]


def test_a_red_gate_is_raised_after_the_run() -> None:
    require_green([ArmOutcome(arm="dense", outcome="complete", reason="")])
    with pytest.raises(GateFailed, match="fullopt: too far") as caught:
        require_green([ArmOutcome(arm="fullopt", outcome="gate_failed", reason="too far")])
    assert caught.value.exit_code is Exit.GATE


def test_an_arm_without_a_gate_is_raised_after_the_run() -> None:
    with pytest.raises(InvalidRecord, match="arm fullopt was never gated: no sparse call") as caught:
        require_green([ArmOutcome(arm="fullopt", outcome="ungated", reason="no sparse call")])
    assert caught.value.exit_code is Exit.INVALID_RECORD
