"""What an image says of itself, and which of its files were changed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from engine.image import changed_files, image_labels


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image's root: two files below `sol`, one elsewhere, all listed, and the folder that lists them."""
    files = {"sol/code.py": b"1\n", "sol/data": b"", "bin/ffmpeg": b"binary"}
    folder = tmp_path / "sol" / "image"
    folder.mkdir(parents=True)
    lines = []
    for name, data in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        lines.append(f"{hashlib.sha256(data).hexdigest()}  {path}\n")
    (folder / "files.sha256").write_text("".join(lines))
    (folder / "image.json").write_text(json.dumps({"labels": {"org.sol-h3.torch": "2.13.0+cpu"}}))
    return tmp_path


def changed(root: Path) -> list[str]:
    found = changed_files(root / "sol" / "image", root / "sol")
    return [str(Path(path).relative_to(root)) for path in found]


def test_an_untouched_image_differs_in_nothing(image: Path) -> None:
    assert changed(image) == []
    assert image_labels(image / "sol" / "image") == {"org.sol-h3.torch": "2.13.0+cpu"}


def test_changed_missing_and_added_files_are_named(image: Path) -> None:
    (image / "sol/code.py").write_text("2\n")
    (image / "bin/ffmpeg").unlink()
    (image / "sol/sitecustomize.py").write_text("")
    (image / "bin/other").write_text("not below /opt/sol, where others may add files")
    assert changed(image) == ["bin/ffmpeg", "sol/code.py", "sol/sitecustomize.py"]


def test_outside_an_image_nothing_is_said(tmp_path: Path) -> None:
    assert image_labels(tmp_path) == {}
    assert changed_files(tmp_path, tmp_path) == []
