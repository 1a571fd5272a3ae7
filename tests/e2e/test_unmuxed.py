"""A machine without ffmpeg, ffprobe, PyAV and imageio-ffmpeg: the run, its record, its verdict."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import SHORT, Finished, Sol, benchmark, events

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
HIDDEN = ("av", "imageio_ffmpeg", "soundfile")
HIDE = f"""
import importlib.machinery as machinery
find = machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {HIDDEN} else find(name, path, target)
machinery.PathFinder.find_spec = staticmethod(find_spec)
"""
"""Run by Python at its start, in every process: these packages are not there."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of such a machine."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(HIDE)
    tools = folder / "bin"
    tools.mkdir()
    if (git := shutil.which("git")) is not None:
        (tools / "git").symlink_to(git)
    before = os.environ.get("PYTHONPATH")
    return {"PATH": str(tools), "PYTHONPATH": os.pathsep.join([str(folder), before] if before else [str(folder)])}


@pytest.fixture(scope="module")
def unmuxed(sol: Sol, bare: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """Two samples of the stock arm, which loads and decodes as every arm does."""
    out = tmp_path_factory.mktemp("unmuxed")
    override = ("--set", "output=mp4_or_tensors", "--set", f"env.PYTHONPATH={bare['PYTHONPATH']}")
    finished = sol("benchmark", "cpu", "--arm", "dense", "--samples", "2", *SHORT, *override, "--out", out, **bare)
    assert finished.code == 0, finished.output
    return finished, finished.record(out)


def test_it_runs_and_warns(unmuxed: tuple[Finished, Path]) -> None:
    finished, record = unmuxed
    for name in ("ffmpeg", "ffprobe", "PyAV", "imageio-ffmpeg"):
        assert f"warning: {name}: " in finished.output
    assert "not muxed (ffmpeg: not on PATH; ffprobe: not on PATH; PyAV" in finished.output
    assert "PASSED (partial)" in finished.output
    assert [path for path in record.rglob("*") if path.suffix == ".mp4"] == []


def test_its_record_says_what_left_the_pipeline(unmuxed: tuple[Finished, Path]) -> None:
    _, record = unmuxed
    timings = [json.loads((record / f"arms/dense/sample-{n}/timing.json").read_bytes()) for n in range(3)]
    told = list(events(record, "dense", "output"))
    assert [event["sample"] for event in told] == [0, 1, 2]
    for timing, event in zip(timings, told, strict=True):
        output = timing["output"]
        assert timing["media"] is None and output["video"] == event["video"] and output["audio"] == event["audio"]
        assert output["video"]["shape"] == [1, 3, 39, 256, 448] and output["video"]["dtype"] == "float32"
        assert (output["frames"], output["height"], output["width"], output["audio_sample_rate"]) == (
            39,
            256,
            448,
            32000,
        )
    digests = [(timing["output"]["video"]["sha256"], timing["output"]["audio"]["sha256"]) for timing in timings]
    assert digests[1] == digests[2] != digests[0]  # the measured samples have one seed, the warm-up another
    samples = benchmark(record)["arms"]["dense"]["samples"]
    assert [(sample["video_sha256"], sample["audio_sha256"]) for sample in samples] == digests[1:]


def test_the_worker_digests_last(unmuxed: tuple[Finished, Path]) -> None:
    _, record = unmuxed
    for sample in range(3):
        own = [e for e in events(record, "dense") if e["source"] == "worker" and e.get("sample") == sample]
        assert [event["event"] for event in own[-2:]] == ["latents", "output"]
        assert own[-4]["name"] == "MiniMaxH3DecodingStage" and own[-3]["event"] == "memory"


def test_it_verifies_in_part_and_a_changed_digest_is_found(
    sol: Sol, unmuxed: tuple[Finished, Path], bare: dict[str, str], tmp_path: Path
) -> None:
    record = Path(shutil.copytree(unmuxed[1], tmp_path / "record"))
    report = json.loads(sol("verify", record, "--json", **bare).output)
    assert (report["result"], report["verdict"]) == ("PASSED (partial)", "UNTRUSTED")
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert by_check["media-decoded"]["status"] == "skipped" and "not muxed" in by_check["media-decoded"]["message"]
    assert by_check["media-repeatable"]["status"] == by_check["media-asked"]["status"] == "ok"
    timing = record / "arms/dense/sample-1/timing.json"
    value = json.loads(timing.read_bytes())
    digest = value["output"]["video"]["sha256"]
    timing.write_text(timing.read_text().replace(digest, "0" * 64))
    for name in ("attestation.json", "signer.json"):  # unsigned: the digest alone must be found
        (record / name).unlink()
    finished = sol("verify", record, "--json", **bare)
    assert finished.code == 13, finished.output
    faults = {f["check"] for f in json.loads(finished.output)["findings"] if f["status"] == "invalid"}
    assert faults == {"media-decoded", "benchmark-derived"}
