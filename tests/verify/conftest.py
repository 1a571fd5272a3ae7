"""Records that tests read or break. Building one takes seconds, copying one milliseconds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from config.lock import lock_file_name, lock_json, resolve, target_names
from tests.verify.builder import Builder
from verify.attestation import sign
from verify.keys import keygen, load_signer
from verify.report import check_record


@dataclass(frozen=True)
class Signed:
    """A signed record and a trust file that names its key."""

    record: Path
    trust: Path
    key: Path


@pytest.fixture(scope="session", autouse=True)
def current_locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The shipped locks are those of the targets as they stand: whether config/locks keeps up is tested elsewhere."""
    folder = tmp_path_factory.mktemp("locks")
    for name in target_names():
        lock = resolve(name)
        (folder / lock_file_name(lock)).write_bytes(lock_json(lock))
    with patch("config.lock.LOCKS", folder):
        yield


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Builder], Path]:
    """Builds a record once for each set of its options; the result must not be changed."""
    built: dict[str, Path] = {}

    def build(builder: Builder) -> Path:
        name = repr(builder)
        if name not in built:
            built[name] = builder.build(tmp_path_factory.mktemp("records") / "record")
        return built[name]

    return build


@pytest.fixture
def fresh(records: Callable[[Builder], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a record that a test may break: `fresh()` for the CPU target's two arms, options as of Builder."""

    def copy(**options: object) -> Path:
        place = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        return Path(shutil.copytree(records(Builder(**options)), place))  # type: ignore[arg-type]

    return copy


def sign_with(record: Path, key: Path) -> None:
    """Sign a record with a key file, whatever was signed before."""
    (record / "attestation.json").unlink(missing_ok=True)
    sign(record, load_signer(key), check_record(record))


def make_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A key file, and a trust file that names it."""
    key, public, _ = keygen(folder / name)
    trust = folder / f"{name}.toml"
    trust.write_text(f'[[keys]]\nname = "{name}"\npem = "{public.name}"\n')
    return key, trust


@pytest.fixture(scope="session")
def sealed(records: Callable[[Builder], Path], tmp_path_factory: pytest.TempPathFactory) -> Signed:
    """The CPU target's record, signed; a test that changes it puts it back."""
    folder = tmp_path_factory.mktemp("sealed")
    record = Path(shutil.copytree(records(Builder()), folder / "record"))
    key, trust = make_key(folder, "lab")
    sign_with(record, key)
    return Signed(record, trust, key)


@pytest.fixture
def signed(sealed: Signed, tmp_path: Path) -> Signed:
    """A copy of it that a test may break, with its keys."""
    folder = Path(shutil.copytree(sealed.record.parent, tmp_path / "signed"))
    return Signed(folder / sealed.record.name, folder / sealed.trust.name, folder / sealed.key.name)
