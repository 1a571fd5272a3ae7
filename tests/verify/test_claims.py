"""Verdicts on published claims, from records whose figures are set by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config.published import METRICS, Claim, Tolerance, published
from config.record import ArmResult, Benchmark, Density, GateSummary, SampleResult
from tests.verify.builder import edit
from verify.claims import ClaimVerdict, figure_of, judge_claims
from verify.derive import series
from verify.reader import Record, read_record

STACK = {"cuda": "12.8", "torch": "2.11", "triton": "3.6", "sglang_commit": "6fa3f9df11c8bdbc0e3b4ddc87a3d873343aca72"}


def claim(metric: str = "seconds", value: float = 100.0, **fields: Any) -> Claim:
    kind = "ratio" if metric.startswith("ratio:") else METRICS[metric][0]
    relative, absolute = {"time": (0.05, 0.5), "ratio": (0.05, 0.0), "density": (0.0, 0.005)}.get(kind, (0.0, 0.0))
    made: dict[str, Any] = {
        "id": "c",
        "target": "rtx4090",
        "arm": "fullopt",
        "metric": metric,
        "kind": kind,
        "value": value,
        "printed": str(value),
        "tolerance": Tolerance(relative=relative, absolute=absolute),
        "source": "a test",
        "stack": STACK,
    }
    return Claim(**{**made, **fields})


def sample(number: int, seconds: float, density: float) -> SampleResult:
    return SampleResult(
        sample=number,
        phase="measured",
        seed=0,
        seconds=seconds,
        denoise_seconds=seconds - 1,
        forwards=49,
        step_seconds=(1.0,),
        sparse_forwards=9,
        dense_backends=("SDPAImpl",),
        sparse_backends=("sana/cute_sm89",),
        cache=None,
        density=Density(calls=1, first=density, mean=density, minimum=density, maximum=density),
        file_sha256="0" * 64,
        frames_sha256="0" * 64,
        peak_rss_mib=1.0,
        peak_reserved_mib=1000.0 + number,
    )


def arm(*seconds: float, density: float = 0.1965, outcome: Any = "complete") -> ArmResult:
    samples = tuple(sample(n, s, density) for n, s in enumerate(seconds, 1))
    return ArmResult(
        outcome=outcome,
        reason="",
        live_tokens=38247,
        prefix_tokens=951,
        load_seconds=1.0,
        gate=GateSummary(passed=True, ranks=1, max_abs=0.06, mean_abs=0.0003, rel_l2=0.0006),
        warmup=sample(0, 200.0, 0.2),
        samples=samples,
        seconds=series(list(seconds)),
        denoise_seconds=series(list(seconds)),
    )


def benchmark(**arms: ArmResult) -> Benchmark:
    return Benchmark(
        target="rtx4090", lock_digest="0" * 64, locked=True, weights="hub", arms=arms, ratios=()  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
def record(fresh: Callable[..., Path]) -> Record:
    """A locked record of the target, of the stack above; its recipe pins SGLang's commit."""
    return read_record(fresh(target="rtx4090", arms=()))


