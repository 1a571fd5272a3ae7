"""What disturbs a measured GPU makes the record INVALID, with the reason; what happens outside of it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verify.checks.telemetry import telemetry
from verify.findings import Check, Finding, run_check, worst
from verify.reader import read_record

SMALL = ("request.width=64", "request.height=64", "request.frames=5", "request.fps=24")
GPU0, HOST = "arms/dense/telemetry-gpu0.jsonl", "arms/dense/telemetry-host.jsonl"
Lines = list[dict[str, Any]]


@pytest.fixture
def record(fresh: Callable[..., Path]) -> Path:
    return fresh(target="rtx4090", arms=("dense",), overrides=SMALL)


def judged(record: Path) -> list[Finding]:
    return run_check(Check("telemetry", "", telemetry), read_record(record))


def change(record: Path, name: str, alter: Callable[[Lines], Any]) -> None:
    path = record / name
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = alter(lines) or lines
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def spans(record: Path) -> tuple[float, float]:
    """The measured request, in seconds of the telemetry's session."""
    events = [json.loads(line) for line in (record / "arms/dense/events-rank0.jsonl").read_text().splitlines()]
    times = {
        event["event"]: event["t"] - 0.25
        for event in events
        if event["source"] == "driver" and event.get("sample") == 1
    }
    return times["request_start"], times["request_end"]


def put(begin: float, end: float, **values: object) -> Callable[[Lines], None]:
    def alter(lines: Lines) -> None:
        for line in lines:
            if line["event"] in ("gpu_sample", "host_sample") and begin <= line["t"] <= end:
                line.update(values)

    return alter


def invalid(record: Path) -> list[str]:
    return [finding.message for finding in judged(record) if finding.status == "invalid"]


def test_an_undisturbed_run_is_ok_and_says_both_peaks(record: Path) -> None:
    found = judged(record)
    assert worst(found) == "ok"
    (gpu,) = [finding for finding in found if finding.where == GPU0]
    assert "peak 22000 MiB, 430 W, 66 °C, at the power limit 100% of the time" in gpu.message


@pytest.mark.parametrize("bit", [0x8, 0x20, 0x40, 0x80])
def test_field_report_25_more_than_one_percent_throttled(record: Path, bit: int) -> None:
    begin, end = spans(record)
    start = json.loads((record / GPU0).read_text().splitlines()[0])
    change(record, GPU0, lambda lines: [{**line, "t": line["t"] + n / 10} for line in lines[1:-1] for n in range(10)])
    change(record, GPU0, lambda lines: [start, *lines])
    allowed = int((end - begin) * 10 * 0.01)
    change(record, GPU0, put(begin + 1.01, begin + 1.01 + allowed * 0.1, reasons=bit | 4))
    assert invalid(record) == []
    change(record, GPU0, put(begin + 1.01, begin + 1.01 + (allowed + 1) * 0.1, reasons=bit | 4))
    (message,) = invalid(record)
    assert message.startswith("throttled in") and "66 °C" in message


def test_throttling_in_the_warm_up_is_nobodys_business(record: Path) -> None:
    begin, _ = spans(record)
    change(record, GPU0, put(0, begin - 1, reasons=0x40, foreign_processes=1))
    assert worst(judged(record)) == "ok"


def test_field_report_26_a_foreign_process(record: Path) -> None:
    begin, _ = spans(record)
    change(record, GPU0, put(begin + 3, begin + 4, foreign_processes=1))
    assert invalid(record) == ["1 foreign process(es) computed on the GPU while it was measured"]


def test_in_a_container_that_hides_processes_one_is_the_arms_own(record: Path) -> None:
    change(record, GPU0, put(0, 1e9, own_processes=0, hidden_processes=1))
    assert invalid(record) == []
    change(record, GPU0, put(0, 1e9, own_processes=0, hidden_processes=2))
    assert "outside the container" in invalid(record)[0]
    change(record, GPU0, put(0, 1e9, own_processes=1, hidden_processes=1))
    assert "outside the container" in invalid(record)[0]


