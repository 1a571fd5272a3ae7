"""Whole records of replayed caches, of short warm-ups with a computed last forward, and of arms without a gate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config.errors import Exit
from tests.verify.builder import edit_events
from verify.checks import run_checks
from verify.findings import Finding, Status, worst
from verify.reader import read_record
from verify.report import verify_record

EVENTS = "arms/fullopt/events-rank0.jsonl"
LISTS = {"cpu": "0-4,9,15", "cpu-fbc": "0,3,6,9,12,15"}
Fresh = Callable[..., Path]


def findings(record: Path, *checks: str) -> list[Finding]:
    return [found for found in run_checks(read_record(record)) if not checks or found.check in checks]


def decisions(record: Path, sample: int) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (record / EVENTS).read_text().splitlines()]
    return [line for line in lines if line["event"] == "cache_decision" and line["sample"] == sample]


@pytest.mark.parametrize("target", ["cpu", "cpu-fbc"])
def test_a_replayed_record_is_sound_and_open(fresh: Fresh, target: str) -> None:
    record = fresh(target=target, overrides=(f"cache.replay={LISTS[target]}",))
    found = findings(record)
    assert worst(found) == Status.WARN, found
    assert {line.check for line in found if line.status == Status.WARN} == {"lock-known"}
    (said,) = findings(record, "cache-decisions")
    assert "the forwards that the lock lists" in said.message


@pytest.mark.parametrize("target", ["cpu", "cpu-fbc"])
@pytest.mark.parametrize(("step", "action"), [(9, "reuse"), (10, "compute")])
def test_a_forward_beside_the_list_is_found(fresh: Fresh, target: str, step: int, action: str) -> None:
    def alter(lines: list[Any]) -> None:
        (line,) = [e for e in lines if e["event"] == "cache_decision" and (e["sample"], e["step"]) == (1, step)]
        line["action"] = action

    record = fresh(target=target, overrides=(f"cache.replay={LISTS[target]}",))
    edit_events(record / EVENTS, alter)
    (found,) = findings(record, "cache-decisions")
    assert found.status == Status.FAIL and f"step {step}" in found.message


@pytest.mark.parametrize("replay", [(), ("cache.replay=0,3,9",)])
def test_a_short_warm_up_with_a_computed_last_forward_is_gated(fresh: Fresh, replay: tuple[str, ...]) -> None:
    """Seven forwards, six of them dense; FirstBlockCache reuses the last one unless it is told otherwise."""
    short = ("warmup.num_inference_steps=8", *replay)
    record = fresh(target="cpu-fbc", overrides=(*short, "warmup.compute_last=true"))
    assert worst(findings(record)) == Status.WARN
    last = decisions(record, 0)[-1]
    assert (last["step"], last["action"], last["reason"]) == (6, "compute", "warmup_last")
    assert all(decision["reason"] != "warmup_last" for decision in decisions(record, 1))

    ungated = findings(fresh(target="cpu-fbc", overrides=short), "gate-happened")
    assert [line.status for line in ungated] == [Status.INVALID]
    assert "warm-up 0 held no sparse call, so no gate ran" in ungated[0].message
    assert "warmup.compute_last" in ungated[0].remedy


def test_a_computed_last_forward_that_the_lock_does_not_ask_for_is_found(fresh: Fresh) -> None:
    record = fresh(target="cpu-fbc", overrides=("warmup.num_inference_steps=8", "warmup.compute_last=true"))

    def reuse(lines: list[Any]) -> None:
        decision = [e for e in lines if e["event"] == "cache_decision" and e["sample"] == 0][-1]
        decision.update(action="reuse", reason="below_threshold")

    edit_events(record / EVENTS, reuse)
    (found,) = findings(record, "cache-decisions")
    assert "the rules say compute (warmup_last)" in found.message


def test_samples_that_were_measured_without_a_gate_are_invalid(fresh: Fresh) -> None:
    """As a run would leave them that gates nothing: the warm-up is all dense, the measured requests are not."""
    record = fresh(overrides=("warmup.num_inference_steps=7",))
    assert verify_record(record).result_exit_code is Exit.INVALID_RECORD
    (found,) = findings(record, "gate-happened")
    assert found.status == Status.INVALID and "held no sparse call" in found.message


def test_an_arm_that_ended_without_a_gate_is_invalid_and_says_why(fresh: Fresh) -> None:
    record = fresh(overrides=("warmup.num_inference_steps=7",), ungated=("fullopt",))
    found = {line.check: line for line in findings(record) if line.status == Status.INVALID}
    assert set(found) == {"record-outcomes", "gate-happened"}
    assert "ended as ungated: no sparse call" in found["record-outcomes"].message


def test_a_gate_inside_a_measured_request_is_invalid(fresh: Fresh) -> None:
    """What an engine would leave that gates at the first sparse call, wherever that is."""
    record = fresh()

    def move(lines: list[Any]) -> None:
        for line in lines:
            if line["event"] == "gate":
                line["sample"] = 1

    edit_events(record / EVENTS, move)
    assert {line.status for line in findings(record, "gate-happened")} == {Status.INVALID}
