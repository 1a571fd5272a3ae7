"""A process of a sparse arm that was killed or broke in its warm-up does not spoil what a later one measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.evidence import RunRecord
from tests.verify.builder import edit
from verify.checks import run_checks
from verify.reader import read_record

ARM = "arms/fullopt/"
EVENTS = ARM + "events-rank0.jsonl"
GATE = ARM + "gate-rank0.json"

Fresh = Callable[..., Path]
Event = dict[str, Any]


def test_a_gates_slice_that_is_gone_is_invalid_unless_it_was_withheld(fresh: Fresh) -> None:
    """Three checks asked the reader to report a fault of the verifier."""
    record = fresh()
    (record / ARM / "gate-rank0.safetensors").unlink()
    found = [finding for finding in run_checks(read_record(record)) if finding.where == ARM + "gate-rank0.safetensors"]
    assert {finding.check for finding in found} >= {"gate-exact", "gate-sparse", "gate-routes"}
    assert {(finding.status, finding.message) for finding in found if finding.check.startswith("gate-")} == {
        ("invalid", "the gate's slice is missing, and no attestation lists it")
    }


def lines_of(record: Path) -> list[list[Event]]:
    """The events of each of the arm's processes."""
    parts: list[list[Event]] = []
    for line in (record / EVENTS).read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "arm_start" and event["source"] == "driver":
            parts.append([])
        parts[-1].append(event)
    return parts


def put_lines(record: Path, *processes: list[Event]) -> None:
    """Write events, numbered again."""
    count: dict[str, int] = {}
    text = ""
    for event in sum(processes, []):
        number = count.get(event["source"], 0)
        count[event["source"]] = number + 1
        text += json.dumps({**event, "seq": number}) + "\n"
    (record / EVENTS).write_text(text)


def cut(events: list[Event], outcome: str = "aborted") -> list[Event]:
    """A process that got so far, and the end that was written for it."""
    end = {"event": "arm_end", "t": max(event["t"] for event in events), "seq": 0, "source": "driver"}
    return [*events, {**end, "outcome": outcome, "reason": "the arm's process was killed by signal 9"}]


def until(events: list[Event], kind: str, number: int = 1, **where: object) -> list[Event]:
    """Up to and with the number-th event of a kind."""
    found = [
        index
        for index, event in enumerate(events)
        if event["event"] == kind and all(event.get(key) == value for key, value in where.items())
    ]
    return events[: found[number - 1] + 1]


def bad(record: Path) -> list[tuple[str, str, str]]:
    """What the checks refuse; the summary is not written again here."""
    return [
        (finding.check, str(finding.status), finding.message)
        for finding in run_checks(read_record(record))
        if str(finding.status) in ("fail", "invalid") and not finding.check.startswith("benchmark")
    ]


STAGES: dict[str, Callable[[list[Event]], list[Event]]] = {
    "loading": lambda events: until(events, "arm_start", 2),
    "request": lambda events: until(events, "request_start"),
    "dense forwards": lambda events: until(events, "step", 3),
    "gate": lambda events: until(events, "gate"),
    "sparse call": lambda events: until(events, "attention", mode="sparse"),
    "warm-up's last forward": lambda events: until(events, "request_end")[:-1],
}


@pytest.mark.parametrize("outcome", ["aborted", "error"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_sparse_arm_killed_in_its_warm_up_is_made_valid_by_resume(fresh: Fresh, stage: str, outcome: str) -> None:
    record = fresh(arms=("fullopt",), resumed=("fullopt",))
    first, second = lines_of(record)
    kept = STAGES[stage](first)
    put_lines(record, cut(kept, outcome), second)
    for sample in (0, 1):
        (record / ARM / f"sample-{sample}/timing.json").unlink()
    if not any(event["event"] == "gate" for event in kept):
        for path in (record / ARM).glob("gate-rank0.*"):
            path.unlink()
    RunRecord(record).discard_unfinished()
    assert bad(record) == []


def test_a_kill_between_the_gate_and_its_event_is_made_valid_by_resume(fresh: Fresh) -> None:
    record = fresh(arms=("fullopt",), resumed=("fullopt",))
    first, second = lines_of(record)
    put_lines(record, cut(until(first, "gate")[:-1]), second)
    for sample in (0, 1):
        (record / ARM / f"sample-{sample}/timing.json").unlink()
    RunRecord(record).discard_unfinished()
    assert (record / GATE).is_file()
    assert bad(record) == []


@pytest.mark.parametrize("discarded", [False, True], ids=["kept", "discarded by an earlier release"])
def test_a_kill_after_the_gate_of_a_later_warm_up_is_made_valid_by_resume(fresh: Fresh, discarded: bool) -> None:
    """The gate of a process that was added lies with its warm-up, which has no timing.json yet."""
    record = fresh(arms=("fullopt",), resumed=("fullopt",))
    complete, later = lines_of(record)
    put_lines(record, cut(until(later, "gate")), complete)  # in this order, so that the arm's last process is whole
    for sample in (2, 3):
        (record / ARM / f"sample-{sample}/timing.json").unlink()
    RunRecord(record).discard_unfinished()
    assert (record / ARM / "sample-2/gate-rank0.json").is_file()
    assert not (record / ARM / "sample-2/out.mp4").exists() and not (record / ARM / "sample-3").exists()
    if discarded:
        shutil.rmtree(record / ARM / "sample-2")
    assert bad(record) == []


def test_a_red_gate_is_not_passed_over_because_its_process_was_killed(fresh: Fresh) -> None:
    record = fresh(arms=("fullopt",), resumed=("fullopt",))
    first, second = lines_of(record)
    kept = until(first, "gate")
    kept[-1]["passed"] = False
    put_lines(record, cut(kept), second)
    edit(record / GATE, lambda report: report.update(passed=False, rejudged_failed=0, finite=False))
    for sample in (0, 1):
        (record / ARM / f"sample-{sample}/timing.json").unlink()
    RunRecord(record).discard_unfinished()
    assert "gate-verdict" in {check for check, _, _ in bad(record)}
    for path in (record / ARM).glob("gate-rank0.*"):
        path.unlink()
    assert ("gate-happened", "invalid") in {(check, status) for check, status, _ in bad(record)}


def test_a_process_that_came_to_its_end_still_needs_its_gate(fresh: Fresh) -> None:
    record = fresh(arms=("fullopt",), resumed=("fullopt",))
    first, second = lines_of(record)
    ended = [event for event in first if event["event"] != "gate" and event.get("mode") != "sparse"]
    put_lines(record, ended, second)
    for path in (record / ARM).glob("gate-rank0.*"):
        path.unlink()
    assert ("gate-happened", "invalid") in {(check, status) for check, status, _ in bad(record)}
    put_lines(record, [*ended[:-1], {**ended[-1], "outcome": "aborted"}], second)  # it was killed, but has samples
    assert ("gate-happened", "invalid") in {(check, status) for check, status, _ in bad(record)}
