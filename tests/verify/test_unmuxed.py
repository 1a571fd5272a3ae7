"""Records of machines that mux no video: their tensors' digests are judged as far as they can be."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from config.record import Timing
from entrypoints.report import print_benchmark
from tests.verify.builder import Builder, dump, edit, edit_events, media_of, summarise, tensors_of, video
from tests.verify.conftest import make_key, sign_with
from tests.verify.test_checks import put_question
from verify.derive import derive, differences
from verify.findings import worst
from verify.reader import read_record
from verify.report import verify_record

REASON = "ffmpeg: not on PATH"
ALLOWED = ("output=mp4_or_tensors",)
FULL = "arms/fullopt/"
TIMING = FULL + "sample-1/timing.json"
EVENTS = FULL + "events-rank0.jsonl"
Fresh = Callable[..., Path]


def unmuxed(fresh: Fresh, **options: Any) -> Path:
    return fresh(**{"overrides": ALLOWED, "unmuxed": REASON, **options})


def output(**fields: Any) -> Callable[[Any], None]:
    return lambda value: value["output"].update(fields)


def test_it_verifies_at_best_as_partial_and_says_why(fresh: Fresh, tmp_path: Path) -> None:
    record = unmuxed(fresh, samples=2)
    key, trust = make_key(tmp_path, "lab")
    sign_with(record, key)
    report = verify_record(record, trust)
    assert (report.verdict, int(report.exit_code)) == ("PASSED (partial)", 0)
    (found,) = [finding for finding in report.findings if finding.check == "media-decoded"]
    assert found.status == "skipped" and found.message.startswith(f"6 samples not muxed ({REASON})")
    assert [finding.status for finding in report.findings if finding.check == "media-repeatable"] == ["ok"]
    assert [finding.status for finding in report.findings if finding.check == "media-asked"] == ["ok"]
    assert report.as_json()["withheld"] == []


def test_both_sides_derive_the_same_digests(fresh: Fresh) -> None:
    summary = pytest.importorskip("engine.summary")
    record = unmuxed(fresh)
    theirs, ours = summary.summarise(record), derive(read_record(record))
    assert list(differences(theirs.model_dump(mode="json"), ours.model_dump(mode="json"))) == []
    request = read_record(record).target.request
    wanted = tensors_of(request.width, request.height, request.frames, request.fps, request.seed)
    (sample,) = ours.arms["fullopt"].samples
    assert (sample.video_sha256, sample.audio_sha256) == (wanted["video"]["sha256"], wanted["audio"]["sha256"])
    assert (sample.file_sha256, sample.frames_sha256, sample.unmuxed) == (None, None, REASON)


def put_file(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")


def first_digest_of_the_events(lines: list[Any]) -> None:
    next(line for line in lines if line["event"] == "output" and line["sample"] == 1)["audio"]["sha256"] = "0" * 64


def twice(lines: list[Any]) -> list[Any]:
    told = next(line for line in lines if line["event"] == "output" and line["sample"] == 1)
    last = max(line["seq"] for line in lines if line["source"] == "worker")
    return [*lines[:-1], {**told, "seq": last + 1}, lines[-1]]


CASES: list[tuple[str, str, str, Callable[[Path], None], str]] = [
    (
        "media-decoded",
        "invalid",
        "a digest",
        lambda r: edit(r / TIMING, lambda v: v["output"]["video"].update(sha256="0" * 64)),
        "not what the worker told",
    ),
    ("media-decoded", "invalid", "an event", lambda r: edit_events(r / EVENTS, first_digest_of_the_events), "audio is"),
    ("media-decoded", "invalid", "told twice", lambda r: edit_events(r / EVENTS, twice), "told of 2 outputs"),
    ("media-decoded", "invalid", "frames", lambda r: edit(r / TIMING, output(frames=40)), "which is not 40 frames"),
    ("media-decoded", "invalid", "rate", lambda r: edit(r / TIMING, output(audio_sample_rate=48000)), "sample_rate"),
    ("media-asked", "fail", "frames", lambda r: edit(r / TIMING, output(frames=40)), "frames is 40"),
    ("media-asked", "fail", "size", lambda r: edit(r / TIMING, output(width=440)), "width is 440"),
    ("media-asked", "fail", "sound", lambda r: edit(r / TIMING, output(audio_sample_rate=64000)), "the sound lasts"),
    (
        "record-files",
        "invalid",
        "a video all the same",
        lambda r: put_file(r / FULL / "sample-1/out.mp4"),
        "was not muxed",
    ),
]


@pytest.mark.parametrize(("name", "status", "what", "breaks", "words"), CASES, ids=[f"{c[0]}: {c[2]}" for c in CASES])
def test_check_finds(
    fresh: Fresh, name: str, status: str, what: str, breaks: Callable[[Path], None], words: str
) -> None:
    record = unmuxed(fresh)
    assert not [finding for finding in put_question(record, name) if finding.status not in ("ok", "skipped")]
    breaks(record)
    found = put_question(record, name)
    assert any(finding.status == status and words in finding.message for finding in found), found
    assert all(finding.remedy for finding in found if finding.status in ("warn", "fail", "invalid"))
    assert not any("could not be judged" in finding.message for finding in found)


@settings(max_examples=60, deadline=None)
@given(
    tensor=st.sampled_from(["video", "audio"]),
    digit=st.integers(0, 63),
    by=st.integers(1, 15),
    told=st.booleans(),
)
def test_any_changed_digit_of_a_digest_is_found(
    records: Callable[[Builder], Path], tensor: str, digit: int, by: int, told: bool
) -> None:
    """In timing.json, or in the worker's events, with benchmark.json derived again as a forger would."""
    record = records(Builder(arms=("dense",), overrides=ALLOWED, unmuxed=REASON))
    path = record / "arms/dense" / ("events-rank0.jsonl" if told else "sample-1/timing.json")
    before, summary = path.read_bytes(), (record / "benchmark.json").read_bytes()

    def is_told(event: Any) -> bool:
        return event["event"] == "output" and event["sample"] == 1

    def change(holder: Any) -> None:
        text = holder[tensor]["sha256"]
        other = f"{(int(text[digit], 16) + by) % 16:x}"
        holder[tensor]["sha256"] = text[:digit] + other + text[digit + 1 :]

    try:
        if told:
            edit_events(
                path, lambda lines: change(next(e for e in lines if e["event"] == "output" and e["sample"] == 1))
            )
        else:
            edit(path, lambda value: change(value["output"]))
        summarise(record)
        report = verify_record(record)
    finally:
        path.write_bytes(before)
        (record / "benchmark.json").write_bytes(summary)
    assert report.result == "INVALID"
    assert any("timing.json" in f.where and f.status == "invalid" for f in report.findings)


