"""What may be added to, and what an interrupted run leaves to be added to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from config.errors import EnvironmentRefused, Interrupted, InvalidRecord, UsageError
from config.lock import Lock, resolve
from config.record import ArmStart, Environment, RequestStart
from engine.evidence import EventLog, RunRecord
from entrypoints.benchmark import BenchmarkOptions, abort, interrupts_raise, open_record, require_open
from entrypoints.console import make_console
from entrypoints.signing import sign_record
from tests.verify.builder import Builder
from verify.files import Files
from verify.reader import read_status

HOLDER = textwrap.dedent(
    """
    import contextlib, sys, time
    from pathlib import Path
    from config.lock import Lock
    from config.record import Environment
    from entrypoints.benchmark import open_record
    record = Path(sys.argv[1])
    lock = Lock.model_validate_json((record / "lock.json").read_bytes())
    environment = Environment.model_validate_json((record / "environment.json").read_bytes())
    with contextlib.ExitStack() as locks:
        open_record(record, record.parent, lock, environment, locks)
        print("up", flush=True)
        time.sleep(600)
    """
)


@pytest.fixture
def lock() -> Lock:
    return resolve("cpu")


@pytest.fixture
def environment() -> Environment:
    builder = Builder()
    builder.lock = resolve("cpu")
    builder.t = builder.lock.resolved
    fields = builder.environment()
    return Environment.model_validate({**fields, "image_digest": "sha256:" + "1" * 64, "source_revision": "a" * 40})


@pytest.fixture
def record(tmp_path: Path, lock: Lock, environment: Environment) -> Path:
    """A record of a run that was aborted."""
    with contextlib.ExitStack() as locks:
        made = open_record(None, tmp_path, lock, environment, locks)
        assert read_status(Files(made.path)).state == "running"
        made.set_status("aborted", "killed")
    return made.path


def reopen(record: Path, lock: Lock, environment: Environment) -> None:
    with contextlib.ExitStack() as locks:
        open_record(record, record.parent, lock, environment, locks)


def options(record: Path, *, sign: bool = True) -> BenchmarkOptions:
    return BenchmarkOptions(
        target="cpu",
        arms=["fullopt"],
        samples=None,
        overrides=["request.prompt=a b"],
        out=record.parent,
        resume=None,
        key=None,
        sign=sign,
        checkpoint=None,
        as_json=False,
    )


def test_an_interrupted_run_is_closed_but_not_signed_so_that_it_can_be_added_to(
    record: Path, lock: Lock, environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = RunRecord(record)
    writer.set_status("running")
    with pytest.raises(Interrupted) as caught, interrupts_raise():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except BaseException as error:
            abort(make_console(), writer, error, options(record))
            raise
    assert "aborted, not signed" in capsys.readouterr().out
    assert caught.value.found == "interrupted by SIGINT"
    command = f"sol benchmark cpu --resume {record} --arm fullopt --set 'request.prompt=a b'"
    assert f"`{command}` adds to the record" in caught.value.remedy
    assert f"`sol sign {record}` closes and signs it as it is" in caught.value.remedy
    assert {path.name for path in record.iterdir()} == {"status", "lock.json", "environment.json", "benchmark.json"}
    assert writer.status().state == "aborted"
    reopen(record, lock, environment)
    assert writer.status().state == "running"


def test_whoever_wants_it_signs_an_interrupted_record_which_closes_it(
    record: Path, lock: Lock, environment: Environment
) -> None:
    sign_record(record, None)
    assert (record / "attestation.json").is_file()
    with pytest.raises(UsageError, match="a signed record is closed"):
        reopen(record, lock, environment)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lock.json", b"garbage"),
        ("lock.json", b"{}"),
        ("environment.json", b"garbage"),
        ("environment.json", b"{}"),
        ("environment.json", None),
    ],
)
def test_a_damaged_record_is_named_and_not_added_to(
    record: Path, lock: Lock, environment: Environment, name: str, content: bytes | None
) -> None:
    if content is None:
        (record / name).unlink()
    else:
        (record / name).write_bytes(content)
    with pytest.raises(InvalidRecord, match=name):
        reopen(record, lock, environment)


def test_a_record_of_the_same_machine_and_software_is_added_to(
    record: Path, lock: Lock, environment: Environment
) -> None:
    later = environment.model_copy(update={"captured_at": "2031-01-01T00:00:00Z", "memory_available_mib": 1})
    reopen(record, lock, later)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("image_digest", "", "now: none"),
        ("differences", ("the run is outside the target's image", "3 files changed"), "now: the run is outside"),
        ("source_revision", "b" * 40, "now: bbbb"),
        ("python", "3.99.0", "now: 3.99.0"),
    ],
)
def test_resume_in_another_image_or_code_is_refused_by_name(
    record: Path, lock: Lock, environment: Environment, field: str, value: object, said: str
) -> None:
    before = (record / "environment.json").read_bytes()
    with pytest.raises(EnvironmentRefused, match=field) as caught:
        reopen(record, lock, environment.model_copy(update={field: value}))
    assert said in caught.value.found
    assert RunRecord(record).status().state == "aborted"
    assert (record / "environment.json").read_bytes() == before


def test_resume_of_a_record_that_is_being_written_is_refused(
    record: Path, lock: Lock, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("config.hold.PATIENCE_SECONDS", 0.2)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(record)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        log = EventLog(record / "arms/fullopt/events-rank0.jsonl", "driver", time.monotonic())
        log.write(ArmStart, arm="fullopt", rank=0, seams=())
        log.write(RequestStart, sample=1, phase="measured", seed=0, num_inference_steps=5)
        half = record / "arms/fullopt/sample-1/out.mp4"
        half.parent.mkdir()
        half.write_bytes(b"half")
        with pytest.raises(UsageError, match="still being written"):
            require_open(record)
        with pytest.raises(UsageError, match="still being written"):
            reopen(record, lock, environment)
        running = (record / "status").read_bytes()
        RunRecord(record).set_status("complete")  # it is about to sign, and holds the record until it has
        with pytest.raises(UsageError, match="still being written"):
            reopen(record, lock, environment)
        with pytest.raises(UsageError, match="still being written"):
            sign_record(record, None)
        (record / "status").write_bytes(running)
        assert half.read_bytes() == b"half" and len(list(RunRecord(record).events("fullopt"))) == 2
    finally:
        process.kill()
        process.wait()
    reopen(record, lock, environment)  # its process is gone
    assert not half.exists()
    assert json.loads((record / "status").read_text())["pid"] == os.getpid()


def test_what_is_no_record_is_not_added_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run record"):
        require_open(tmp_path)
