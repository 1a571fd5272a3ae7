"""What a worker tells of its latents, against NumPy. SGLang itself is in tests/e2e."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.lock import resolve
from config.record import EVENT, Latents
from engine.evidence import EventLog
from engine.h3 import latents, output
from engine.h3.arm import Driver
from engine.h3.spec import ArmSpec, RequestSpec

NUMPY = {torch.float32: np.dtype("<f4"), torch.float16: np.dtype("<f2"), torch.bfloat16: np.dtype(ml_dtypes.bfloat16)}


def places(elements: int) -> list[int]:
    """The rule in Python's integers, which do not overflow."""
    count = min(1024, elements)
    part = elements // count
    return [index * elements // count + part * (2654435761 * index % 2**32) // 2**32 for index in range(count)]


@given(elements=st.one_of(st.integers(1, 5000), st.integers(1, 10**12)))
def test_one_element_of_each_even_part_is_sampled(elements: int) -> None:
    found = latents.sampled_indices(elements).tolist()
    assert found == places(elements)
    count = min(1024, elements)
    edges = [part * elements // count for part in range(count + 1)]
    assert all(low <= index < high for low, index, high in zip(edges, found, edges[1:], strict=False))
    if elements <= 1024:
        assert found == list(range(elements))


@pytest.mark.parametrize(
    ("shape", "strided", "least"),
    [((24, 37, 48, 84), 8, 1.0), ((24, 12, 16, 28), 2, 1.0), ((2, 32, 207), 16, 0.8), ((2, 32, 65), 16, 0.95)],
    ids=["published video", "cpu video", "published audio", "cpu audio"],
)
def test_a_fixed_stride_saw_few_columns_of_the_latent(shape: tuple[int, ...], strided: int, least: float) -> None:
    """floor(i n / 1,024) falls on `strided` of the last axis; the rule on at least a share `least` of each axis."""
    elements = math.prod(shape)
    columns = np.unravel_index(np.arange(1024) * elements // 1024, shape)[-1]
    assert len(set(columns.tolist())) == strided
    sampled = np.unravel_index(latents.sampled_indices(elements).numpy(), shape)
    for axis, length in zip(sampled, shape, strict=True):
        counts = np.bincount(axis, minlength=length)
        assert (counts > 0).mean() >= least and counts.max() <= 1.6 * 1024 / length + 1


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    dtype=st.sampled_from(list(NUMPY)),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 99),
    spoiled=st.sets(st.sampled_from([math.nan, math.inf, -math.inf])),
)
def test_a_description_is_what_numpy_says(
    shape: list[int], dtype: torch.dtype, order: Any, seed: int, spoiled: set[float]
) -> None:
    """Whatever the strides: a permuted tensor is described in the order of its own indices."""
    values = np.random.default_rng(seed).normal(size=shape)
    values.ravel()[: len(spoiled)] = list(spoiled)[: values.size]
    stored = values.astype(np.float32).astype(NUMPY[dtype])
    axes = list(range(len(shape)))
    order.shuffle(axes)
    bits = torch.from_numpy(stored.view(f"int{8 * stored.itemsize}"))  # a NaN keeps its payload
    found = latents.describe(bits.view(dtype).permute(axes))
    array = np.ascontiguousarray(stored.transpose(axes))
    exact = array.astype(np.float64).ravel()
    good = np.isfinite(exact)
    assert (found.shape, found.dtype) == (array.shape, str(dtype).removeprefix("torch."))
    assert found.sha256 == hashlib.sha256(array.tobytes()).hexdigest()
    assert found.not_finite == int((~good).sum())
    assert math.isclose(found.sum_squares, math.fsum(x * x for x in exact[good]), rel_tol=1e-12)
    kept = [exact[index] for index in places(exact.size)]
    assert found.values == tuple(float(x) if math.isfinite(x) else None for x in kept)


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_any_float32_survives_the_events_json(bits: list[int]) -> None:
    array = np.array(bits, np.uint32).view(np.float32)
    told = latents.describe(torch.from_numpy(array))
    read = EVENT.validate_json(
        Latents(t=0.0, seq=0, source="worker", sample=0, video=told, audio=told).model_dump_json()
    )
    back = np.array([math.nan if value is None else value for value in read.video.values], np.float32)
    good = np.isfinite(array)
    assert back[good].tobytes() == array[good].tobytes() and np.isnan(back[~good]).all()


class Stage:
    """Stands for SGLang's denoising stage: it leaves what it is given."""

    def _run_full_loop(self, batch: Any, server_args: Any) -> None:
        batch.latents, batch.audio_latents = server_args


class Scheduler:
    """Stands for SGLang's."""

    def return_result(self, output_batch: Any, identity: bytes | None = None, should_not_return: bool = False) -> None:
        output_batch.sent = True


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    module = ModuleType(output.SCHEDULER)
    module.Scheduler = type("Scheduler", (Scheduler,), dict(Scheduler.__dict__))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    stage = type("Stage", (Stage,), dict(Stage.__dict__))
    path = tmp_path / "events-rank0.jsonl"
    tracker = SimpleNamespace(log=EventLog(path, "worker", time.monotonic()), sample=2)
    assert latents.observe_latents(tracker, stage) == "observe.latents"  # type: ignore[arg-type]
    return SimpleNamespace(stage=stage(), scheduler=module.Scheduler(), path=path)  # type: ignore[attr-defined]


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_latents_are_those_of_the_loops_end_and_told_after_the_answer(worker: SimpleNamespace) -> None:
    """Decoding changes them in place before the answer goes out."""
    batch = SimpleNamespace()
    video, audio = torch.rand(1, 24, 2, 3, 4), torch.rand(2, 8, 5)
    before = {"video": latents.describe(video), "audio": latents.describe(audio)}
    worker.stage._run_full_loop(batch, (video, audio))
    assert batch.latents is video and batch.audio_latents is audio
    batch.latents.mul_(2).add_(1)
    batch.audio_latents.zero_()
    assert told(worker.path) == []
    answer = SimpleNamespace(error=None)
    worker.scheduler.return_result(answer, b"driver", should_not_return=False)
    worker.scheduler.return_result(SimpleNamespace(error=None))  # an answer to something else
    (event,) = told(worker.path)
    assert answer.sent and (event["event"], event["sample"]) == ("latents", 2)
    assert all(event[name] == before[name].model_dump(mode="json") for name in before)


def test_a_request_that_failed_after_its_loop_tells_nothing_then_or_later(worker: SimpleNamespace) -> None:
    """The driver has written the arm's end by then, and that is the last line of a process."""
    worker.stage._run_full_loop(SimpleNamespace(), (torch.rand(3), torch.rand(3)))
    worker.scheduler.return_result(SimpleNamespace(error="out of memory"))
    worker.scheduler.return_result(SimpleNamespace(error=None))
    assert told(worker.path) == []


def test_a_loop_that_was_never_answered_is_forgotten(worker: SimpleNamespace) -> None:
    worker.stage._run_full_loop(SimpleNamespace(), (torch.zeros(3), torch.zeros(3)))
    worker.stage._run_full_loop(SimpleNamespace(), (torch.ones(3), torch.ones(3)))
    worker.scheduler.return_result(SimpleNamespace(error=None))
    (event,) = told(worker.path)
    assert event["video"]["values"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("there", [True, False])
def test_the_driver_waits_for_them_before_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    request = RequestSpec(sample=0, phase="warmup", seed=1, num_inference_steps=17)
    spec = ArmSpec(record=str(tmp_path), arm="dense", lock=resolve("cpu"), checkpoint="/weights", requests=(request,))
    driver, asked = Driver(spec), []

    def wait(events: Path, sample: int, kind: str) -> dict[str, Any] | None:
        asked.append((events.name, sample, kind))
        return {} if there else None

    monkeypatch.setattr(output, "wait_for_event", wait)
    assert driver.has_latents(4) is there
    assert asked == [("events-rank0.jsonl", 4, "latents")]
    assert driver.last_error == ("" if there else "the worker did not digest the latents of sample 4 in time")
