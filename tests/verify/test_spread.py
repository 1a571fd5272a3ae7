"""How far the choice of a list moves a ratio, against sums worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from config.errors import InvalidRecord
from config.lock import load_target, resolve
from config.record import Benchmark
from config.replays import named_lists
from config.schema import FirstBlockCache, TeaCache
from entrypoints.spread import print_spreads
from tests.verify.builder import Builder
from verify.spread import Spread, possible, spreads

TEA = TeaCache(kind="teacache", threshold=0.1, retain_steps=5, cooldown_steps=1, coefficients=(1.0, 0.0))
FIRST = FirstBlockCache(kind="firstblockcache", threshold=0.08)
OVERRIDES = ("request.num_inference_steps=9", "warmup.num_inference_steps=9", "sol_attn.dense_steps=3")
# Of eight forwards, three dense: dense 4 s, sparse 2 s, reused 1 s, and 0.5 s of each loop beside them.
DENSE, SPARSE, REUSED, REST = 4.0, 2.0, 1.0, 0.5


def sample(number: int, pattern: str, seconds: list[float]) -> dict[str, object]:
    return {
        "sample": number,
        "phase": "measured",
        "seed": 0,
        "seconds": 100.0,
        "denoise_seconds": sum(seconds) + REST,
        "forwards": len(seconds),
        "step_seconds": seconds,
        "sparse_forwards": 0,
        "dense_backends": [],
        "sparse_backends": [],
        "cache": {"calls": 8, "compute": 0, "reuse": 0, "reuse_rate": 0.0, "pattern": pattern} if pattern else None,
        "density": None,
        "file_sha256": "0" * 64,
        "frames_sha256": "0" * 64,
        "peak_rss_mib": 1.0,
        "peak_reserved_mib": 1.0,
    }


def arm(*samples: dict[str, object]) -> dict[str, object]:
    values = [float(str(one["denoise_seconds"])) for one in samples]
    middle = sorted(values)[len(values) // 2]
    series = {"values": values, "n": len(values), "median": middle, "mean": middle, "minimum": min(values)}
    series |= {"maximum": max(values), "stdev": None}
    facts = {"outcome": "complete", "reason": "", "live_tokens": 1, "prefix_tokens": 1, "load_seconds": 1.0}
    return {**facts, "gate": None, "warmup": None, "samples": samples, "seconds": series, "denoise_seconds": series}


def benchmark(**arms: dict[str, object]) -> Benchmark:
    facts = {"target": "cpu-fbc", "lock_digest": "0" * 64, "locked": False, "weights": "synthetic", "ratios": []}
    return Benchmark.model_validate({**facts, "arms": arms})


def fullopt(pattern: str) -> list[float]:
    return [REUSED if letter == "R" else DENSE if step < 3 else SPARSE for step, letter in enumerate(pattern)]


def spread(replay: str, record: Benchmark) -> list[Spread]:
    return list(spreads(record, resolve("cpu-fbc", [*OVERRIDES, f"cache.replay={replay}"]).resolved))


def test_earlier_lists_of_a_count_are_slower_by_hand() -> None:
    first = fullopt("CRRCRRRC")
    slow = [seconds + 1.0 for seconds in first]  # one disturbed sample of three: medians do not follow it
    record = benchmark(
        dense=arm(sample(1, "", [4.0] * 8)),
        fullopt=arm(*(sample(i, "CRRCRRRC", s) for i, s in enumerate((first, slow, first), 1))),
    )
    (found,) = spread("0,3,7", record)
    assert found.forward_seconds == {"dense": DENSE, "sparse": SPARSE, "reused": REUSED}
    assert found.rest_seconds == pytest.approx(REST)
    by_name = {pattern.name: pattern for pattern in found.patterns}
    assert by_name["earliest"].steps == (0, 1, 2) and by_name["latest"].steps == (0, 6, 7)
    assert by_name["earliest"].seconds == pytest.approx(3 * 4 + 5 * 1 + 0.5)
    assert by_name["as run"].seconds == pytest.approx(4 + 2 * 2 + 5 * 1 + 0.5)
    assert by_name["latest"].seconds == by_name["as run"].seconds
    assert by_name["earliest"].ratio == pytest.approx(32.5 / 17.5)
    assert by_name["as run"].counts == {"dense": 1, "sparse": 2, "reused": 5}


def test_an_arm_without_sparsity_takes_the_same_for_every_list() -> None:
    seconds = [REUSED if letter == "R" else DENSE for letter in "CRRCRRRC"]
    (found,) = spread("0,3,7", benchmark(cache=arm(sample(1, "CRRCRRRC", seconds))))
    assert {pattern.seconds for pattern in found.patterns} == {3 * 4.0 + 5.0 + 0.5}
    assert {pattern.ratio for pattern in found.patterns} == {None}, "there is no dense arm"


def test_a_list_that_needs_a_kind_of_forward_that_was_not_measured_has_no_sum() -> None:
    (found,) = spread("0-2", benchmark(fullopt=arm(sample(1, "CCCRRRRR", fullopt("CCCRRRRR")))))
    assert {p.name: p.seconds for p in found.patterns} == {"earliest": 17.5, "as run": 17.5, "latest": None}


def test_a_run_without_a_list_has_no_spread() -> None:
    record = benchmark(fullopt=arm(sample(1, "CRRCRRRC", fullopt("CRRCRRRC"))))
    assert list(spreads(record, resolve("cpu-fbc", OVERRIDES).resolved)) == []
    stock = benchmark(dense=arm(sample(1, "", [4.0] * 8)), sol=arm(sample(1, "", [4.0] * 8)))
    assert spread("0,3,7", stock) == []


def test_the_published_counts_leave_the_4090_at_most_nine_sparse_forwards() -> None:
    """docs/published-claims.md derives the same bound; ten forwards are dense there."""
    dense = load_target("rtx4090").sol_attn.dense_steps
    for cache, count, sparse in ((TEA, 14, (4, 9)), (FIRST, 16, (6, 15))):
        found = possible(cache, 49, count)
        assert tuple(sum(step >= dense for step in steps) for steps in found) == sparse
        (named,) = [entry.listed for entry in named_lists() if entry.cache == cache.kind]
        assert sparse[0] <= sum(step >= dense for step in named) <= sparse[1]


@given(st.integers(1, 8), st.integers(0, 4), st.integers(0, 4), st.data())
def test_no_possible_list_is_earlier_or_later(forwards: int, retain: int, cooldown: int, data: st.DataObject) -> None:
    """Against every list of the count that holds what the rules force."""
    cache = TEA.model_copy(update={"retain_steps": retain, "cooldown_steps": cooldown})
    count = data.draw(st.integers(1, forwards))
    forced = {0} | {step for step in range(forwards) if step < retain or step >= forwards - cooldown}
    every = [steps for steps in combinations(range(forwards), count) if forced <= set(steps)]
    every = every or [steps for steps in combinations(range(forwards), count) if 0 in steps]
    assert possible(cache, forwards, count) == (min(every), max(every))


def test_the_report_prints_a_table_for_each_arm(tmp_path: Path, records: Callable[[Builder], Path]) -> None:
    record = records(Builder(target="cpu-fbc", overrides=("cache.replay=0,3,6,9,12,15",), seconds={"fullopt": 0.4}))
    out = StringIO()
    found = Benchmark.model_validate_json((record / "benchmark.json").read_bytes())
    print_spreads(Console(file=out, width=160), record, found)
    text = out.getvalue()
    assert "6 of 16 forwards computed by a list" in text
    assert all(word in text for word in ("0-5", "0,3,6,9,12,15", "0,11-15", "earliest", "as run", "latest"))
    assert "fullopt: forwards dense 0.401 s, sparse 0.401 s, reused 0.041 s" in text
    out.truncate(0)
    print_spreads(Console(file=out), records(Builder()), found)
    assert out.getvalue().strip("\0") == ""


def test_a_lock_with_more_forwards_than_any_request_is_refused() -> None:
    target = resolve("cpu", ["request.num_inference_steps=100000", "cache.replay=0"]).resolved
    with pytest.raises(InvalidRecord, match="99999 forwards"):
        list(spreads(benchmark(), target))
