"""The records that the repository keeps: whole, signed, judged as docs/h200.md says, and its figures are theirs."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from config.errors import Exit
from verify.report import verify_record

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "records"
RECORDS = sorted(path.parent for path in FOLDER.glob("*/lock.json"))
FULL, TEA = FOLDER / "20261130T194535Z-h200-a53d2de6", FOLDER / "20261130T225208Z-h200-tea-c80fcf6a"
# Four of fifty blocks.
EXACT, COMPILED = FOLDER / "20261130T230341Z-h200-b3cce786", FOLDER / "20261130T230915Z-h200-tea-5a34c3ce"
TAU_ONE = FOLDER / "20261130T191650Z-h200-44928457"


def test_they_are_few_small_and_without_media() -> None:
    assert {FULL, TEA, EXACT, COMPILED, TAU_ONE} == set(RECORDS)
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8 << 20
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".toml", ""}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_kept_record_verifies(record: Path) -> None:
    report = verify_record(record, FOLDER / "trust.toml")
    assert (report.verdict, report.exit_code) == ("PASSED (partial)", Exit.PASSED)


class Arm:
    """One arm's events, read anew: no code of the project but its file names."""

    def __init__(self, record: Path, name: str) -> None:
        lines = (record / "arms" / name / "events-rank0.jsonl").read_text().splitlines()
        self.events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.benchmark = json.loads((record / "benchmark.json").read_text())["arms"][name]

    def of(self, kind: str, sample: int) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind and event.get("sample") == sample]

    def stage(self, name: str, sample: int = 1) -> float:
        (event,) = (event for event in self.of("stage", sample) if event["name"] == name)
        return float(event["seconds"])

    def forwards(self, kind: str) -> list[float]:
        reused = {event["step"] for event in self.of("cache_decision", 1) if event["action"] == "reuse"}
        sparse = {event["step"] for event in self.of("attention", 1) if event["mode"] == "sparse"}
        kinds = {step: "reused" if step in reused else "sparse" if step in sparse else "dense" for step in range(49)}
        return [event["seconds"] for event in self.of("step", 1) if kinds[event["step"]] == kind]

    def request(self, sample: int, source: str) -> float:
        (event,) = (event for event in self.of("request_end", sample) if event["source"] == source)
        return float(event["seconds"])

    def density(self) -> float:
        shares = [
            sum(event["routed"]) / len(event["routed"]) / event["blocks"] ** 2
            for event in self.of("attention", 1)
            if event["mode"] == "sparse"
        ]
        return statistics.fmean(shares)

    def steps(self, sample: int) -> list[float]:
        return [event["seconds"] for event in self.of("step", sample)]

    def load(self) -> float:
        (event,) = (event for event in self.events if event["event"] == "load_end")
        return float(event["seconds"])


