"""Parsing a record: errors name file and line, and a run that was killed reads as aborted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import InvalidRecord, SolError
from tests.verify.builder import Builder, edit, edit_events
from verify.files import Files
from verify.reader import boot_hash, read_events, read_record, read_status
from verify.report import verify_record

STEP = b'{"event":"step","t":1.0,"seq":0,"source":"worker","sample":0,"step":0,"seconds":0.5,"timestep":0.1}\n'


def write_status(record: Path, **fields: object) -> None:
    status = {"state": "complete", "reason": "", "pid": 0, "host_hash": "", **fields}
    (record / "status").write_text(json.dumps(status) + "\n")


def dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_record_is_read(fresh: Callable[..., Path]) -> None:
    record = read_record(fresh())
    assert list(record.arms) == ["dense", "fullopt"] and not record.open
    assert record.arms["fullopt"].complete and list(record.arms["fullopt"].timings) == [0, 1]
    assert list(record.arms["fullopt"].gates) == ["arms/fullopt/gate-rank0.json"]


def test_resumed_arm_has_two_sessions(fresh: Callable[..., Path]) -> None:
    arm = read_record(fresh(arms=("fullopt",), resumed=("fullopt",))).arms["fullopt"]
    assert len(arm.sessions) == 2 and list(arm.timings) == [0, 1, 2, 3]
    assert list(arm.gates) == ["arms/fullopt/gate-rank0.json", "arms/fullopt/sample-2/gate-rank0.json"]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"state": "complete"}, "complete"),
        ({"state": "aborted", "reason": "Ctrl-C"}, "aborted"),
        ({"state": "running", "pid": os.getpid(), "host_hash": boot_hash()}, "running"),
        ({"state": "running", "pid": dead_process(), "host_hash": boot_hash()}, "aborted"),
        ({"state": "running", "pid": os.getpid(), "host_hash": "0" * 16}, "aborted"),
        ({"state": "running", "pid": -1, "host_hash": boot_hash()}, "aborted"),
        ({"state": "running", "pid": 1 << 40, "host_hash": boot_hash()}, "aborted"),
    ],
)
def test_status_of_a_run_whose_process_is_gone(tmp_path: Path, fields: dict[str, object], state: str) -> None:
    write_status(tmp_path, **fields)
    assert read_status(Files(tmp_path)).state == state


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "aborted", "reason": "SIGTERM"},
        {"state": "running", "pid": os.getpid(), "host_hash": boot_hash()},
        {"state": "running", "pid": dead_process(), "host_hash": boot_hash()},
    ],
)
def test_record_that_is_not_complete_is_invalid_and_says_why(fresh, fields: dict[str, object]) -> None:  # type: ignore[no-untyped-def]
    record = fresh()
    write_status(record, **fields)
    report = verify_record(record)
    assert (report.verdict, int(report.exit_code)) == ("INVALID", 13)
    found = next(finding for finding in report.findings if finding.check == "record-status")
    assert "SIGTERM" in found.message or "is gone" in found.message or "going on" in found.message


@pytest.mark.parametrize("missing", ["lock.json", "environment.json", "arms"])
def test_run_killed_before_a_file_was_written_still_says_aborted(fresh, missing: str) -> None:  # type: ignore[no-untyped-def]
    record = fresh()
    write_status(record, state="aborted", reason="killed")
    for path in sorted(record.rglob("*"), reverse=True):
        name = path.relative_to(record).as_posix()
        if name == missing or name.startswith(missing + "/") or name == "benchmark.json":
            path.rmdir() if path.is_dir() else path.unlink()
    report = verify_record(record)
    assert int(report.exit_code) == 13
    assert any("killed" in finding.message for finding in report.findings)


def test_torn_last_line_is_left_out_and_named() -> None:
    lines, torn = read_events(STEP + STEP[:-20], "e")
    assert len(lines) == 1 and torn
    assert read_events(STEP, "e")[1] is False and read_events(b"", "e") == ((), False)


def test_torn_line_in_an_aborted_record_is_reported_and_in_a_complete_one_invalid(fresh) -> None:  # type: ignore[no-untyped-def]
    record = fresh()
    path = record / "arms/dense/events-rank0.jsonl"
    path.write_bytes(path.read_bytes()[:-15])
    for state in ("complete", "aborted"):
        write_status(record, state=state)
        report = verify_record(record)
        assert int(report.exit_code) == 13
        assert any("torn" in f.message and f.where == "arms/dense/events-rank0.jsonl" for f in report.findings)


def test_bad_line_is_named_with_its_number() -> None:
    with pytest.raises(InvalidRecord, match="e, line 2 is not JSON"):
        read_events(STEP + b"{\n", "e")
    with pytest.raises(InvalidRecord, match="e, line 3 does not fit its schema: .*unknown"):
        read_events(STEP + STEP + b'{"event":"unknown"}\n', "e")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lock.json", lambda value: value.update(extra=1)),
        ("environment.json", lambda value: value.update(schema_version=2)),
        ("benchmark.json", lambda value: value.pop("arms")),
        ("arms/dense/sample-1/timing.json", lambda value: value.update(seconds="1")),
        ("arms/fullopt/gate-rank0.json", lambda value: value.update(passed=1)),
    ],
)
def test_file_that_does_not_fit_its_schema_is_named(fresh, name: str, change) -> None:  # type: ignore[no-untyped-def]
    record = fresh()
    edit(record / name, change)
    with pytest.raises(InvalidRecord, match=name):
        read_record(record)
    report = verify_record(record)
    assert int(report.exit_code) == 13 and any(name in finding.message for finding in report.findings)


def test_sample_with_two_numbers_is_refused(fresh) -> None:  # type: ignore[no-untyped-def]
    record = fresh()
    (record / "arms/dense/sample-1").rename(record / "arms/dense/sample-01")
    with pytest.raises(InvalidRecord, match="shortest"):
        read_record(record)


def test_values_that_are_no_target_are_refused(fresh) -> None:  # type: ignore[no-untyped-def]
    record = fresh()
    edit(record / "lock.json", lambda value: value["values"]["request"].pop("seed"))
    with pytest.raises(InvalidRecord, match="not those of a target"):
        read_record(record)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**60) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300)
@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode() + b"\n"))
def test_event_parser_ends_in_events_or_a_clear_error(data: bytes) -> None:
    try:
        read_events(data, "e")
    except SolError as error:
        assert str(error).startswith("e, line ")


NUMBERS = st.sampled_from([0, -1, 1, 7, 10**9, 2**53, 1e308, -1e308, 0.5])
LISTS = st.lists(st.integers(-3, 2**53), max_size=5)
NAMES = ["lock.json", "environment.json", "benchmark.json", "status"]
NAMES += [f"arms/fullopt/{name}" for name in ("events-rank0.jsonl", "gate-rank0.json", "sample-1/timing.json")]


def other_value(data: st.DataObject, old: object) -> object:
    """Something else in place of a value, mostly of its own kind."""
    return data.draw(NUMBERS if isinstance(old, int | float) else LISTS if isinstance(old, list) else json_values)


def change_somewhere(data: st.DataObject, value: object) -> None:
    """Replace one value at any depth."""
    while True:
        keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))  # type: ignore[arg-type]
        key = data.draw(st.sampled_from(keys))
        inner = value[key]  # type: ignore[index]
        if isinstance(inner, dict | list) and inner and data.draw(st.integers(0, 3)):
            value = inner
            continue
        value[key] = other_value(data, inner)  # type: ignore[index]
        return


@pytest.mark.parametrize("scale", [1e308, 0.0, -1e200])
def test_a_scale_that_no_softmax_has_is_refused_by_name(fresh: Callable[..., Path], scale: float) -> None:
    record = fresh(arms=("fullopt",))
    edit(record / "arms/fullopt/gate-rank0.json", lambda value: value.update(scale=scale))
    messages = [finding.message for finding in verify_record(record).findings]
    assert any("a scale of" in message for message in messages)
    assert not any("could not be judged" in message for message in messages)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_change_of_a_record_ends_in_a_traceback(records, tmp_path_factory, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    """Any value of any file set to anything: a verdict, and never a check that gave up."""
    record = Path(shutil.copytree(records(Builder(arms=("fullopt",))), tmp_path_factory.mktemp("fuzz") / "record"))
    name = data.draw(st.sampled_from(NAMES))
    if name.endswith(".jsonl"):
        edit_events(record / name, lambda lines: change_somewhere(data, lines))
    else:
        edit(record / name, lambda value: change_somewhere(data, value))
    report = verify_record(record)
    assert not [finding for finding in report.findings if "could not be judged" in finding.message]
    shutil.rmtree(record)
