"""Records whose files were changed to tell a better story, summarised anew and signed by a trusted key: none passes.

Each test is named after what was forged. What an honest record may hold is tested beside it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.canonical import sha256_json
from config.checkpoint import manifest
from config.errors import InvalidRecord
from tests.verify.builder import Builder, edit, edit_events, summarise
from tests.verify.conftest import make_key, sign_with
from verify.checks import CHECKS
from verify.findings import Status, run_check
from verify.reader import read_record
from verify.report import Report, verify_record

EVENTS = "arms/fullopt/events-rank0.jsonl"
TIMING = "arms/fullopt/sample-1/timing.json"
SMALL = ("request.width=64", "request.height=64", "request.frames=5", "request.fps=24")
LONG = {"dense": 10.0, "fullopt": 10.0}  # seconds of a forward: what is forged is more than a slow disk may take
Fresh = Callable[..., Path]
Lines = list[dict[str, Any]]


def passed_off(record: Path, folder: Path) -> Report:
    """The verdict after everything was done to make the record look whole: new summary, signature, trusted key."""
    key, trust = make_key(folder, "forger")
    summarise(record)
    sign_with(record, key)
    return verify_record(record, trust)


def refusals(record: Path, name: str) -> list[str]:
    """What one check finds against a record."""
    (check,) = [check for check in CHECKS if check.name == name]
    found = run_check(check, read_record(record))
    return [finding.message for finding in found if finding.status in (Status.FAIL, Status.INVALID)]


def scaled(factor: float, *events: str) -> Callable[[Lines], None]:
    """Multiply the seconds of the measured request's events, and leave the times at which they were written."""

    def alter(lines: Lines) -> None:
        for line in lines:
            if line.get("sample") == 1 and line["event"] in events:
                line["seconds"] *= factor

    return alter


def test_seconds_that_are_a_tenth_of_the_time_that_passed(fresh: Fresh, tmp_path: Path) -> None:
    record = fresh(seconds=LONG)
    edit_events(record / EVENTS, scaled(0.1, "step", "request_end"))
    edit(record / TIMING, lambda timing: timing.update(seconds=timing["seconds"] * 0.1))
    report = passed_off(record, tmp_path)
    assert report.verdict == "INVALID"
    messages = [finding.message for finding in report.findings if finding.check == "timing-nested"]
    assert any("worker says" in message and "unstated" in message for message in messages)
    assert any("driver says" in message and "unstated" in message for message in messages)
    assert any("passed since the one before" in message for message in messages)


@settings(max_examples=25, deadline=None)
@given(factor=st.floats(0.01, 0.8), part=st.sampled_from(["step", "request_end"]))
def test_seconds_of_forwards_or_loops_that_are_stated_smaller(
    records: Callable[[Builder], Path], tmp_path_factory: pytest.TempPathFactory, factor: float, part: str
) -> None:
    record = Path(shutil.copytree(records(Builder(seconds=LONG)), tmp_path_factory.mktemp("scaled") / "record"))
    edit_events(record / "arms/dense/events-rank0.jsonl", scaled(factor, part))
    if part == "request_end":
        timing = record / "arms/dense/sample-1/timing.json"
        edit(timing, lambda fields: fields.update(seconds=fields["seconds"] * factor))
    assert refusals(record, "timing-nested")


def shortened(sample: int, step: int, by: float) -> Callable[[Lines], None]:
    """State one forward of rank 0 shorter than it was."""

    def alter(lines: Lines) -> None:
        (found,) = [e for e in lines if e["event"] == "step" and (e["sample"], e["step"]) == (sample, step)]
        found["seconds"] -= by

    return alter


def test_one_forward_that_is_stated_shorter_than_the_time_since_the_one_before(fresh: Fresh) -> None:
    record = fresh(seconds=LONG)
    edit_events(record / "arms/dense/events-rank0.jsonl", shortened(1, 5, 1.0))
    assert not refusals(record, "timing-nested"), "what a slow disk takes between two forwards"
    edit_events(record / "arms/dense/events-rank0.jsonl", shortened(1, 5, 1.0))
    assert any("forward 5 says" in message for message in refusals(record, "timing-nested"))


def test_what_a_warm_up_does_before_its_first_forward_is_no_forward_and_of_a_measured_loop_it_is(fresh: Fresh) -> None:
    record = fresh(seconds={"dense": 20.0})
    edit_events(record / "arms/dense/events-rank0.jsonl", shortened(0, 0, 19.0))
    assert not refusals(record, "timing-nested"), "kernels are compiled there"
    edit_events(record / "arms/dense/events-rank0.jsonl", shortened(1, 0, 19.0))
    assert any("leaves too much of their loop's" in message for message in refusals(record, "timing-nested"))


