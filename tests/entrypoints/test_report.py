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
    assert f"│ {shown} " in capsys.readouterr().out
    show_report(record, as_json=True)
    (sample,) = json.loads(capsys.readouterr().out)["arms"]["dense"]["samples"]
    assert (sample["peak_reserved_mib"], sample["peak_nvml_mib"]) == (reserved, nvml)
