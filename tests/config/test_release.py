"""The locks that ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.lock import LOCKS, Lock, lock_file_name, lock_json, resolve, shipped_locks, target_names
from config.release import write_locks

from .conftest import target_folder


@pytest.mark.parametrize("name", target_names())
def test_current_lock_of_each_target_ships(name: str) -> None:
    lock = resolve(name)
    assert lock.digest in shipped_locks(), (
        "run `python -m config.release`: the target, its prompt or its recipe changed"
    )
    assert (LOCKS / lock_file_name(lock)).read_bytes() == lock_json(lock)


def test_every_shipped_lock_is_whole() -> None:
    for path in sorted(LOCKS.glob("*.json")):
        lock = Lock.model_validate_json(path.read_bytes())
        assert path.name == lock_file_name(lock)
        assert lock.recomputed_digest() == lock.digest == lock.base_digest and lock.overrides == ()


def test_keeps_earlier_locks_unless_told(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    with target_folder(tmp_path):
        first = lock_file_name(resolve("fixture"))
        assert write_locks(folder) == ([first], [])
        assert write_locks(folder) == ([], [])
    with target_folder(tmp_path, image=b"another recipe"):
        second = lock_file_name(resolve("fixture"))
        assert write_locks(folder) == ([second], [])
        assert sorted(path.name for path in folder.iterdir()) == sorted([first, second])
        assert write_locks(folder, prune=True) == ([], [first])
        assert [path.name for path in folder.iterdir()] == [second]


def test_pruning_spares_the_locks_of_kept_records(tmp_path: Path) -> None:
    folder, records = tmp_path / "locks", tmp_path / "records"
    with target_folder(tmp_path):
        lock = resolve("fixture", ["sol_attn.tau=0.5"])
        (records / "run").mkdir(parents=True)
        (records / "run" / "lock.json").write_bytes(lock_json(lock))
        first = lock_file_name(resolve("fixture"))
        write_locks(folder)
    with target_folder(tmp_path, image=b"another recipe"):
        write_locks(folder)
        assert write_locks(folder, prune=True, records=records) == ([], [])
        assert write_locks(folder, prune=True, records=tmp_path / "none") == ([], [first])


def test_mends_a_damaged_lock(tmp_path: Path) -> None:
    with target_folder(tmp_path):
        (name,), _ = write_locks(tmp_path / "locks")
        whole = (tmp_path / "locks" / name).read_bytes()
        (tmp_path / "locks" / name).write_bytes(whole[:-9])
        assert write_locks(tmp_path / "locks") == ([name], [])
        assert (tmp_path / "locks" / name).read_bytes() == whole