def test_a_lost_gpu_and_an_xid(record: Path) -> None:
    change(record, GPU0, lambda lines: [*lines[:-1], {"event": "xid", "t": lines[-1]["t"], "number": 79}, lines[-1]])
    assert "Xid 79" in invalid(record)[0]
    change(
        record,
        GPU0,
        lambda lines: [*lines[:60], {"event": "gpu_lost", "t": lines[60]["t"], "reason": "GPU is lost"}],
    )
    messages = invalid(record)
    assert any("GPU is lost" in message for message in messages)
    assert any("went unwatched" in message for message in messages)


@pytest.mark.parametrize("name", [GPU0, HOST])
def test_a_hole_in_the_evidence(record: Path, name: str) -> None:
    begin, _ = spans(record)
    change(record, name, lambda lines: [line for line in lines if not begin + 5 < line["t"] < begin + 8])
    assert invalid(record) == []
    change(record, name, lambda lines: [line for line in lines if not begin + 5 < line["t"] < begin + 11])
    assert "sample 1 went unwatched" in invalid(record)[0]


@pytest.mark.parametrize("name", [GPU0, HOST])
def test_a_missing_or_torn_file(record: Path, name: str) -> None:
    with (record / name).open("ab") as handle:
        handle.write(b'{"event": "gpu_sam')
    assert [finding.status for finding in judged(record) if finding.where == name] == ["warn"]
    (record / name).unlink()
    assert "the file is missing" in invalid(record)[0]


def test_telemetry_of_another_gpu_or_without_order(record: Path) -> None:
    change(record, GPU0, lambda lines: lines[0].update(uuid_sha256="9" * 64))
    assert "another GPU" in invalid(record)[0]
    change(record, GPU0, lambda lines: lines[1:])
    assert "not a telemetry_start" in invalid(record)[0]


def test_time_that_runs_backwards(record: Path) -> None:
    change(record, GPU0, lambda lines: [lines[0], *reversed(lines[1:-1]), lines[-1]])
    assert any("backwards" in message for message in invalid(record))


def test_an_allocator_that_had_more_than_nvml_saw(record: Path) -> None:
    change(record, GPU0, put(0, 1e9, memory_peak_mib=10.0))
    path = record / "arms/dense/events-rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["event"] == "memory":
            line["reserved_mib"] = 20000.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = [finding for finding in judged(record) if finding.where == GPU0]
    assert found.status == "warn" and "the allocator reserved 20000 MiB" in found.message


def test_events_without_a_clock_cannot_be_held_against_telemetry(record: Path) -> None:
    path = record / "arms/dense/events-rank0.jsonl"
    path.write_text(path.read_text().replace(', "clock": 5000.0', ""))
    assert "name no clock" in invalid(record)[0]


def test_field_report_14_a_process_killed_for_memory_is_told_apart_from_a_crash(record: Path) -> None:
    change(record, HOST, lambda lines: lines[-1].update(oom_kills=1))
    assert invalid(record) == [], "the arm is complete: it was somebody else of the control group"
    path = record / "arms/dense/events-rank0.jsonl"
    path.write_text(path.read_text().replace('"outcome": "complete"', '"outcome": "error"'))
    assert "killed 1 process(es) for memory" in invalid(record)[0]


def test_memory_pressure_is_a_warning(record: Path) -> None:
    begin, _ = spans(record)
    change(record, HOST, put(begin, begin + 5, pressure=40.0))
    assert [finding.status for finding in judged(record) if finding.where == HOST] == ["warn"]


def test_a_cpu_record_without_host_telemetry_is_invalid(fresh: Callable[..., Path]) -> None:
    """It was PASSED, which says that every check ran."""
    record = fresh()
    assert {finding.status for finding in judged(record)} == {"ok"}
    for path in record.glob("arms/*/telemetry-host.jsonl"):
        path.unlink()
    assert "the file is missing" in invalid(record)[0]