def figures() -> dict[str, float]:
    """The tables of docs/h200.md, row by row, from the events."""
    dense, fullopt = Arm(FULL, "dense"), Arm(FULL, "fullopt")
    tea_dense, tea = Arm(TEA, "dense"), Arm(TEA, "fullopt")
    stock, compiled = Arm(COMPILED, "dense"), Arm(COMPILED, "lossless")
    decoding = "MiniMaxH3DecodingStage"
    loops = {arm: arm.request(1, "worker") for arm in (dense, fullopt, tea_dense, tea)}
    whole = {arm: arm.request(1, "driver") for arm in (dense, fullopt, tea_dense, tea)}
    first = compiled.steps(0)
    median = statistics.median
    gate = json.loads((FULL / "arms/fullopt/gate-rank0.json").read_text())
    distance = fullopt.benchmark["samples"][0]
    return {
        "dense forward, median of 49": median(dense.forwards("dense")),
        "sparse forward, median of 12": median(fullopt.forwards("sparse")),
        "density of its sparse calls, mean": 100 * fullopt.density(),
        "reused forward, FirstBlockCache, median of 33": median(fullopt.forwards("reused")),
        "denoise, dense": loops[dense],
        "denoise, fullopt: 16 of 49 computed, 12 of them sparse": loops[fullopt],
        "fullopt over dense, denoise": loops[dense] / loops[fullopt],
        "prompt to decoded tensors, dense": whole[dense],
        "prompt to decoded tensors, fullopt": whole[fullopt],
        "fullopt over dense, prompt to decoded tensors": whole[dense] / whole[fullopt],
        "decode of video and sound, dense": dense.stage(decoding),
        "decode of video and sound, fullopt": fullopt.stage(decoding),
        "load, dense: the machine's first": dense.load(),
        "load, fullopt": fullopt.load(),
        "first request beyond its forwards, dense: kernels compiled, decoder chosen": (
            dense.request(0, "driver") - sum(dense.steps(0))
        ),
        "gate, relative L2 against BF16 SDPA": gate["against_sdpa"]["rel_l2"],
        "latents of fullopt against dense, video, relative L2 of a sample": latents_distance(dense, fullopt),
        "peak memory of the denoising loop, allocator": distance["peak_reserved_mib"] / 1024,
        "peak memory, NVML": distance["peak_nvml_mib"] / 1024,
        "dense forward, not compiled, median of 49": median(tea_dense.forwards("dense")),
        "dense forward of fullopt, compiled, median of 6": median(tea.forwards("dense")),
        "sparse forward, compiled, median of 8": median(tea.forwards("sparse")),
        "density of its sparse calls, mean, TeaCache's target": 100 * tea.density(),
        "reused forward, TeaCache, median of 35: no block runs": median(tea.forwards("reused")),
        "denoise, dense, TeaCache's target": loops[tea_dense],
        "denoise, fullopt: 14 of 49 computed, 8 of them sparse": loops[tea],
        "fullopt over dense, denoise, TeaCache's list": loops[tea_dense] / loops[tea],
        "prompt to decoded tensors, fullopt, TeaCache's list": whole[tea],
        "fullopt over dense, prompt to decoded tensors, TeaCache's list": whole[tea_dense] / whole[tea],
        "decode of video and sound, video decoder in bfloat16": tea.stage(decoding),
        "load, fullopt, TeaCache's target": tea.load(),
        "first request of fullopt beyond its forwards": tea.request(0, "driver") - sum(tea.steps(0)),
        "latents of fullopt against dense, video, relative L2 of a sample, TeaCache's list": (
            latents_distance(tea_dense, tea)
        ),
        "peak memory of fullopt's denoising loop, allocator": tea.benchmark["samples"][0]["peak_reserved_mib"] / 1024,
        "latents, video, relative L2 of a sample": latents_distance(stock, compiled),
        "latents, audio, relative L2 of a sample": latents_distance(stock, compiled, "audio"),
        "dense forward, four blocks, compiled, median of 13": median(compiled.forwards("dense")),
        "dense forward, four blocks, not compiled, median of 13": median(stock.forwards("dense")),
        "first two forwards of the process, compiled: beyond two later ones": sum(first[:2]) - 2 * median(first[2:]),
        "density at tau 1, mean": 100 * Arm(TAU_ONE, "fullopt").density(),
    }


def latents_distance(reference: Arm, other: Arm, what: str = "video") -> float:
    (a,), (b,) = ([event[what]["values"] for event in arm.of("latents", 1)] for arm in (reference, other))
    return (sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / sum(x * x for x in a)) ** 0.5


def test_the_page_s_figures_are_the_records_own() -> None:
    rows = re.findall(
        r"^\| (.+?) \| ([0-9.e-]+) ?(?:s|x|%|GiB|) \|$", (ROOT / "docs/h200.md").read_text(), re.MULTILINE
    )
    expected = figures()
    assert [name for name, _ in rows] == list(expected)
    for name, shown in rows:
        digits = f"{expected[name]:.1e}" if "e" in shown else f"{expected[name]:.{len(shown.partition('.')[2])}f}"
        assert shown == digits.replace("e-0", "e-"), f"{name}: the record says {expected[name]}"


def test_what_should_change_nothing_changed_no_bit() -> None:
    """The page's rows `equal bit for bit`, by the digests in the events; compiled blocks show that these can differ."""
    arms = [Arm(EXACT, name) for name in ("dense", "lossless", "cache")] + [Arm(COMPILED, "dense")]
    digests = {(event["video"]["sha256"], event["audio"]["sha256"]) for arm in arms for event in arm.of("latents", 1)}
    assert len(digests) == 1 and all(len(arm.of("latents", 1)) == 1 for arm in arms)
    (other,) = Arm(COMPILED, "lossless").of("latents", 1)
    assert {(other["video"]["sha256"], other["audio"]["sha256"])}.isdisjoint(digests)
    decisions = [event["action"] for event in arms[2].of("cache_decision", 1)]
    assert decisions == ["compute"] * 13
    assert (ROOT / "docs/h200.md").read_text().count("| equal bit for bit |") == 3
