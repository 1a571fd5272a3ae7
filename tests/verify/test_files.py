"""A record directory cannot harm its reader."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from pathlib import Path
from unittest.mock import patch

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


def sparse(path: Path, size: int) -> None:
    """A file of that many bytes that takes no room on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as handle:
        handle.truncate(size)


@pytest.mark.parametrize(
    ("count", "size", "name"),
    [
        (6, 4096 << 20, "out.mp4"),
        (40, 500 << 20, "out.mp4"),
        (40, 250 << 20, "gate-rank0.safetensors"),
        (9, 64 << 20, "timing.json"),
    ],
)
def test_sparse_files_of_many_bytes_together_are_refused_before_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, size: int, name: str
) -> None:
    for number in range(count):
        sparse(tmp_path / f"arms/dense/sample-{number}/{name}", size)
    monkeypatch.setattr(files, "_pieces", lambda *_: pytest.fail("a file was read"))
    report = verify_record(tmp_path)
    assert report.verdict == "INVALID" and "needed: at most" in report.findings[0].message


def test_videos_and_slices_are_hashed_in_pieces_and_not_kept(tmp_path: Path) -> None:
    sparse(tmp_path / "arms/dense/sample-0/out.mp4", 400 << 20)
    listed = Files(tmp_path)
    tracemalloc.start()
    digest = listed.sha256("arms/dense/sample-0/out.mp4")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20 << 20
    whole = hashlib.sha256()
    for _ in range(400):
        whole.update(bytes(1 << 20))
    assert digest == whole.hexdigest()


@settings(max_examples=50)
@given(content=st.binary(max_size=5000), piece=st.integers(1, 2000), name=st.sampled_from(["a.mp4", "b.jsonl"]))
def test_digest_in_pieces_is_that_of_the_bytes(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, piece: int, name: str
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / name).write_bytes(content)
    with patch.object(files, "PIECE", piece):
        assert Files(folder).sha256(name) == hashlib.sha256(content).hexdigest() == Files(folder).sha256(name)
        assert Files(folder).read(name) == content


def test_video_that_changes_between_its_digest_and_its_reading_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"1")
    listed = Files(tmp_path)
    listed.sha256("a.mp4")
    (tmp_path / "a.mp4").write_bytes(b"2")
    with pytest.raises(InvalidRecord, match="changed while it was judged"):
        listed.read("a.mp4")


@pytest.mark.parametrize("place", ["Files", "read_attestation", "read_record", "run_checks", "_derive", "judge_claims"])
def test_memory_that_runs_out_is_a_finding_and_no_traceback(fresh, monkeypatch: pytest.MonkeyPatch, place: str) -> None:  # type: ignore[no-untyped-def]
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(f"verify.report.{place}", full)
    report = verify_record(fresh())
    assert report.verdict == "INVALID" and "memory" in report.findings[0].message and report.findings[0].remedy


def test_file_that_does_not_fit_into_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    (tmp_path / "lock.json").write_bytes(b"{}")
    listed = Files(tmp_path)
    monkeypatch.setattr(files, "_pieces", full)
    with pytest.raises(InvalidRecord, match="lock.json has 2 bytes, more than this machine's memory"):
        listed.read("lock.json")


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
