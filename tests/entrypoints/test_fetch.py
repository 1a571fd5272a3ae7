"""`sol fetch` as typed, with the shipped list of the published checkpoint behind it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from config.checkpoint import manifest
from config.errors import Exit
from config.lock import load_target
from entrypoints import cli
from entrypoints.benchmark import provide_checkpoint
from entrypoints.fetch import BAR_WIDTH, Display
from entrypoints.progress import Progress
from tests.engine.checkpoint.hub import Hub, serving


class PublishedHub(Hub):
    """Says of every published file what was published, and has the content of none."""

    def tree(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "file",
                "oid": "0" * 40,
                "size": entry.bytes,
                "path": entry.path.replace("*", "model"),
                "lfs": {"oid": entry.sha256 or "0" * 64, "size": entry.bytes, "pointerSize": 134},
            }
            for entry in manifest()
        ]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("SOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for name in ("HF_TOKEN", "HF_TOKEN_FILE", "SOL_ACCEPT_LICENCE"):
        monkeypatch.delenv(name, raising=False)
    with serving(PublishedHub({"FL2VA/model_index.json": b"{}"})) as hub:
        hub.revision = load_target("rtx4090").checkpoint.revision
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def sol(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["sol", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_licence_comes_before_the_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sol(monkeypatch, "fetch") == Exit.CHECKPOINT
    assert "--accept-licence" in capsys.readouterr().err
    assert not hub.asked


def test_field_report_11_144_gb_are_refused_on_a_small_disk_before_the_first_byte(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=150 * 10**9))
    arguments = ("fetch", "h100x4", "--accept-licence", "--dest", str(tmp_path / "weights"))
    assert sol(monkeypatch, *arguments) == Exit.ENVIRONMENT
    error = capsys.readouterr().err
    assert "150.00 GB free" in error and "151.25 GB: 144.05 GB that are missing, and 5 %" in error
    assert str(tmp_path / "weights/MiniMax-H3") in error
    assert not [asked for asked in hub.asked if asked.method == "GET" and asked.path != "listing"]


def test_the_whole_verb(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a list of one file: fetched, verified, verified again without network, and told as JSON."""
    from config.checkpoint import ManifestEntry

    hub.files = {"FL2VA/model_index.json": b"{}"}
    entry = ManifestEntry(path="FL2VA/model_index.json", bytes=2, sha256=hub.sha256("FL2VA/model_index.json"))
    monkeypatch.setattr("engine.checkpoint.fetch.manifest", lambda: (entry,))
    monkeypatch.setattr(PublishedHub, "tree", Hub.tree)
    assert sol(monkeypatch, "fetch", "--accept-licence", "--json") == Exit.PASSED
    told = json.loads(capsys.readouterr().out)
    assert (told["fetched_bytes"], [file["path"] for file in told["files"]]) == (2, ["FL2VA/model_index.json"])
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert sol(monkeypatch, "fetch", "--verify-only") == Exit.PASSED
    assert "1 files, 0.00 GB, verified (0.00 GB fetched, 0.00 GB hashed now)" in capsys.readouterr().out


def test_what_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOL_CACHE", str(tmp_path))
    assert sol(monkeypatch, "fetch", "cpu") == Exit.USAGE
    assert sol(monkeypatch, "fetch", "rtx4090", "--verify-only") == Exit.CHECKPOINT
    assert sol(monkeypatch, "fetch", "rtx4090", "--jobs", "0") == Exit.USAGE


def test_a_benchmark_fetches_what_is_absent_and_verifies_what_is_named(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from config.checkpoint import ManifestEntry
    from config.errors import CheckpointError
    from engine.checkpoint.store import checkpoint_folder

    entry = ManifestEntry(path="FL2VA/model_index.json", bytes=2, sha256=hub.sha256("FL2VA/model_index.json"))
    for place in ("engine.checkpoint.fetch.manifest", "engine.checkpoint.published.manifest"):
        monkeypatch.setattr(place, lambda: (entry,))
    monkeypatch.setattr(PublishedHub, "tree", Hub.tree)
    checkpoint = load_target("rtx4090").checkpoint
    progress = Progress(Console(), ["dense"], 1, 49, 49)
    with pytest.raises(CheckpointError, match="licence"):
        provide_checkpoint(checkpoint, None, progress)
    monkeypatch.setenv("SOL_ACCEPT_LICENCE", "yes")
    folder, found, notes = provide_checkpoint(checkpoint, None, progress)
    assert (folder, [file.path for file in found.files], notes) == (checkpoint_folder(checkpoint), [entry.path], [])
    own = tmp_path / "own"
    shutil.copytree(folder / "FL2VA", own / "FL2VA")
    assert provide_checkpoint(checkpoint, own, progress) == (own, found, [])
    (own / entry.path).write_text("[]")
    with pytest.raises(CheckpointError, match="is not what was published"):
        provide_checkpoint(checkpoint, own, progress)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal_and_plain_lines_elsewhere(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 144.05 GB at 100 MB/s: the bar, rate and time left; a log file gets lines without control codes."""
    out, now = StringIO(), [100.0]
    monkeypatch.setattr("entrypoints.progress.time.monotonic", lambda: now[0])
    with Display(Console(file=out, force_terminal=terminal, width=120)) as display:
        display.progress("fetching", 71_025_000_000, 144_050_000_000)
        now[0] += 10.0
        display.progress("fetching", 72_025_000_000, 144_050_000_000)
        if terminal:
            assert display._live is not None
            display._live.refresh()
    shown = out.getvalue()
    assert "fetching 72.03 of 144.05 GB, 100.0 MB/s, 12:00 left" in shown
    assert (BAR_WIDTH // 2 * "━" in shown) == terminal
    assert ("\x1b" in shown) == terminal
    assert terminal or shown.splitlines()[0] == "[0:00] fetching 71.03 of 144.05 GB, time left not known yet"