def test_a_lock_that_asks_for_a_video_is_not_satisfied_by_tensors(fresh: Fresh) -> None:
    found = put_question(fresh(unmuxed=REASON), "media-asked")
    assert any(finding.status == "fail" and "asks for a video" in finding.message for finding in found)


def test_a_target_that_allows_tensors_is_satisfied_by_a_video(fresh: Fresh) -> None:
    record = fresh(overrides=ALLOWED)
    assert worst(put_question(record, "media-asked")) == worst(put_question(record, "media-decoded")) == "ok"


def test_a_video_whose_worker_told_of_tensors_is_a_contradiction(fresh: Fresh) -> None:
    record = fresh(overrides=ALLOWED)

    def tell(lines: list[Any]) -> list[Any]:
        last = max(line["seq"] for line in lines if line["source"] == "worker")
        told = {"event": "output", "t": lines[-1]["t"], "seq": last + 1, "source": "worker", "sample": 1}
        return [*lines[:-1], {**told, **tensors_of(448, 256, 39, 24, 0)}, lines[-1]]

    edit_events(record / EVENTS, tell)
    found = put_question(record, "media-decoded")
    assert any(finding.status == "invalid" and "a sample with a video" in finding.message for finding in found)


def test_samples_of_both_kinds_do_not_compare(fresh: Fresh) -> None:
    record = unmuxed(fresh)
    request = read_record(record).target.request
    data = video(request.width, request.height, request.frames, request.fps, request.seed)
    (record / FULL / "sample-1/out.mp4").write_bytes(data)
    edit(record / TIMING, lambda value: value.update(media=media_of(data), output=None))
    found = put_question(record, "media-asked")
    assert any(finding.status == "fail" and "do not compare" in finding.message for finding in found)


