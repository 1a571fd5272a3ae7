"""A record directory cannot harm its reader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import InvalidRecord, SolError, UsageError
from verify import files
from verify.files import Files, is_detachable, is_known
from verify.report import verify_record
from verify.strictjson import parse


def test_files_are_listed_by_posix_name_and_read_once(tmp_path: Path) -> None:
    (tmp_path / "arms/dense").mkdir(parents=True)
    (tmp_path / "arms/dense/b").write_bytes(b"1")
    (tmp_path / "a").write_bytes(b"2")
    listed = Files(tmp_path)
    assert list(listed) == ["a", "arms/dense/b"]
    assert listed.read("a") == b"2"
    (tmp_path / "a").write_bytes(b"3")
    assert listed.read("a") == b"2"
    assert listed.sha256("a") == "d4735e3a265e16eee03f59718b9b5d03019c07d8b6c51f90da3a666eec13ab35"


def link(path: Path) -> None:
    (path / "status").symlink_to("/etc/hostname")


def folder_link(path: Path) -> None:
    (path / "arms").symlink_to("/etc")


def fifo(path: Path) -> None:
    os.mkfifo(path / "status")


def deep(path: Path) -> None:
    (path / "a/b/c/d/e/f").mkdir(parents=True)
    (path / "a/b/c/d/e/f/g").write_bytes(b"")


def not_text(path: Path) -> None:
    open(os.fsencode(path) + b"/\xff\xfe", "wb").close()


def control(path: Path) -> None:
    (path / "a\x1b[2Jb").write_bytes(b"")


def large(path: Path) -> None:
    with (path / "status").open("wb") as handle:
        handle.truncate(10 << 20)


@pytest.mark.parametrize("harm", [link, folder_link, fifo, deep, not_text, control, large])
def test_what_is_no_plain_small_file_is_refused(tmp_path: Path, harm) -> None:  # type: ignore[no-untyped-def]
    harm(tmp_path)
    with pytest.raises(InvalidRecord):
        Files(tmp_path)
    assert int(verify_record(tmp_path).exit_code) == 13


def test_file_that_becomes_a_link_after_it_was_listed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "status").write_bytes(b"{}")
    listed = Files(tmp_path)
    (tmp_path / "status").unlink()
    (tmp_path / "status").symlink_to("/etc/hostname")
    with pytest.raises(InvalidRecord, match="status cannot be read"):
        listed.read("status")


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 3)
    for number in range(6):
        (tmp_path / str(number)).write_bytes(b"")
    with pytest.raises(InvalidRecord):
        Files(tmp_path)


def test_missing_directory_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", Path(__file__)):
        with pytest.raises(UsageError):
            verify_record(path)


def test_empty_directory_is_invalid(tmp_path: Path) -> None:
    report = verify_record(tmp_path)
    assert int(report.exit_code) == 13 and "status is missing" in report.findings[0].message


@pytest.mark.parametrize(
    "name", ["lock.json", "status", "arms/sol/gate-rank3.json", "arms/sol/sample-2/gate-rank0.safetensors",
             "arms/dense/telemetry-gpu0.jsonl", "arms/native/sample-10/out.mp4"]
)  # fmt: skip
def test_names_of_a_record(name: str) -> None:
    assert is_known(name)
    assert not is_known(name + "x") and not is_known("x/" + name) and not is_known("../" + name)


def test_detachable_names() -> None:
    assert is_detachable("arms/dense/sample-0/out.mp4") and not is_detachable("lock.json")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b'{"a":1,"a":2}', b"NaN", b"[Infinity]", b"1e999", b"9007199254740993", b"\xff", b"[" * 100_000,
     b"1" * 5000, b'{"a":-Infinity}', b"{}x"],
)  # fmt: skip
def test_json_that_two_readers_would_read_differently_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRecord, match=r"^the file"):
        parse(data, "the file")


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=100), st.text(max_size=100).map(str.encode)))
def test_json_parser_ends_in_a_value_or_a_clear_error(data: bytes) -> None:
    try:
        parse(data, "x")
    except SolError:
        pass
