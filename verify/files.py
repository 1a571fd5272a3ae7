"""The files of a record directory, listed and read so that no content of it can harm the reader."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from config.canonical import sha256_bytes
from config.errors import InvalidRecord
from config.record import ATTESTATION, BENCHMARK, DETACHABLE_SUFFIXES, ENVIRONMENT, LOCK, SIGNER, STATUS
from config.schema import ARMS

MIB = 1 << 20
MAX_FILES = 20_000
MAX_DEPTH = 4
LIMITS = {".json": 64 * MIB, ".jsonl": 512 * MIB, ".safetensors": 1024 * MIB, ".mp4": 4096 * MIB, "": 64 * 1024}
"""Most bytes of a file by suffix. A full-size record has events of about 2 MB a sample and slices of about 25 MB a
rank.
"""

_ARM = f"arms/(?:{'|'.join(ARMS)})/"
_KNOWN = re.compile(
    "|".join(
        [
            *map(re.escape, (LOCK, ENVIRONMENT, SIGNER, BENCHMARK, ATTESTATION, STATUS)),
            _ARM + r"events-rank\d{1,4}\.jsonl",
            _ARM + r"(?:sample-\d{1,6}/)?gate-rank\d{1,4}\.(?:json|safetensors)",
            _ARM + r"telemetry-(?:gpu\d{1,4}|host)\.jsonl",
            _ARM + r"sample-\d{1,6}/(?:timing\.json|out\.mp4)",
        ]
    )
)


def is_known(name: str) -> bool:
    """Whether a record has a place for a file of this name."""
    return _KNOWN.fullmatch(name) is not None


def is_detachable(name: str) -> bool:
    """Whether a record may be handed on without this file: its digest stays in the attestation."""
    return name.endswith(DETACHABLE_SUFFIXES)


class Files:
    """A record's files by POSIX name relative to its root, sorted; each is read once, so what was hashed is what is
    parsed.

    Raises:
        InvalidRecord: the directory is missing, or holds a link, a device, a FIFO, a socket, a name that is not
        UTF-8, too
            many files, too many levels or a file beyond its size limit.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        if not root.is_dir():
            raise InvalidRecord(f"{root} is not a directory", needed="a run record", remedy="name a folder below runs/")
        self._sizes = dict(sorted(_walk(root, "", 0)))
        if len(self._sizes) > MAX_FILES:
            raise InvalidRecord(f"{root} holds {len(self._sizes)} files", needed=f"at most {MAX_FILES}")
        self._bytes: dict[str, bytes] = {}
        self._digests: dict[str, str] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def read(self, name: str) -> bytes:
        """The bytes of a file that was listed.

        Raises:
            InvalidRecord: it is not there, has changed its kind since, or cannot be read.
        """
        if name not in self._bytes:
            if name not in self._sizes:
                raise InvalidRecord(f"{name} is missing", remedy="ask for the whole record")
            self._bytes[name] = _read(self.root / name, name)
        return self._bytes[name]

    def sha256(self, name: str) -> str:
        """SHA-256 of the bytes that `read` returns."""
        if name not in self._digests:
            self._digests[name] = sha256_bytes(self.read(name))
        return self._digests[name]


def _walk(root: Path, prefix: str, depth: int) -> Iterator[tuple[str, int]]:
    if depth > MAX_DEPTH:
        raise InvalidRecord(f"{prefix} lies deeper than a record goes", needed=f"at most {MAX_DEPTH} levels of folders")
    try:
        entries = sorted(os.scandir(root / prefix), key=lambda entry: entry.name)
        for count, entry in enumerate(entries):
            if count > MAX_FILES:
                raise InvalidRecord(f"{prefix or '.'} holds more than {MAX_FILES} entries")
            name = prefix + entry.name
            if not _is_text(entry.name):
                raise InvalidRecord(f"a file name is not UTF-8 text: {name!r}", remedy="remove the file")
            mode = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(mode.st_mode):
                yield from _walk(root, name + "/", depth + 1)
            else:
                yield name, _checked_size(name, mode)
    except OSError as error:
        raise InvalidRecord(f"{prefix or '.'} cannot be read: {error.strerror}") from None


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return name.isprintable()


def _checked_size(name: str, found: os.stat_result) -> int:
    if not stat.S_ISREG(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
        raise InvalidRecord(
            f"{name} is {kind}", needed="regular files only", remedy="copy the record with its real files"
        )
    limit = LIMITS.get(os.path.splitext(name)[1], LIMITS[""])
    if found.st_size > limit:
        raise InvalidRecord(f"{name} has {found.st_size} bytes", needed=f"at most {limit}")
    return found.st_size


def _read(path: Path, name: str) -> bytes:
    # Opened without following a link and without waiting for a FIFO, and looked at again: the tree may have changed
    # since.
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            size = _checked_size(name, os.fstat(file.fileno()))
            return file.read(size)
    except OSError as error:
        raise InvalidRecord(f"{name} cannot be read: {error.strerror}") from None
