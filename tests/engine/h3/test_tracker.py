"""What a worker's tracker writes of a request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from config.lock import resolve
from engine.evidence import EventLog
from engine.h3.spec import ArmSpec, RequestSpec
from engine.h3.tracker import LAST_STAGE, Tracker

GIB = 2**30


class Allocator:
    """CUDA's caching allocator as far as its peaks go, bytes."""

    def __init__(self) -> None:
        self.held = self.peak = 16 * GIB

    def use(self, gib: int) -> None:
        """Hold this much for a moment."""
        self.peak = max(self.peak, gib * GIB)

    def reset(self) -> None:
        self.peak = self.held


@pytest.mark.parametrize(
    "use",
    [(46, 26, 48), (60, 26, 20), (20, 70, 30)],
    ids=["decode needs most", "text encoding needs most", "denoising needs most"],
)
def test_peak_memory_is_that_of_the_whole_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: tuple[int, int, int]
) -> None:
    """As SGLang takes it, from before text encoding to after decode; and each request has its own."""
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset)
    for name in ("max_memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: allocator.peak)
    requests = tuple(
        RequestSpec(sample=sample, phase="warmup" if sample == 0 else "measured", seed=1, num_inference_steps=50)
        for sample in (0, 1)
    )
    spec = ArmSpec(record=str(tmp_path), arm="dense", lock=resolve("h100x4"), checkpoint="/weights", requests=requests)
    path = tmp_path / "events-rank0.jsonl"
    tracker = Tracker(spec, 0, EventLog(path, "worker", 0.0))
    allocator.use(100)  # while the weights were loaded
    for largest in (use, (18, 19, 17)):
        encode, denoise, decode = largest
        tracker.begin_stage()
        allocator.use(encode)
        tracker.end_stage("MiniMaxH3TextEncodingStage", 1.0)
        tracker.begin_stage()
        tracker.begin_request()
        allocator.use(denoise)
        tracker.end_request(1.0)
        tracker.end_stage("MiniMaxH3DenoisingStage", 1.0)
        tracker.begin_stage()
        allocator.use(decode)
        tracker.end_stage(LAST_STAGE, 1.0)
    told = [event for event in map(json.loads, path.read_text().splitlines()) if event["event"] == "memory"]
    assert [(event["sample"], event["reserved_mib"]) for event in told] == [(0, max(use) * 1024), (1, 19 * 1024)]