def test_tensors_of_a_cpu_run_that_differ_are_warned_of(fresh: Fresh) -> None:
    record = unmuxed(fresh, samples=2)
    assert worst(put_question(record, "media-repeatable")) == "ok"
    edit(record / TIMING, lambda value: value["output"]["audio"].update(sha256="0" * 64))
    assert worst(put_question(record, "media-repeatable")) == "warn"


def test_a_gpu_run_says_how_many_arms_repeat(fresh: Fresh) -> None:
    small = ("request.width=64", "request.height=64", "request.frames=5", "request.fps=24")
    record = unmuxed(fresh, target="h200", arms=("dense",), samples=2, overrides=(*small, *ALLOWED))
    (found,) = put_question(record, "media-repeatable")
    assert found.status == "skipped" and found.message.endswith("1 of 1 arms do")
    edit(record / "arms/dense/sample-2/timing.json", lambda v: v["output"]["video"].update(sha256="0" * 64))
    (found,) = put_question(record, "media-repeatable")
    assert found.status == "skipped" and found.message.endswith("0 of 1 arms do")


@pytest.mark.parametrize("options", [{}, {"overrides": ALLOWED, "unmuxed": REASON}], ids=["videos", "tensors"])
def test_a_record_kept_without_videos_and_slices_passes_in_part(
    fresh: Fresh, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Such records are kept in the repository: the attestation lists what they withhold."""
    record = fresh(**options)
    key, trust = make_key(tmp_path, "lab")
    sign_with(record, key)
    detached = [path for path in record.rglob("*") if path.suffix in (".mp4", ".safetensors")]
    for path in detached:
        path.unlink()
    report = verify_record(record, trust)
    assert (report.verdict, int(report.exit_code)) == ("PASSED (partial)", 0)
    assert report.as_json()["withheld"] == sorted(path.relative_to(record).as_posix() for path in detached)
    assert len(detached) == (1 if options else 5)


def test_a_timing_has_a_video_or_tensors_and_not_both(fresh: Fresh) -> None:
    both = json.loads((unmuxed(fresh) / TIMING).read_bytes())
    both["media"] = media_of(video(448, 256, 39, 24, 0))
    with pytest.raises(ValidationError, match="one of the two"):
        Timing.model_validate_json(dump(both))
    with pytest.raises(ValidationError, match="one of the two"):
        Timing.model_validate_json(dump({**both, "media": None, "output": None}))
    assert Timing.model_validate_json(dump({**both, "output": None})).output is None


def test_a_record_from_before_the_tensors_reads_as_before(fresh: Fresh) -> None:
    record = fresh()
    for path in record.glob("arms/*/sample-*/timing.json"):
        edit(path, lambda value: value.pop("output"))

    def older(value: Any) -> None:
        for arm in value["arms"].values():
            for sample in [*arm["samples"], arm["warmup"]]:
                for key in ("video_sha256", "audio_sha256", "unmuxed"):
                    del sample[key]

    edit(record / "benchmark.json", older)
    assert verify_record(record).result == "PASSED"


@pytest.mark.parametrize(("options", "said"), [({"overrides": ALLOWED, "unmuxed": REASON}, True), ({}, False)])
def test_the_report_says_which_arms_were_not_muxed_and_why(fresh: Fresh, options: dict[str, Any], said: bool) -> None:
    text = StringIO()
    print_benchmark(Console(file=text, width=300), derive(read_record(fresh(**options))))
    assert (f"dense, fullopt: not muxed ({REASON})" in text.getvalue()) == said
