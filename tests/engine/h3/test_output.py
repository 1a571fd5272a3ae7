"""Requests that are not muxed: what the worker keeps, when it digests, how the driver waits. SGLang itself is in
tests/e2e/test_unmuxed.py."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from config.lock import load_target
from config.record import Output
from engine.evidence import EventLog
from engine.h3 import output

NUMPY = {torch.float32: np.dtype("<f4"), torch.float16: np.dtype("<f2"), torch.bfloat16: np.dtype(ml_dtypes.bfloat16)}


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    dtype=st.sampled_from(list(NUMPY)),
    order=st.randoms(use_true_random=False),
    piece=st.integers(1, 300),
)
def test_a_digest_is_of_row_major_little_endian_bytes_whatever_the_strides(
    shape: list[int], dtype: torch.dtype, order: Any, piece: int
) -> None:
    values = np.arange(np.prod(shape), dtype=np.float64).reshape(shape) / 7
    axes = list(range(len(shape)))
    order.shuffle(axes)
    tensor = torch.from_numpy(values).to(dtype).permute(axes)
    data = np.ascontiguousarray(values.transpose(axes)).astype(np.float32).astype(NUMPY[dtype]).tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "PIECE", piece)
        found = output.digest(tensor)
    assert (found.shape, found.dtype) == (tuple(tensor.shape), str(dtype).removeprefix("torch."))
    assert found.sha256 == hashlib.sha256(data).hexdigest()


def test_a_digest_tells_a_sign_of_zero_and_a_dtype_apart() -> None:
    zero, minus = torch.zeros(2), -torch.zeros(2)
    assert len({output.digest(t).sha256 for t in (zero, minus, zero.to(torch.bfloat16))}) == 3


def test_pixels_that_were_converted_to_integers_are_refused() -> None:
    with pytest.raises(ValidationError, match="float32"):
        output.digest(torch.zeros(3, dtype=torch.uint8))


class Scheduler:
    """Stands for SGLang's: what it sends is in `sent`."""

    def __init__(self, sent: list[str]) -> None:
        self.sent = sent

    def return_result(self, output_batch: Any, identity: bytes | None = None, should_not_return: bool = False) -> None:
        self.sent.append(output_batch)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules in place of SGLang's, with the names that are replaced."""
    worker, scheduler, adapter = (ModuleType(name) for name in (output.GPU_WORKER, output.SCHEDULER, output.ADAPTER))
    worker.save_outputs = adapter._probe_minimax_h3_output_fields = None  # type: ignore[attr-defined]
    scheduler.Scheduler = type("Scheduler", (Scheduler,), dict(Scheduler.__dict__))  # type: ignore[attr-defined]
    for module in (worker, scheduler, adapter):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(worker=worker, scheduler=scheduler, adapter=adapter)


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_worker_digests_after_it_has_answered_and_once(sglang: SimpleNamespace, tmp_path: Path) -> None:
    events = tmp_path / "events-rank0.jsonl"
    log = EventLog(events, "worker", time.monotonic())
    assert output.keep_tensors(SimpleNamespace(log=log, sample=3)) == "output.tensors"  # type: ignore[arg-type]
    video, audio = torch.rand(1, 3, 2, 4, 6), torch.rand(1, 2, 9)
    paths = sglang.worker.save_outputs(
        video, "video", 24, True, lambda index: f"out-{index}.mp4", audio=audio, audio_sample_rate=32000, upscale=None
    )
    assert paths == ["out-0.mp4"] and told(events) == []
    sent: list[Any] = []
    scheduler = sglang.scheduler.Scheduler(sent)
    scheduler.return_result("answer", b"driver", should_not_return=False)
    scheduler.return_result("another")
    assert sent == ["answer", "another"]
    (event,) = told(events)
    assert (event["event"], event["sample"], event["audio_sample_rate"]) == ("output", 3, 32000)
    assert event["video"] == output.digest(video).model_dump(mode="json")
    assert event["audio"] == output.digest(audio).model_dump(mode="json")


def test_an_answer_that_cannot_be_sent_is_not_followed_by_a_digest(sglang: SimpleNamespace, tmp_path: Path) -> None:
    class Broken:
        def append(self, batch: Any) -> None:
            raise OSError("no driver")

    log = EventLog(tmp_path / "events-rank0.jsonl", "worker", time.monotonic())
    output.keep_tensors(SimpleNamespace(log=log, sample=0))  # type: ignore[arg-type]
    sglang.worker.save_outputs(
        torch.rand(1, 3, 1, 2, 2), 0, 24, True, str, audio=torch.rand(1, 2, 4), audio_sample_rate=8
    )
    with pytest.raises(OSError, match="no driver"):
        sglang.scheduler.Scheduler(Broken()).return_result("answer")
    assert told(tmp_path / "events-rank0.jsonl") == []


def test_the_driver_looks_at_no_file(sglang: SimpleNamespace) -> None:
    assert output.expect_no_file() == "output.no_file"
    probe = sglang.adapter._probe_minimax_h3_output_fields
    assert probe("/nowhere.mp4", expected_frame_count=124, expected_size=(1344, 768)) == {}


@pytest.fixture
def worker_log(tmp_path: Path) -> Iterator[EventLog]:
    log = EventLog(tmp_path / "events-rank0.jsonl", "worker", time.monotonic())
    yield log
    log.close()


def tell(log: EventLog, sample: int) -> None:
    video, audio = output.digest(torch.full((1, 3, 5, 4, 6), float(sample))), output.digest(torch.zeros(1, 2, 7))
    log.write(Output, sample=sample, video=video, audio=audio, audio_sample_rate=32000)


def test_the_driver_waits_for_its_own_sample(tmp_path: Path, worker_log: EventLog) -> None:
    tell(worker_log, 0)
    later = threading.Timer(0.2, tell, (worker_log, 1))
    later.start()
    found = output.wait_for_output(tmp_path / "events-rank0.jsonl", 1, "no ffmpeg", patience=20)
    later.join()
    assert found is not None and found.reason == "no ffmpeg"
    assert (found.frames, found.height, found.width, found.audio_sample_rate) == (5, 4, 6, 32000)
    assert found.video == output.digest(torch.full((1, 3, 5, 4, 6), 1.0))


def test_the_driver_does_not_wait_without_end(tmp_path: Path, worker_log: EventLog) -> None:
    tell(worker_log, 0)
    assert output.wait_for_output(tmp_path / "events-rank0.jsonl", 1, "no ffmpeg", patience=0.1) is None


def test_only_a_target_that_allows_it_goes_without_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert output.why_not_muxed(load_target("cpu")) == ""
    assert (
        output.why_not_muxed(load_target("cpu", ["output=mp4_or_tensors"]))
        == "ffmpeg: not on PATH; ffprobe: not on PATH"
    )


@pytest.mark.skipif(shutil.which("ffprobe") is None, reason="ffmpeg is not on PATH")
def test_a_machine_that_can_mux_does(monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target("cpu", ["output=mp4_or_tensors"])
    assert output.why_not_muxed(target) == ""
    monkeypatch.setitem(sys.modules, "av", None)
    assert output.why_not_muxed(target).startswith("PyAV: cannot be imported")
