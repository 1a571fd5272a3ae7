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
FULL, FOUR_BLOCKS = FOLDER / "20261130T194535Z-h200-a53d2de6", FOLDER / "20261130T193631Z-h200-tea-fc41698d"

TAU_ONE = FOLDER / "20261130T191650Z-h200-44928457"


def test_they_are_few_small_and_without_media() -> None:
    assert {FULL, FOUR_BLOCKS} <= set(RECORDS)
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
    lossless, tea = Arm(FOUR_BLOCKS, "lossless"), Arm(FOUR_BLOCKS, "fullopt")
    decoding = "MiniMaxH3DecodingStage"
    loops = {arm: arm.request(1, "worker") for arm in (dense, fullopt)}
    whole = {arm: arm.request(1, "driver") for arm in (dense, fullopt)}
    compiled = lossless.steps(0)
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
        "peak memory, allocator": distance["peak_reserved_mib"] / 1024,
        "peak memory, NVML": distance["peak_nvml_mib"] / 1024,
        "reused forward, TeaCache, median of 5 (no block runs, so depth does not matter)": median(
            tea.forwards("reused")
        ),
        "dense forward, compiled, median of 13": median(lossless.forwards("dense")),
        "sparse forward, compiled, median of 2": median(tea.forwards("sparse")),
        "first two forwards of the process, compiled: beyond a later one each": (
            sum(compiled[:2]) - 2 * median(compiled[2:])
        ),
        "decode of video and sound, video decoder in bfloat16": lossless.stage(decoding),
        "density at tau 1, mean": 100 * Arm(TAU_ONE, "fullopt").density(),
        "dense forward, not compiled, median of 13": median(Arm(TAU_ONE, "dense").forwards("dense")),
    }


def latents_distance(reference: Arm, other: Arm) -> float:
    (a,), (b,) = ([event["video"]["values"] for event in arm.of("latents", 1)] for arm in (reference, other))
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
