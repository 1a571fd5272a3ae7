"""What arms change numerically: both derivations of the distances, the checks of the latents, the report's lines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from config.record import Benchmark, LatentTensor, TensorDistance
from entrypoints.report import print_benchmark
from tests.verify.builder import edit, edit_events, latent_arrays, latent_of, latents_of, summarise
from tests.verify.test_checks import FULL, drop, each, put_question
from verify import derive as derivation
from verify.checks.latents import _holds
from verify.derive import derive, differences
from verify.findings import worst
from verify.reader import read_record

Fresh = Callable[..., Path]
ARMS = ("dense", "lossless", "cache", "fullopt", "sol")
EVENTS = FULL + "events-rank0.jsonl"


def distances(one: LatentTensor, other: LatentTensor) -> list[TensorDistance]:
    """By each side; the one that runs is not there in a plain install."""
    summary = pytest.importorskip("engine.summary")
    return [derivation.tensor_distance(one, other), summary.tensor_distance(one, other)]


def tensor(array: Any, **fields: Any) -> LatentTensor:
    return LatentTensor.model_validate({**latent_of(np.asarray(array, np.float32)), **fields})


def close(found: float | None, wanted: float) -> bool:
    return found is not None and math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-300)


@settings(deadline=None)
@given(
    size=st.integers(1, 1024),
    seed=st.integers(0, 10**6),
    error=st.sampled_from([0.0, 1e-6, 0.3, 50.0]),
    scale=st.sampled_from([1e-18, 1.0, 1e18]),
)
def test_of_small_tensors_the_error_is_exact(size: int, seed: int, error: float, scale: float) -> None:
    noise = np.random.default_rng(seed)
    base = (scale * noise.normal(size=size)).astype(np.float32)
    other = (base + error * scale * noise.normal(size=size)).astype(np.float32)
    x, y = other.astype(np.float64), base.astype(np.float64)
    for found in distances(tensor(other), tensor(base)):
        assert close(found.rel_l2, float(np.sqrt(((x - y) ** 2).sum() / (y**2).sum())))
        assert close(found.norm_ratio, float(np.sqrt((x**2).sum() / (y**2).sum())))
        assert found.equal is bool((other == base).all()) and found.sampled == found.elements == size
        assert abs(found.norm_ratio - 1) <= found.rel_l2 + 1e-12  # type: ignore[operator]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), error=st.sampled_from([1e-3, 0.12, 0.31]))
def test_of_large_tensors_it_is_an_estimate(seed: int, error: float) -> None:
    """Independent normal elements: five deviations of a ratio of two norms of 1,024 each."""
    noise = np.random.default_rng(seed)
    base = noise.normal(size=(24, 50, 37)).astype(np.float32)
    other = (base + error * noise.normal(size=base.shape)).astype(np.float32)
    full = np.linalg.norm((other - base).astype(np.float64)) / np.linalg.norm(base.astype(np.float64))
    for found in distances(tensor(other), tensor(base)):
        assert (found.sampled, found.elements, found.equal) == (1024, base.size, False)
        assert found.rel_l2 is not None and abs(found.rel_l2 / full - 1) < 5 / math.sqrt(1024)


@pytest.mark.parametrize(
    ("one", "other", "error", "ratio", "equal"),
    [
        (tensor([3.0, 4.0]), tensor([3.0, 0.0]), 4 / 3, 5 / 3, False),
        (tensor([3.0, 4.0]), tensor([[3.0, 4.0]]), None, 1.0, False),
        (tensor([0.0, 0.0]), tensor([0.0, 0.0]), None, None, True),
        (tensor([1.0, 0.0]), tensor([0.0, 0.0]), None, None, False),
        (tensor([0.0, 0.0]), tensor([1.0, 0.0]), 1.0, None, False),
        (tensor([1.0, 2.0], values=[None, 2.0], not_finite=1), tensor([1.0, 2.0]), None, None, True),
        (tensor([1.0, 2.0]), tensor([1.0, 2.0], values=[1.0, None], not_finite=1), None, None, True),
        (tensor([1.0, 2.0]), tensor([1.0, 2.0], dtype="bfloat16"), 0.0, 1.0, False),
        (tensor([1.0], values=[1e308]), tensor([1.0], values=[-1e308]), None, 1.0, True),
        (tensor([1.0], values=[5e-324]), tensor([1.0], values=[1.0]), 1.0, 1.0, True),
    ],
)
def test_distances_by_hand(
    one: LatentTensor, other: LatentTensor, error: float | None, ratio: float | None, equal: bool
) -> None:
    for found in distances(one, other):
        assert found.rel_l2 == pytest.approx(error) and found.norm_ratio == pytest.approx(ratio)
        assert found.equal is equal


def test_both_sides_compare_each_sample_with_each_baseline(fresh: Fresh) -> None:
    """In the order of the ratios; dense's samples 1 and 2 have one seed, and the first of them is the baseline."""
    summary = pytest.importorskip("engine.summary")
    record = fresh(arms=ARMS, samples=2, resumed=("fullopt",))
    found = derive(read_record(record))
    theirs = summary.summarise(record)
    assert list(differences(theirs.model_dump(mode="json"), found.model_dump(mode="json"))) == []
    pairs = [(arm, "dense") for arm in ("lossless", "cache", "fullopt", "sol")]
    pairs += [("cache", "lossless"), ("fullopt", "lossless"), ("fullopt", "cache")]
    samples = {"fullopt": (1, 2, 4, 5)}
    assert [(x.arm, x.baseline, x.sample, x.baseline_sample) for x in found.latents] == [
        (*pair, sample, 1) for pair in pairs for sample in samples.get(pair[0], (1, 2))
    ]
    request = read_record(record).target.request
    arrays = {arm: latent_arrays(arm, request.seed, request.num_inference_steps) for arm in ARMS}
    for distance in found.latents:
        for name in ("video", "audio"):
            x, y = (arrays[arm][name].ravel().astype(np.float64) for arm in (distance.arm, distance.baseline))
            count = min(1024, x.size)
            shift = [x.size // count * (2654435761 * index % 2**32) // 2**32 for index in range(count)]
            rows = np.arange(count) * x.size // count + np.array(shift)
            got = getattr(distance, name)
            assert got.rel_l2 == pytest.approx(np.linalg.norm((x - y)[rows]) / np.linalg.norm(y[rows]), rel=1e-9)
            assert got.equal is ({distance.arm, distance.baseline} == {"lossless", "dense"})
            assert (got.sampled, got.elements) == (len(rows), x.size)
    audio = found.latents[-1].audio
    assert audio.sampled == audio.elements == 400


def ask_for(**fields: Any) -> Callable[[Any], None]:
    return lambda value: value.update(fields)


def test_a_sample_that_was_asked_for_something_else_is_not_compared(fresh: Fresh) -> None:
    summary = pytest.importorskip("engine.summary")
    record = fresh(samples=2)
    edit(record / "arms/dense/sample-1/timing.json", ask_for(seed=77))
    edit(record / FULL / "sample-2/timing.json", ask_for(num_inference_steps=9))
    for found in (derive(read_record(record)), summary.summarise(record)):
        assert [(x.sample, x.baseline_sample) for x in found.latents] == [(1, 2)]


def test_a_changed_value_is_not_what_benchmark_json_follows_from(fresh: Fresh) -> None:
    record = fresh()
    assert worst(put_question(record, "benchmark-derived")) == "ok"
    each("latents", lambda event: event["video"]["values"].__setitem__(7, 3.0), EVENTS, sample=1)(record)
    found = put_question(record, "benchmark-derived")
    assert worst(found) == "invalid" and "latents[0].video.rel_l2" in found[0].message


@pytest.mark.parametrize("alter", [lambda x: x["values"].__setitem__(5, 0.5), lambda x: x.update(sum_squares=9e9)])
def test_one_digest_goes_with_one_tensor(fresh: Fresh, alter: Callable[[Any], None]) -> None:
    record = fresh(arms=("dense", "lossless"))
    assert worst(put_question(record, "latents-told")) == "ok"
    each("latents", lambda event: alter(event["video"]), "arms/lossless/events-rank0.jsonl", sample=1)(record)
    (found,) = put_question(record, "latents-told")
    assert found.status == "invalid" and found.message.endswith("another tensor of this digest has other elements")


def test_a_changed_digest_or_a_forged_equality_is_found(fresh: Fresh) -> None:
    record = fresh(arms=("dense", "lossless"))
    each("latents", lambda event: event["audio"].update(sha256="0" * 64), "arms/lossless/events-rank0.jsonl", sample=1)(
        record
    )
    found = put_question(record, "benchmark-derived")
    assert worst(found) == "invalid" and "latents[0].audio.equal is True" in found[0].message
    other = fresh()
    edit(other / "benchmark.json", lambda value: value["latents"][0]["video"].update(equal=True))
    assert worst(put_question(other, "benchmark-derived")) == "invalid"


def test_records_of_earlier_releases_stay_valid_and_say_what_they_lack(fresh: Fresh) -> None:
    record = fresh(latents=False)
    edit(record / "benchmark.json", lambda value: value.pop("latents"))
    assert Benchmark.model_validate_json((record / "benchmark.json").read_bytes()).latents == ()
    assert worst(put_question(record, "benchmark-derived")) == "ok"
    (found,) = put_question(record, "latents-told")
    assert found.status == "skipped" and found.message.startswith("4 samples are of a release")
    (found,) = put_question(record, "latents-repeatable")
    assert found.status == "skipped"


def test_a_record_that_a_later_release_added_to_tells_of_its_own_samples(fresh: Fresh) -> None:
    record = fresh(resumed=("fullopt",))

    def forget(lines: list[Any]) -> list[Any]:
        """The first process as an earlier release would have left it."""
        first, kept, seq = True, [], {"driver": 0, "worker": 0}
        for line in lines:
            first = first and not (line["event"] == "arm_start" and line["source"] == "driver" and kept)
            if first and line["event"] == "latents":
                continue
            if first and line["event"] == "arm_start":
                line["seams"] = [seam for seam in line["seams"] if seam != "observe.latents"]
            kept.append({**line, "seq": seq[line["source"]]})
            seq[line["source"]] += 1
        return kept

    edit_events(record / EVENTS, forget)
    summarise(record)
    assert worst(put_question(record, "record-events")) == worst(put_question(record, "benchmark-derived")) == "ok"
    (found,) = put_question(record, "latents-told")
    assert found.status == "skipped" and found.message.startswith("2 samples are of a release")
    assert [x.sample for x in derive(read_record(record)).latents] == [3]
    drop("latents", EVENTS, sample=3)(record)
    assert worst(put_question(record, "latents-told")) == "invalid"


def test_a_cpu_run_whose_loops_differ_is_warned_of_and_a_gpu_run_is_not(fresh: Fresh) -> None:
    record = fresh(samples=2)
    assert worst(put_question(record, "latents-repeatable")) == "ok"
    each("latents", lambda event: event["audio"].update(sha256="0" * 64), EVENTS, sample=2)(record)
    (found,) = [finding for finding in put_question(record, "latents-repeatable") if finding.status != "ok"]
    assert found.status == "warn" and found.message.startswith("2 different latents of 2 measured requests")
    small = ("request.width=64", "request.height=64", "request.frames=5", "request.fps=24")
    gpu = fresh(target="rtx4090", arms=("dense",), samples=2, overrides=small)
    (found,) = put_question(gpu, "latents-repeatable")
    assert found.status == "skipped" and found.message.endswith("1 of 1 repeated requests do")
    each("latents", lambda event: event["audio"].update(sha256="0" * 64), "arms/dense/events-rank0.jsonl", sample=2)(
        gpu
    )
    (found,) = put_question(gpu, "latents-repeatable")
    assert found.status == "skipped" and found.message.endswith("0 of 1 repeated requests do")


def test_warm_ups_of_two_processes_repeat_too(fresh: Fresh) -> None:
    record = fresh(resumed=("fullopt",))
    each("latents", lambda event: event["audio"].update(sha256="0" * 64), EVENTS, sample=2)(record)
    (found,) = [finding for finding in put_question(record, "latents-repeatable") if finding.status != "ok"]
    assert "2 different latents of 2 warmup requests" in found.message


@settings(deadline=None)
@given(value=st.floats(allow_nan=False, allow_infinity=False), narrow=st.booleans())
def test_what_a_dtype_holds_is_what_a_conversion_leaves(value: float, narrow: bool) -> None:
    import ml_dtypes

    with np.errstate(all="ignore"):
        value = float(np.float32(value)) if narrow and abs(value) < 3e38 else value
        for name, kind in {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}.items():
            assert _holds(name, value) is bool(float(np.array(value).astype(kind).astype(np.float64)) == value)


def report_of(record: Path) -> str:
    text = StringIO()
    print_benchmark(Console(file=text, width=300), derive(read_record(record)))
    return text.getvalue()


def test_the_report_says_what_is_equal_and_what_is_an_estimate(fresh: Fresh) -> None:
    shown = report_of(fresh(arms=("dense", "lossless", "fullopt"), samples=2))
    assert "lossless against dense: latents equal bit for bit (video), equal bit for bit (audio)" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("fullopt against dense: latents")]
    assert "estimated from 1,024 of 38,304 elements (video)" in line
    assert line.endswith("estimated from 400 of 400 elements (audio) (the largest of 2 samples)")
    record = fresh()
    told = json.loads((record / "benchmark.json").read_bytes())["latents"][0]["video"]["rel_l2"]
    assert f"rel L2 {told:.2g}, estimated" in report_of(record)
    assert "latents" not in report_of(fresh(latents=False))


def test_unequal_tensors_whose_sampled_elements_agree_are_not_called_equal(fresh: Fresh) -> None:
    record = fresh(arms=("dense", "lossless"))
    events = "arms/lossless/events-rank0.jsonl"
    each("latents", lambda event: event["video"].update(sha256="0" * 64), events)(record)
    assert "latents not equal, rel L2 0 estimated from 1,024 of 38,304 elements (video)" in report_of(record)
    each("latents", lambda event: event["video"]["values"].__setitem__(0, None), events)(record)
    assert "latents not comparable (video)" in report_of(record)


def test_the_builders_latents_are_what_an_arm_leaves() -> None:
    assert latents_of("dense", 1, 17) == latents_of("lossless", 1, 17) != latents_of("dense", 2, 17)