@pytest.mark.parametrize(("factor", "words"), [(50, "SGLang's total"), (0.001, "SGLang's total")])
def test_a_total_of_sglang_that_is_not_the_requests(fresh: Fresh, tmp_path: Path, factor: float, words: str) -> None:
    record = fresh()
    edit(record / TIMING, lambda timing: timing.update(sglang_total_ms=1000 * timing["seconds"] * factor))
    report = passed_off(record, tmp_path)
    assert report.verdict == "INVALID"
    assert any(words in finding.message and finding.where == TIMING for finding in report.findings)


def test_a_stage_of_sglang_that_is_longer_than_the_request(fresh: Fresh) -> None:
    record = fresh()
    edit(record / TIMING, lambda timing: timing.update(sglang_total_ms=None, sglang_stages_ms={"x": 1e9}))
    assert refusals(record, "timing-nested")
    edit(record / TIMING, lambda timing: timing.update(sglang_stages_ms={}))
    assert not refusals(record, "timing-nested"), "a total that SGLang does not tell is no contradiction"


def test_a_request_that_is_shorter_than_its_stages(fresh: Fresh) -> None:
    record = fresh()

    def alter(lines: Lines) -> Lines:
        (end,) = [e for e in lines if e["event"] == "request_end" and e["source"] == "worker" and e["sample"] == 1]
        place = lines.index(end) + 1
        stage = {"source": "worker", "event": "stage", "sample": 1, "seq": 0}
        first = {**stage, "name": "text", "t": end["t"] - end["seconds"], "seconds": 0.4}
        return [*lines[:place], first, {**stage, "name": "decode", "t": end["t"] + 0.7, "seconds": 0.7}, *lines[place:]]

    edit_events(record / EVENTS, alter)
    assert not refusals(record, "timing-nested")
    edit_events(record / EVENTS, lambda lines: [e for e in lines if e["event"] == "stage"][1].update(seconds=1.0))
    edit_events(record / EVENTS, lambda lines: [e for e in lines if e["event"] == "stage"][1].update(t=1e6))
    assert any("stages lasted" in message for message in refusals(record, "timing-nested"))


def telemetry_of(gpu: dict[str, Any], start: dict[str, Any]) -> Callable[[Lines], None]:
    """Telemetry whose samples and starts say something else."""

    def alter(lines: Lines) -> None:
        for line in lines:
            line.update(gpu if line["event"] == "gpu_sample" else start if line["event"] == "telemetry_start" else {})

    return alter


def test_telemetry_of_another_idle_gpu_without_a_name(fresh: Fresh, tmp_path: Path) -> None:
    record = fresh(target="rtx4090", arms=("dense", "fullopt"), overrides=SMALL)
    idle = {"own_processes": 0, "power_w": 20.0, "memory_peak_mib": 30000.0, "reasons": 1}
    for arm in ("dense", "fullopt"):
        edit_events(record / f"arms/{arm}/telemetry-gpu0.jsonl", telemetry_of(idle, {"uuid_sha256": None}))
    report = passed_off(record, tmp_path)
    assert report.verdict == "INVALID"
    found = " ".join(finding.message for finding in report.findings if finding.check == "telemetry")
    assert "another GPU than environment.json's GPU 0, or of none" in found
    assert "nothing of the arm computed on the GPU" in found


@pytest.mark.parametrize(
    ("gpu", "start", "fine"),
    [
        ({}, {}, True),
        ({"own_processes": 0, "hidden_processes": 1}, {}, True),  # a container that hides processes
        ({"own_processes": None, "foreign_processes": None, "hidden_processes": None}, {}, True),  # no list at all
        ({"own_processes": 0}, {}, False),
        ({"own_processes": 0, "hidden_processes": None}, {}, False),
        ({}, {"uuid_sha256": None}, False),
        ({}, {"uuid_sha256": "9" * 64}, False),
        ({}, {"gpu": 1}, False),
    ],
)
def test_telemetry_is_of_the_gpu_that_the_arm_used(
    fresh: Fresh, gpu: dict[str, Any], start: dict[str, Any], fine: bool
) -> None:
    record = fresh(target="rtx4090", arms=("dense",), overrides=SMALL)
    edit_events(record / "arms/dense/telemetry-gpu0.jsonl", telemetry_of(gpu, start))
    assert (not refusals(record, "telemetry")) == fine


def listing(change: Callable[[Lines], Lines]) -> Callable[[dict[str, Any]], None]:
    """Another list of the checkpoint's files, with the digest that goes with it."""

    def alter(environment: dict[str, Any]) -> None:
        files = change(environment["checkpoint"]["files"])
        environment["checkpoint"].update(files=files, sha256=sha256_json(files))

    return alter


def test_published_weights_that_are_one_file_of_other_content(fresh: Fresh, tmp_path: Path) -> None:
    record = fresh(target="rtx4090", arms=("dense", "fullopt"))
    other = [{"path": "FL2VA/x.bin", "bytes": 1, "sha256": "5" * 64}]
    edit(record / "environment.json", listing(lambda files: other))
    report = passed_off(record, tmp_path)
    assert report.verdict == "INVALID"
    assert any("files of the published list are missing" in finding.message for finding in report.findings)
    assert not [claim for claim in report.claims if claim.verdict in ("reproduced", "faster", "slower")]


