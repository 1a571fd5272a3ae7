"""`sol report`: what it shows of a record, unjudged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from config.record import BENCHMARK
from entrypoints.report import show_report
from tests.verify.builder import Builder, edit


@pytest.mark.parametrize(
    ("reserved", "nvml", "shown"),
    [
        (20.0, 23456.7, "20 / 23457"),
        (20.0, None, "20 / not seen"),
        (0.0, None, "901 host"),
    ],
)
def test_peak_memory_is_shown_from_both_sources(
    reserved: float,
    nvml: float | None,
    shown: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The allocator's figure and NVML's stand beside each other; without a GPU the process's own."""
    record = Builder(arms=("dense",)).build(tmp_path / "record")

    def change(value):  # type: ignore[no-untyped-def]
        for sample in value["arms"]["dense"]["samples"]:
            sample.update(peak_reserved_mib=reserved, peak_nvml_mib=nvml)

    edit(record / BENCHMARK, change)
    monkeypatch.setenv("COLUMNS", "200")
    show_report(record, as_json=False)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["dense"])
    assert row.rstrip().endswith(f"  {shown}")
    show_report(record, as_json=True)
    (sample,) = json.loads(capsys.readouterr().out)["arms"]["dense"]["samples"]
    assert (sample["peak_reserved_mib"], sample["peak_nvml_mib"]) == (reserved, nvml)


@pytest.mark.parametrize("columns", ["80", "", "200"])
def test_no_word_of_the_table_is_cut(
    columns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of 80 columns had `comple…` and `secon…`; a log without COLUMNS is wide enough for one line an arm."""
    record = Builder(arms=("dense", "fullopt")).build(tmp_path / "record")
    monkeypatch.setenv("COLUMNS", columns)
    show_report(record, as_json=False)
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["dense"], ["fullopt"])][:2]
    assert [row[:2] for row in rows] == [["dense", "complete"], ["fullopt", "complete"]]
    assert "…" not in out and "(median)" in out
    assert max(map(len, out.splitlines())) <= int(columns or 120)
