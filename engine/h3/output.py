"""Requests that are not muxed: their tensors stay in the worker, which digests them after it has answered.

SGLang's MiniMax-H3 refuses `save_output=False`, and tensors that are returned would be pickled inside the stopwatch
(1.5 GB at full size). So a request is sent as always, and two names are replaced: `save_outputs` in the worker, which
keeps the tensors where it would encode them, and ffprobe's look at the finished file in the driver.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import time
from pathlib import Path
from typing import Any

import torch

from config.record import Output, OutputTensor, TensorOutput
from config.schema import Target
from engine.h3.tracker import Tracker

UNMUXED_VARIABLE = "SOL_ARM_UNMUXED"
"""How the driver hands its decision to the workers that it spawns: the reason, or not set."""
GPU_WORKER = "sglang.multimodal_gen.runtime.managers.gpu_worker"
SCHEDULER = "sglang.multimodal_gen.runtime.managers.scheduler"
ADAPTER = "sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.video_adapter"
PIECE = 64 << 20  # bytes that are copied to the host at once
PATIENCE_SECONDS = 900.0
POLL_SECONDS = 0.05


def why_not_muxed(target: Target) -> str:
    """What this machine lacks to mux and to decode a video, or empty: it is muxed.

    A target that asks for `mp4` is muxed whatever the machine has; the doctor refused already where it cannot.
    """
    if target.output == "mp4":
        return ""
    from engine.doctor import Severity
    from engine.doctor.media import check_media

    return "; ".join(f"{check.name}: {check.found}" for check in check_media() if check.severity is not Severity.OK)


def expect_no_file() -> str:
    """In the driver: SGLang looks at the finished file with ffprobe, and there is none."""
    importlib.import_module(ADAPTER)._probe_minimax_h3_output_fields = lambda path, **expected: {}  # type: ignore[attr-defined]
    return "output.no_file"


def keep_tensors(tracker: Tracker) -> str:
    """In a worker: keep a request's tensors where SGLang would encode them, and digest them once it has answered."""
    kept: list[tuple[Any, Any, int]] = []
    worker = importlib.import_module(GPU_WORKER)
    scheduler = importlib.import_module(SCHEDULER).Scheduler
    answer = scheduler.return_result

    def keep(
        outputs: Any,
        data_type: Any,
        fps: int,
        save_output: bool,
        build_output_path: Any,
        *,
        audio: Any,
        audio_sample_rate: int,
        **processing: Any,
    ) -> list[str]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a request ends when its pixels exist, as it does where they are encoded
        kept.append((outputs, audio, audio_sample_rate))
        return [build_output_path(index) for index in range(len(outputs))]

    def answered(self: Any, *args: Any, **kwargs: Any) -> None:
        answer(self, *args, **kwargs)
        while kept:
            video, audio, rate = kept.pop()
            digests = {"video": digest(video), "audio": digest(audio)}
            tracker.log.write(Output, sample=tracker.sample, audio_sample_rate=int(rate), **digests)

    worker.save_outputs, scheduler.return_result = keep, answered  # type: ignore[attr-defined]
    return "output.tensors"


def digest(tensor: torch.Tensor) -> OutputTensor:
    """Shape, dtype and SHA-256 of a tensor of any device and strides, as `OutputTensor` defines them.

    Elements are taken as they lie in memory: every processor that PyTorch runs CUDA beside is little-endian.

    Raises:
        pydantic.ValidationError: the dtype is none of those that a record knows.
    """
    sha = hashlib.sha256()
    for piece in tensor.detach().contiguous().flatten().view(torch.uint8).split(PIECE):
        sha.update(piece.cpu().numpy())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return OutputTensor.model_validate({"shape": tuple(tensor.shape), "dtype": dtype, "sha256": sha.hexdigest()})


def wait_for_output(events: Path, sample: int, reason: str, patience: float = PATIENCE_SECONDS) -> TensorOutput | None:
    """What the worker wrote of a sample, as soon as it has; None when it does not within `patience` seconds.

    Args:
        events: rank 0's events file, which the worker appends to.
        sample: which request.
        reason: why it was not muxed.
    """
    event = wait_for_event(events, sample, "output", patience)
    return None if event is None else tensor_output(Output.model_validate(event), reason)


def wait_for_event(events: Path, sample: int, kind: str, patience: float = PATIENCE_SECONDS) -> dict[str, Any] | None:
    """A sample's last event of a kind, as soon as the worker has written it; None when it does not within `patience`
    seconds.
    """
    deadline, quoted = time.monotonic() + patience, f'"{kind}"'.encode()
    while True:
        for line in reversed(events.read_bytes().split(b"\n")[:-1]):
            if quoted in line and (event := json.loads(line))["event"] == kind and event["sample"] == sample:
                return dict(event)
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_SECONDS)


def tensor_output(event: Output, reason: str) -> TensorOutput:
    """The `output` of timing.json from the worker's event."""
    frames, height, width = event.video.shape[-3:]
    return TensorOutput(
        reason=reason,
        video=event.video,
        audio=event.audio,
        frames=frames,
        width=width,
        height=height,
        audio_sample_rate=event.audio_sample_rate,
    )