@given(data=st.data())
def test_published_weights_of_which_any_file_is_left_out_or_changed(
    records: Callable[[Builder], Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    record = Path(shutil.copytree(records(Builder("rtx4090", arms=())), tmp_path_factory.mktemp("hub") / "record"))
    count = sum(entry.path.startswith("FL2VA/") for entry in manifest())
    index = data.draw(st.integers(0, count - 1))
    fault = data.draw(st.sampled_from([{"sha256": "0" * 64}, {"bytes": 1}, {"path": "FL2VA/elsewhere"}, None]))

    def change(files: Lines) -> Lines:
        return [
            file if at != index else {**file, **(fault or {})} for at, file in enumerate(files) if at != index or fault
        ]

    edit(record / "environment.json", listing(change))
    assert refusals(record, "environment-checkpoint")


def test_files_outside_the_partition_and_beside_the_list_are_not_asked_for(fresh: Fresh) -> None:
    record = fresh(target="rtx4090", arms=())
    own = {"path": "FL2VA/pipeline.py", "bytes": 9, "sha256": "6" * 64}
    edit(record / "environment.json", listing(lambda files: [f for f in files if "/" in f["path"]] + [own]))
    assert not refusals(record, "environment-checkpoint")


def numbered(lines: Lines) -> Lines:
    """Number the events of each source anew, as a forger does who adds or removes some."""
    count: dict[str, int] = {}
    for line in lines:
        line["seq"] = count.get(line["source"], 0)
        count[line["source"]] = line["seq"] + 1
    return lines


def test_sparse_calls_of_forwards_that_the_request_does_not_have(fresh: Fresh, tmp_path: Path) -> None:
    record = fresh()

    def alter(lines: Lines) -> Lines:
        last = [i for i, e in enumerate(lines) if e.get("mode") == "sparse" and e["sample"] == 1][-1]
        more = [{**lines[last], "step": step} for step in range(200, 205)]
        return numbered([*lines[: last + 1], *more, *lines[last + 1 :]])

    edit_events(record / EVENTS, alter)
    report = passed_off(record, tmp_path)
    assert report.verdict == "INVALID"
    assert any("an event of forward 200, and the request has 16" in finding.message for finding in report.findings)


def test_events_and_gate_of_a_rank_that_the_lock_does_not_have(fresh: Fresh) -> None:
    record = fresh()
    lines = [json.loads(line) for line in (record / EVENTS).read_bytes().splitlines()]
    kept = [{**e, "rank": 7} if e["event"] == "arm_start" else e for e in lines if e["source"] == "worker"]
    for line in kept:
        if line["event"] == "memory":
            line["reserved_mib"] = 1e6
    (record / "arms/fullopt/events-rank7.jsonl").write_text("".join(json.dumps(e) + "\n" for e in numbered(kept)))
    with pytest.raises(InvalidRecord, match="events-rank7.jsonl has number 7"):
        summarise(record)
    assert verify_record(record).verdict == "INVALID"


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("arms/fullopt/gate-rank7.json", "arms/fullopt/gate-rank0.json"),
        ("arms/fullopt/gate-rank00.json", "arms/fullopt/gate-rank0.json"),
        ("arms/fullopt/gate-rank7.safetensors", "arms/fullopt/gate-rank0.safetensors"),
        ("arms/fullopt/sample-1/gate-rank0.json", "arms/fullopt/gate-rank0.json"),
        ("arms/dense/events-rank1.jsonl", "arms/dense/events-rank0.jsonl"),
        ("arms/dense/telemetry-gpu0.jsonl", "arms/dense/events-rank0.jsonl"),
    ],
)
def test_a_file_of_a_rank_gpu_or_warm_up_that_is_not_there(fresh: Fresh, name: str, of: str) -> None:
    record = fresh()
    shutil.copy(record / of, record / name)
    report = verify_record(record)
    assert report.verdict == "INVALID" and name in report.findings[-1].message


@pytest.mark.parametrize("change", [{"rank": 1}, {"sample": 1}])
def test_a_gate_that_is_not_the_one_that_its_name_says(fresh: Fresh, change: dict[str, int]) -> None:
    record = fresh()
    edit(record / "arms/fullopt/gate-rank0.json", lambda report: report.update(change))
    report = verify_record(record)
    assert report.verdict == "INVALID" and "holds the gate of rank" in report.findings[-1].message


def test_four_ranks_and_a_resumed_arm_are_read(fresh: Fresh) -> None:
    assert len(read_record(fresh(target="h100x4", overrides=SMALL)).arms["fullopt"].gates) == 4
    assert len(read_record(fresh(resumed=("fullopt",))).arms["fullopt"].gates) == 2
