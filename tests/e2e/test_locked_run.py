"""The locked CPU benchmark with every arm: what a user of `sol benchmark cpu --arm all` may rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from config.lock import resolve
from tests.e2e.conftest import Finished, Sol, benchmark, events
from tests.e2e.frames import psnr

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
ARMS = ("dense", "lossless", "cache", "fullopt", "sol")
LOSSLESS_PSNR_DB = 60.0
"""`lossless` goes through our seams with everything dense; the CPU path is then the same arithmetic."""
ALL_EXACT_PSNR_DB, MARGIN_DB = 33.0, 2.0
"""`sol` with everything routed is the same attention with another rounding, which H.264 of a noise picture amplifies.
Measured on 2026-11-30: 34.4 dB, against 30.7 dB with tau 1 and 13.9 dB between seeds; the bound tells them apart."""


def test_it_passes_and_says_that_only_trust_is_missing(locked_run: Finished) -> None:
    assert locked_run.code == 0, locked_run.output
    assert "UNTRUSTED" in locked_run.output
    assert "left" in locked_run.output


def test_verifying_it_again_exits_14_without_a_trust_file(sol: Sol, locked_record: Path) -> None:
    assert sol("verify", locked_record).code == 14


def test_every_arm_is_complete_with_the_lock_of_the_release(locked_record: Path) -> None:
    found = benchmark(locked_record)
    assert found["lock_digest"] == resolve("cpu").digest
    assert found["weights"] == "synthetic"
    assert {name: arm["outcome"] for name, arm in found["arms"].items()} == dict.fromkeys(ARMS, "complete")


def test_the_document_has_the_published_text_and_30_blocks(locked_record: Path) -> None:
    (layout,) = [event for event in events(locked_record, "fullopt", "layout") if event["sample"] == 1]
    assert layout["text"] == [0, 537]
    assert layout["live_tokens"] == 2011
    assert layout["live_tokens"] >= 30 * 64


@pytest.mark.parametrize("arm", ["cache", "fullopt"])
def test_the_cache_computes_and_reuses(locked_record: Path, arm: str) -> None:
    counts = benchmark(locked_record)["arms"][arm]["samples"][0]["cache"]
    assert counts["compute"] > 5 and counts["reuse"] > 0


@pytest.mark.parametrize("arm", ["sol", "fullopt"])
def test_sparse_calls_are_sparse_and_gated(locked_record: Path, arm: str) -> None:
    found = benchmark(locked_record)["arms"][arm]
    assert found["gate"]["passed"] is True
    assert 0 < found["samples"][0]["density"]["maximum"] < 0.6
    assert found["samples"][0]["sparse_backends"] == ["reference"]
    with safe_open(locked_record / "arms" / arm / "gate-rank0.safetensors", "pt") as kept:
        assert kept.get_tensor("k").shape == (2011, 128)
        assert kept.get_tensor("route_counts").shape == (32, 2)


def test_skipped_blocks_load_no_weights(locked_record: Path) -> None:
    loads = {arm: max(event["loads"]["blocks"] for event in events(locked_record, arm, "offload")) for arm in ARMS}
    forwards, layers = 16, 6
    assert loads["dense"] == forwards * layers
    assert loads["sol"] == forwards * layers
    assert loads["cache"] < loads["dense"] * 0.7


def test_a_stock_arm_is_only_observed(locked_record: Path) -> None:
    (start,) = [event for event in events(locked_record, "dense", "arm_start") if event["source"] == "worker"]
    assert [seam for seam in start["seams"] if seam.startswith("replace.")] == []
    (start,) = [event for event in events(locked_record, "fullopt", "arm_start") if event["source"] == "worker"]
    assert "replace.attention_core(reference)" in start["seams"]


def test_lossless_leaves_the_latents_of_dense_and_no_other_arm_does(locked_record: Path) -> None:
    """Our seams with everything dense are SGLang's own arithmetic, bit by bit, before any decoder."""
    found = {x["arm"]: x for x in benchmark(locked_record)["latents"] if x["baseline"] == "dense"}
    assert set(found) == set(ARMS) - {"dense"}
    for name, elements in (("video", 24 * 12 * 16 * 28), ("audio", 2 * 32 * 65)):
        assert {arm for arm, x in found.items() if x[name]["equal"]} == {"lossless"}
        assert found["lossless"][name]["rel_l2"] == 0.0 and found["lossless"][name]["norm_ratio"] == 1.0
        assert all(0 < found[arm][name]["rel_l2"] < 1 for arm in ("cache", "fullopt", "sol"))
        assert all((x[name]["sampled"], x[name]["elements"]) == (1024, elements) for x in found.values())


def test_lossless_gives_the_frames_of_dense(locked_record: Path) -> None:
    arms = locked_record / "arms"
    assert psnr(arms / "dense/sample-1/out.mp4", arms / "lossless/sample-1/out.mp4") >= LOSSLESS_PSNR_DB


def test_sol_with_everything_routed_gives_the_frames_of_dense(sol: Sol, locked_record: Path, tmp_path: Path) -> None:
    finished = sol("benchmark", "cpu", "--arm", "sol", "--set", "sol_attn.tau=-1000.0", "--out", tmp_path)
    assert finished.code == 0, finished.output
    dense, sparse = locked_record / "arms/dense/sample-1/out.mp4", "arms/sol/sample-1/out.mp4"
    record = finished.record(tmp_path)
    all_exact = psnr(dense, record / sparse)
    assert all_exact >= ALL_EXACT_PSNR_DB
    assert all_exact >= psnr(dense, locked_record / sparse) + MARGIN_DB
    assert benchmark(record)["arms"]["sol"]["samples"][0]["density"]["minimum"] == 1.0
    assert benchmark(record)["locked"] is False


def test_a_second_run_gives_the_same_frames_and_decisions(sol: Sol, locked_record: Path, tmp_path: Path) -> None:
    finished = sol("benchmark", "cpu", "--arm", "fullopt", "--out", tmp_path)
    assert finished.code == 0, finished.output
    first = benchmark(locked_record)["arms"]["fullopt"]["samples"][0]
    second = benchmark(finished.record(tmp_path))["arms"]["fullopt"]["samples"][0]
    for name in ("frames_sha256", "file_sha256", "cache", "density"):
        assert first[name] == second[name], name


def test_the_four_gpu_policy_runs_on_a_cpu(sol: Sol, tmp_path: Path) -> None:
    finished = sol("benchmark", "cpu-fbc", "--arm", "fullopt", "--out", tmp_path)
    assert finished.code == 0, finished.output
    found = benchmark(finished.record(tmp_path))["arms"]["fullopt"]["samples"][0]
    assert found["cache"]["compute"] > 0 and found["cache"]["reuse"] > 0
    assert 0 < found["density"]["maximum"] < 0.6
    decisions = list(events(finished.record(tmp_path), "fullopt", "cache_decision"))
    assert {event["kind"] for event in decisions} == {"firstblockcache"}
