"""A warm-up that is shorter than the measured request, and a replayed cache, through SGLang's whole pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Sol, benchmark, events

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SHORT = (
    "--set=request.num_inference_steps=6",
    "--set=warmup.num_inference_steps=3",
    "--set=sol_attn.dense_steps=1",
    "--set=request.prompt=flamenco",
    "--set=cache.replay=0,2",
)
"""Five forwards, of which 0 and 2 are computed; the warm-up has 0 and 1, and 1 is the only one that may be sparse."""


def test_the_last_forward_of_a_short_warm_up_is_computed_and_gated(sol: Sol, tmp_path: Path) -> None:
    finished = sol("benchmark", "cpu-fbc", "--arm=fullopt", *SHORT, "--set=warmup.compute_last=true", "--out", tmp_path)
    assert finished.code == 0, finished.output
    record = finished.record(tmp_path)
    found = [(e["sample"], e["step"], e["action"], e["reason"]) for e in events(record, "fullopt", "cache_decision")]
    assert found == [
        (0, 0, "compute", "replay"),
        (0, 1, "compute", "warmup_last"),
        (1, 0, "compute", "replay"),
        (1, 1, "reuse", "replay"),
        (1, 2, "compute", "replay"),
        (1, 3, "reuse", "replay"),
        (1, 4, "reuse", "replay"),
    ]
    signals = [event["signal"] for event in events(record, "fullopt", "cache_decision") if event["step"]]
    assert len(signals) == 5 and all(signal >= 0 for signal in signals), "each forward but the first measures one"
    (gate,) = events(record, "fullopt", "gate")
    assert (gate["sample"], gate["step"], gate["layer"], gate["passed"]) == (0, 1, 2, True)
    assert benchmark(record)["arms"]["fullopt"]["samples"][0]["sparse_forwards"] == 1
    assert "computed by a list" in sol("report", record).output


def test_an_arm_whose_warm_up_held_no_sparse_call_is_invalid_and_measures_nothing(sol: Sol, tmp_path: Path) -> None:
    finished = sol("benchmark", "cpu-fbc", "--arm=fullopt", *SHORT, "--out", tmp_path)
    assert finished.code == 13, finished.output
    assert "held no sparse call" in finished.output and "warmup.compute_last=true" in finished.output
    assert "Traceback" not in finished.output
    record = finished.record(tmp_path)
    arm = benchmark(record)["arms"]["fullopt"]
    assert (arm["outcome"], arm["gate"], arm["samples"]) == ("ungated", None, [])
    assert {event["sample"] for event in events(record, "fullopt", "request_start")} == {0}
    assert list(events(record, "fullopt", "gate")) == []
