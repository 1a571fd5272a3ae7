"""The second derivation of benchmark.json, against figures worked out by hand, and against the side that ran."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verify.builder import edit, edit_events
from verify.derive import _nvml_peak, call_densities, derive, differences, series
from verify.reader import read_record


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_series_by_hand() -> None:
    found = series([3.0, 1.0, 2.0, 6.0])
    assert found is not None
    assert (found.n, found.median, found.mean, found.minimum, found.maximum) == (4, 2.5, 3.0, 1.0, 6.0)
    assert found.stdev is not None and abs(found.stdev - (14 / 3) ** 0.5) < 1e-12
    assert series([]) is None
    alone = series([2.0])
    assert alone is not None and alone.stdev is None and alone.n == 1


def test_arms_by_hand(fresh: Callable[..., Path]) -> None:
    """16 forwards: 5 of TeaCache's warm-up, the signals 0.031 to 0.033 sum to 0.1 every fourth step, the last cools
    down.
    """
    found = derive(read_record(fresh(samples=2)))
    assert (found.target, found.weights, found.locked) == ("cpu", "synthetic", True)
    dense, fullopt = found.arms["dense"], found.arms["fullopt"]
    assert dense.gate is None and dense.live_tokens == 519 and dense.prefix_tokens == 120 and dense.load_seconds == 40.0
    assert [sample.sample for sample in dense.samples] == [1, 2] and dense.warmup is not None
    assert dense.samples[0].forwards == 16 and dense.samples[0].step_seconds == (0.501,) * 16
    assert dense.samples[0].cache is dense.samples[0].density is None
    assert dense.samples[0].dense_backends == ("SDPAImpl",) and dense.samples[0].sparse_backends == ()
    cache = fullopt.samples[0].cache
    assert (
        cache is not None
        and cache.pattern == "CCCCCRRRCRRRCRRC"
        and (cache.calls, cache.compute, cache.reuse) == (16, 8, 8)
    )
    assert fullopt.samples[0].sparse_forwards == 3  # computed forwards from the seventh on: 8, 12, 15
    density = fullopt.samples[0].density
    assert density is not None and density.calls == 6
    assert fullopt.samples[1].peak_rss_mib == 902.0 and fullopt.samples[1].peak_reserved_mib == 20.0
    assert [(ratio.arm, ratio.baseline) for ratio in found.ratios] == [("fullopt", "dense")]
    assert fullopt.seconds is not None and dense.seconds is not None
    assert found.ratios[0].seconds == dense.seconds.median / fullopt.seconds.median > 1


def test_nvml_peak_of_a_request_is_the_largest_look_of_any_gpu_within_it(fresh: Callable[..., Path]) -> None:
    """Both derivations, on looks before, in and after each request; the one that covers its last moments counts."""
    summary = pytest.importorskip("engine.summary")
    small = ("request.width=64", "request.height=64", "request.frames=5", "request.fps=24")
    record = fresh(target="rtx4090", arms=("dense",), overrides=small, resumed=("dense",), samples=1)
    folder = record / "arms/dense"
    drivers = [line for line in events_of(folder / "events-rank0.jsonl") if line["source"] == "driver"]
    clock, spans = 0.0, {}
    for line in drivers:
        clock = line["clock"] if line["event"] == "arm_start" else clock
        if line["event"] in ("request_start", "request_end"):
            spans.setdefault(line["sample"], []).append(clock + line["t"])
    assert sorted(spans) == [0, 1, 2, 3]

    def alter(lines):  # type: ignore[no-untyped-def]
        """By hand: 1000 between requests, sample n peaks at 2000 + n in its last, unfinished second."""
        zero, last, out = 0.0, {}, []
        for line in lines:  # as a sampler ends: with a last look
            last = line if line["event"] == "gpu_sample" else last
            out += [{**last, "t": line["t"]}] if line["event"] == "telemetry_end" else []
            out.append(line)
        for line in out:
            zero = line["clock"] if line["event"] == "telemetry_start" else zero
            if line["event"] == "gpu_sample":
                now = zero + line["t"]
                line["memory_peak_mib"] = 1000.0
                for begin, end in spans.values():
                    if begin < now < end:
                        line["memory_peak_mib"] = 1500.0
                for sample, (begin, end) in spans.items():  # a look that ends one request may lie in the next one
                    if begin < now and end <= now < end + 1:
                        line["memory_peak_mib"] = 2000.0 + sample
        return out

    edit_events(folder / "telemetry-gpu0.jsonl", alter)
    for found in (derive(read_record(record)), summary.summarise(record)):
        arm = found.arms["dense"]
        assert arm.warmup is not None and arm.warmup.peak_nvml_mib == 2000.0
        assert [sample.peak_nvml_mib for sample in arm.samples] == [2001.0, 2003.0]
        assert [sample.peak_reserved_mib for sample in arm.samples] != [2001.0, 2003.0]
    (folder / "telemetry-gpu0.jsonl").unlink()
    for found in (derive(read_record(record)), summary.summarise(record)):
        assert [sample.peak_nvml_mib for sample in found.arms["dense"].samples] == [None, None]


@given(
    st.lists(st.floats(0.0, 100.0), min_size=1, max_size=12),
    st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 100.0)), min_size=1, max_size=4),
)
def test_both_sides_find_the_same_nvml_peaks(times: list[float], requests: list[tuple[float, float]]) -> None:
    """Looks and requests anywhere: the two derivations agree on which looks belong to which request."""
    summary = pytest.importorskip("engine.summary")
    events: list[dict[str, object]] = [{"event": "arm_start", "source": "driver", "clock": 5.0}]
    for number, (one, other) in enumerate(requests):
        events.append({"event": "request_start", "source": "driver", "t": min(one, other), "sample": number})
        events.append({"event": "request_end", "source": "driver", "t": max(one, other), "sample": number})
    looks = [(5.0, 0.0), *((5.0 + when, float(1 + place)) for place, when in enumerate(sorted(times)))]
    with tempfile.TemporaryDirectory() as folder:
        lines = [{"event": "telemetry_start", "clock": 5.0}]
        lines += [{"event": "gpu_sample", "t": when - 5.0, "memory_peak_mib": peak} for when, peak in looks[1:]]
        path = Path(folder) / "telemetry-gpu0.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        theirs = summary.nvml_peaks(Path(folder), events)
    for number, (one, other) in enumerate(requests):
        ours = _nvml_peak((5.0 + min(one, other), 5.0 + max(one, other)), [[(5.0 + (w - 5.0), p) for w, p in looks]])
        assert theirs.get(number) == ours


def test_density_is_routed_over_all_ranks_heads_and_squared_blocks(fresh: Callable[..., Path]) -> None:
    record = fresh(overrides=("parallel.num_gpus=2", "parallel.ulysses=2"))
    for rank, routed in ((0, [50, 60]), (1, [70, 41])):

        def change(lines, routed=routed):  # type: ignore[no-untyped-def]
            for line in lines:
                if line["event"] == "attention" and line["mode"] == "sparse":
                    line["routed"] = routed

        edit_events(record / f"arms/fullopt/events-rank{rank}.jsonl", change)
    arm = read_record(record).arms["fullopt"]
    assert call_densities(arm, 1) == [221 / (4 * 81)] * 6


def test_red_gate_leaves_no_time(fresh: Callable[..., Path]) -> None:
    found = derive(read_record(fresh(red=("fullopt",)))).arms["fullopt"]
    assert found.outcome == "gate_failed" and found.seconds is found.warmup is None and found.samples == ()
    assert found.gate is not None and not found.gate.passed and found.gate.rel_l2 == 0.02


def test_resumed_arm_counts_the_samples_of_both_processes(fresh: Callable[..., Path]) -> None:
    found = derive(read_record(fresh(arms=("fullopt",), resumed=("fullopt",)))).arms["fullopt"]
    assert [sample.sample for sample in found.samples] == [1, 3] and found.warmup is not None
    assert found.warmup.sample == 0 and found.gate is not None and found.gate.ranks == 1


def test_ratios_of_the_controlled_arms(fresh: Callable[..., Path]) -> None:
    found = derive(read_record(fresh(arms=("dense", "lossless", "cache", "fullopt", "sol"))))
    pairs = [(ratio.arm, ratio.baseline) for ratio in found.ratios]
    over_dense = [(arm, "dense") for arm in ("lossless", "cache", "fullopt", "sol")]
    assert pairs == [*over_dense, ("cache", "lossless"), ("fullopt", "lossless"), ("fullopt", "cache")]


def test_arm_that_did_not_complete_is_in_no_ratio(fresh: Callable[..., Path]) -> None:
    record = fresh()
    edit_events(record / "arms/dense/events-rank0.jsonl", lambda lines: lines[-1].update(outcome="error"))
    found = derive(read_record(record))
    assert found.ratios == () and found.arms["dense"].outcome == "error" and len(found.arms["dense"].samples) == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"samples": 3}, {"target": "cpu-fbc"}, {"red": ("fullopt",)}, {"arms": ("fullopt",), "resumed": ("fullopt",)},
     {"arms": ("dense", "lossless", "cache", "fullopt", "sol")},
     {"overrides": ("parallel.num_gpus=2", "parallel.ulysses=2")}],
)  # fmt: skip
def test_both_sides_derive_the_same(fresh, options: dict[str, object]) -> None:  # type: ignore[no-untyped-def]
    """The one place where the two derivations meet: what runs and what judges must agree on every sound record."""
    summary = pytest.importorskip("engine.summary")
    record = fresh(**options)
    theirs = summary.summarise(record).model_dump(mode="json")
    assert list(differences(theirs, derive(read_record(record)).model_dump(mode="json"))) == []


def test_differences_name_the_place() -> None:
    found = list(differences({"a": [1, 2.0], "b": 1}, {"a": [1, 2.1], "c": 1}))
    assert found == [
        "a[1] is 2.0, the raw files give 2.1",
        "b is 1, the raw files give None",
        "c is None, the raw files give 1",
    ]
    assert list(differences([1], [1, 2])) != []


@given(st.floats(1e-6, 1e6), st.floats(0.0, 1e-6))
def test_floats_may_differ_in_their_last_digits_only(value: float, share: float) -> None:
    same = not list(differences(value, value * (1 + share)))
    assert same == (share <= 1e-9) or 0.5e-9 < share < 2e-9


def test_timing_changed_behind_benchmark_json_is_found(fresh: Callable[..., Path]) -> None:
    record = fresh()
    edit(record / "arms/dense/sample-1/timing.json", lambda value: value.update(seconds=value["seconds"] + 1e-6))
    found = json.loads((record / "benchmark.json").read_bytes())
    assert any("seconds" in text for text in differences(found, derive(read_record(record)).model_dump(mode="json")))