@pytest.fixture(autouse=True)
def same_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record's packages come from the recipe's lock, which may not exist yet; the stack is tested on its own
    below.
    """
    monkeypatch.setattr("verify.claims.another_stack", lambda claim, record: False)


def timed(record: Record, found: Benchmark, encoding: float = 0.0) -> Record:
    """The record with timings of the benchmark's samples: SGLang's own duration ends `encoding` seconds before the
    request does."""

    def timings(result: ArmResult) -> Any:
        totals = {s.sample: 1000 * (s.seconds - encoding) for s in result.samples}
        return SimpleNamespace(timings={n: SimpleNamespace(sglang_total_ms=total) for n, total in totals.items()})

    return replace(record, arms={name: timings(result) for name, result in found.arms.items()})


def judge(record: Record, found: Benchmark, about: Claim, sound: bool = True, encoding: float = 0.0) -> ClaimVerdict:
    return judge_claims(timed(record, found, encoding), found, sound, [about])[0]


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ((100.0, 100.5, 99.5), "reproduced"),
        ((103.0, 103.1, 102.9), "reproduced"),
        ((120.0, 120.5, 119.5), "slower"),
        ((80.0, 80.5, 79.5), "faster"),
        ((104.9, 105.1, 105.0), "inconclusive"),
        ((90.0, 100.0, 110.0), "inconclusive"),
        ((100.0,), "inconclusive"),
        ((100.0, 100.1), "inconclusive"),
        ((50.0,), "inconclusive"),
    ],
)
def test_times(record: Record, seconds: tuple[float, ...], verdict: str) -> None:
    """The claim is 100 s, the tolerance 5 s, and the target asks for three samples."""
    found = judge(record, benchmark(fullopt=arm(*seconds)), claim())
    assert found.verdict == verdict, found.reason
    assert found.n == len(seconds) and found.measured == sorted(seconds)[len(seconds) // 2] or len(seconds) == 2


def test_small_times_have_half_a_second(record: Record) -> None:
    assert judge(record, benchmark(fullopt=arm(1.4, 1.41, 1.39)), claim(value=1.0)).verdict == "reproduced"


@pytest.mark.parametrize(
    ("base", "verdict"),
    [((400.0, 400.5, 399.5), "reproduced"), ((500.0, 500.5, 499.5), "faster"), ((300.0, 300.5, 299.5), "slower"),
     ((400.0,), "inconclusive"), ((350.0, 400.0, 450.0), "inconclusive")],
)  # fmt: skip
def test_ratios(record: Record, base: tuple[float, ...], verdict: str) -> None:
    """The claim is 4 times as fast: a larger ratio is faster."""
    found = judge(
        record, benchmark(dense=arm(*base), fullopt=arm(100.0, 100.1, 99.9)), claim("ratio:fullopt/dense", 4.0)
    )
    assert found.verdict == verdict, found.reason


@pytest.mark.parametrize(
    ("metric", "value", "verdict"),
    [
        ("density.mean", 0.1965, "reproduced"),
        ("density.mean", 0.192, "reproduced"),
        ("density.mean", 0.191, "differs"),
        ("warmup.density.first", 0.2, "reproduced"),
        ("live_tokens", 38247, "reproduced"),
        ("live_tokens", 38246, "differs"),
        ("sparse_forwards", 9, "reproduced"),
        ("gate.rel_l2", 0.0006, "reproduced"),
        ("peak_memory_mib", 1003, "differs"),
        ("cache.reuse", 35, "not measured"),
    ],
)
def test_figures_that_are_no_speed(record: Record, metric: str, value: float, verdict: str) -> None:
    found = benchmark(fullopt=arm(100.0, 100.1, 100.2))
    assert judge(record, found, claim(metric, value)).verdict == verdict


@pytest.mark.parametrize(
    ("metric", "value", "verdict"),
    [
        ("density.mean", 0.1965, "inconclusive"),
        ("density.mean", 0.191, "differs"),
        ("sparse_forwards", 9, "inconclusive"),
        ("peak_memory_mib", 1001, "inconclusive"),
        ("warmup.density.first", 0.2, "reproduced"),
        ("live_tokens", 38247, "reproduced"),
        ("gate.rel_l2", 0.0006, "reproduced"),
    ],
)
def test_one_request_reproduces_no_figure_of_a_request(record: Record, metric: str, value: float, verdict: str) -> None:
    """It may contradict one. What an arm has once needs no more."""
    assert judge(record, benchmark(fullopt=arm(100.0)), claim(metric, value)).verdict == verdict


def test_published_seconds_end_before_the_video_is_encoded(record: Record) -> None:
    """Upstream's inference_time_s is SGLang's own duration; four seconds of x264 would make 22.89 s `slower`."""
    found = benchmark(dense=arm(85.47, 85.48, 85.46), fullopt=arm(26.89, 26.9, 26.88))
    assert judge(record, found, claim(value=22.89), encoding=4.0).verdict == "reproduced"
    ratio = judge(record, found, claim("ratio:fullopt/dense", 3.56), encoding=4.0)
    assert ratio.verdict == "reproduced" and ratio.measured == pytest.approx(81.47 / 22.89)
    assert judge(record, found, claim(value=22.89)).verdict == "slower"


def test_without_sglangs_own_duration_no_time_was_measured(record: Record) -> None:
    found = benchmark(fullopt=arm(100.0, 100.1, 99.9))
    without = timed(record, found)
    without.arms["fullopt"].timings[2].sglang_total_ms = None  # type: ignore[misc]
    assert judge_claims(without, found, True, [claim()])[0].verdict == "not measured"


def test_at_most_is_met_by_less(record: Record) -> None:
    found = benchmark(fullopt=arm(100.0, 100.1, 100.2))
    assert judge(record, found, claim("sparse_forwards", 12, relation="at_most")).verdict == "reproduced"
    assert judge(record, found, claim("sparse_forwards", 8, relation="at_most")).verdict == "differs"


def test_not_measured(record: Record) -> None:
    for found in (benchmark(), benchmark(fullopt=arm(1.0, 2.0, 3.0, outcome="error")), benchmark(fullopt=arm())):
        assert judge(record, found, claim()).verdict == "not measured"
    assert judge(record, benchmark(fullopt=arm(1.0)), claim("ratio:fullopt/dense", 4.0)).verdict == "not measured"


def test_not_comparable(fresh, record: Record) -> None:  # type: ignore[no-untyped-def]
    good = benchmark(fullopt=arm(100.0, 100.1, 99.9))
    assert judge(record, good, claim()).verdict == "reproduced"
    assert judge(record, good, claim(), sound=False).verdict == "not comparable"
    opened = read_record(fresh(target="rtx4090", arms=(), overrides=("sol_attn.tau=0.5",)))
    assert judge(opened, good, claim()).verdict == "not comparable"
    other = read_record(fresh(target="rtx4090", arms=(), differences=("GPUs are NVIDIA L40S",)))
    assert judge(other, good, claim()).verdict == "not comparable"
    synthetic = read_record(fresh(target="rtx4090", arms=(), weights="synthetic"))
    assert "synthetic" in judge(synthetic, good, claim()).reason


def test_another_stack_is_said(fresh, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.undo()
    from verify.claims import another_stack

    path = fresh(target="rtx4090", arms=())
    triton = {"name": "triton", "version": "3.6.0", "record_sha256": None}
    edit(path / "environment.json", lambda value: value.update(packages=[triton]))
    found = read_record(path)
    assert not another_stack(claim(), found)
    for name, value in (("cuda", "13.0"), ("torch", "2.11.0+cu130"), ("triton", "3.5"), ("sglang_commit", "0" * 40)):
        assert another_stack(claim(stack={**STACK, name: value}), found), name
    assert another_stack(claim(stack={**STACK, "torch": "2.1"}), found)
    verdict = judge(found, benchmark(fullopt=arm(100.0)), claim(stack={**STACK, "cuda": "13.0"}))
    assert verdict.text == "inconclusive on another stack" and verdict.as_json()["text"] == verdict.text


def test_every_published_claim_has_a_figure_in_a_full_record(record: Record) -> None:
    """A metric that we could not read would be `not measured` for ever."""
    from config.record import CacheCounts

    full = arm(1.0, 1.0, 1.0)
    cached = [
        s.model_copy(update={"cache": CacheCounts(calls=49, compute=14, reuse=35, reuse_rate=35 / 49, pattern="C")})
        for s in full.samples
    ]
    full = full.model_copy(update={"samples": tuple(cached)})
    found = benchmark(**dict.fromkeys(("dense", "lossless", "cache", "fullopt", "sol", "native"), full))
    assert len(published().claims) > 10
    for about in published().claims:
        assert figure_of(about, timed(record, found), found) is not None, about.id


def test_shipped_claims_are_judged_for_their_target_only(record: Record) -> None:
    measured = benchmark(fullopt=arm(504.0, 504.1, 504.2))
    found = judge_claims(timed(record, measured), measured, True)
    assert {verdict.claim for verdict in found} == {about.id for about in published().for_target("rtx4090")}
