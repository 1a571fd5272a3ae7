"""A synthetic checkpoint against its shipped list."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.errors import CheckpointError, EnvironmentRefused, Exit
from config.schema import Checkpoint
from engine.checkpoint import store

SYNTHETIC = Checkpoint(kind="synthetic", preset="tiny", seed=3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "MANIFEST_FOLDER", tmp_path)
    root = tmp_path / "MiniMax-H3"
    (root / "FL2VA").mkdir(parents=True)
    for name, data in {"FL2VA/a.json": b"{}", "FL2VA/b.safetensors": b"weights"}.items():
        (root / name).write_bytes(data)
    rows = [f"{file.path}\t{file.bytes}\t{file.sha256}" for file in store.list_files(root)]
    (tmp_path / "synthetic-tiny-seed3.tsv").write_text("\n".join(["path\tbytes\tsha256", *rows]) + "\n")
    return root


def test_an_intact_checkpoint_is_found(folder: Path) -> None:
    found, notes = store.verify_synthetic(SYNTHETIC, folder)
    assert [file.path for file in found.files] == ["FL2VA/a.json", "FL2VA/b.safetensors"]
    assert notes == []


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda root: (root / "FL2VA/b.safetensors").write_bytes(b"weigh"), "b.safetensors has 5 bytes"),
        (lambda root: (root / "FL2VA/b.safetensors").write_bytes(b"weightz"), "b.safetensors has 7 bytes"),
        (lambda root: (root / "FL2VA/a.json").unlink(), "a.json is missing"),
        (lambda root: (root / "FL2VA/c.py").write_bytes(b""), "c.py does not belong"),
    ],
    ids=["truncated", "changed", "missing", "surplus"],
)
def test_damage_names_the_file(folder: Path, damage: object, text: str) -> None:
    damage(folder)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=text) as caught:
        store.verify_synthetic(SYNTHETIC, folder)
    assert caught.value.exit_code is Exit.CHECKPOINT
    assert "sol synth" in caught.value.remedy


def test_a_seed_without_a_list_makes_the_run_open(folder: Path) -> None:
    other = Checkpoint(kind="synthetic", preset="tiny", seed=4)
    _, notes = store.verify_synthetic(other, folder)
    assert len(notes) == 1 and "seed 4" in notes[0]


def test_a_cache_that_cannot_be_written_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("SOL_CACHE", str(blocked))
    with pytest.raises(EnvironmentRefused, match="could not be written") as caught:
        store.write_synthetic(SYNTHETIC)
    assert "Traceback" not in str(caught.value)
