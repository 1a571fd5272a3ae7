"""Weights left on disk (`offload.mapped`): the same film, less memory, an open record, and a doctor that says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.conftest import SHORT, Sol, benchmark, events

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
OFFLOADED = ("--set", 'offload.components=["dit", "text_encoder", "vae"]')
GIVEN_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc gives what is freed back at once, as it does for large layers. Under its own settings it kept 20 to 140 MiB of
it, another amount in every run, and these weights are only 104 MB."""


def run(sol: Sol, out: Path, *options: str) -> Path:
    allowed = [word for name, value in GIVEN_BACK.items() for word in ("--set", f"env.{name}={value}")]
    options = (*SHORT, *OFFLOADED, *allowed, *options)
    finished = sol("benchmark", "cpu", "--arm", "fullopt", *options, "--out", out, timeout=1700, **GIVEN_BACK)
    assert finished.code == 0, finished.output
    return finished.record(out)


def anonymous_mib(record: Path) -> float:
    """Least memory of the arm that is no file's between the warm-up's end and the last request's: what it holds all the
    time. Its peaks are those of the decode; before, the loader's buffers may still be there, or weights not yet."""
    lines = map(json.loads, (record / "arms/fullopt/telemetry-host.jsonl").read_text().splitlines())
    start = next(lines)["clock"]
    (driver,) = [event for event in events(record, "fullopt", "arm_start") if event["source"] == "driver"]
    ends = [event["t"] for event in events(record, "fullopt", "request_end") if event["source"] == "driver"]
    begin, end = (driver["clock"] + t - start for t in (ends[0], ends[-1]))
    return min(line["anonymous_mib"] for line in lines if line["event"] == "host_sample" and begin <= line["t"] <= end)


def taken(out: Path) -> dict[str, tuple[int, int]]:
    """Bytes by list of layers, in the checkpoint's files and beside them, as the worker's log has them."""
    (log,) = (out / "logs").glob("*.log")
    found = re.findall(r"weights on disk, ([\w.]+): (\d+) bytes .*?, (\d+) in", log.read_text(errors="replace"))
    return {name: (int(kept), int(spilled)) for name, kept, spilled in found}


def test_field_report_14_weights_left_on_disk_give_the_same_film_from_less_memory(sol: Sol, tmp_path: Path) -> None:
    """104 MB of layers are no longer the process's own; every bit of the film is as it was.

    Measured on 2026-12-01, MiB held, three runs each: 1173 to 1175, and 1067 to 1072. Under glibc's own settings a run
    of CI had 1189 and 1209 instead. tests/engine/h3 measures it with larger layers.
    """
    plain, left = run(sol, tmp_path / "plain"), run(sol, tmp_path / "left", "--set", "offload.mapped=true")
    first, second = (benchmark(record)["arms"]["fullopt"]["samples"][0] for record in (plain, left))
    for name in ("file_sha256", "frames_sha256", "cache", "density", "forwards"):
        assert first[name] == second[name], name
    loads = [list(events(record, "fullopt", "offload")) for record in (plain, left)]
    assert [event["loads"] for event in loads[0]] == [event["loads"] for event in loads[1]]
    assert anonymous_mib(left) < anonymous_mib(plain) - 50
    (worker,) = [event for event in events(left, "fullopt", "arm_start") if event["source"] == "worker"]
    assert "place.weights_on_disk" in worker["seams"]
    overrides = json.loads((left / "lock.json").read_text())["overrides"]
    assert {"key": "offload.mapped", "locked": None, "value": True} in overrides
    assert benchmark(left)["locked"] is False
    warnings = json.loads((left / "environment.json").read_text())["warnings"]
    assert any(warning.startswith("weights: left on disk") for warning in warnings)
    stayed = taken(tmp_path / "left")
    assert set(stayed) == {"blocks", "model.language_model.layers", "decoder.transformer_blocks"}
    assert stayed["model.language_model.layers"] == (91_142_400, 0), "SGLang changes nothing of the text encoder"
    assert 0 < stayed["blocks"][1] < stayed["blocks"][0], "the rows of Q, K and V alone"
    assert not list((Path(sol.environment["SOL_CACHE"]) / "offload").iterdir()), "the spill file has no name"
