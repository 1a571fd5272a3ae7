"""The files of a record directory, listed and read so that no content of it can harm the reader."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from config.canonical import sha256_bytes
from config.errors import InvalidRecord
from config.record import ATTESTATION, BENCHMARK, DETACHABLE_SUFFIXES, ENVIRONMENT, LOCK, SIGNER, STATUS
from config.schema import ARMS
from verify.findings import AS_WRITTEN

MIB = 1 << 20
MAX_FILES = 20_000
MAX_DEPTH = 4
LIMITS = {".json": 64 * MIB, ".jsonl": 512 * MIB, ".safetensors": 256 * MIB, ".mp4": 512 * MIB, "": 64 * 1024}
"""Most bytes of a file by suffix. A full-size record has events of about half a MB a sample, slices of about 25 MB a
rank, and videos whose frames would be 200 MB without any coding.
"""
MAX_KEPT, MAX_ALL = 512 * MIB, 8192 * MIB
"""Most bytes of all files that are parsed and kept in memory, and of all files: 70 samples of six arms on four GPUs."""
PIECE = MIB
COPY = "copy the record to a place where you may read all of it"
ELSEWHERE = "judge it on a machine with more memory"

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
    """A record's files by POSIX name relative to its root, sorted. What was hashed is what is parsed: a file is read
    once and kept, but for videos and slices, which are hashed in pieces, and read whole only while they are judged.

    Raises:
        InvalidRecord: the directory is missing, or holds a link, a device, a FIFO, a socket, a name that is not
        UTF-8, too many files, too many levels, or more bytes in a file or in all than a record has.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        if not root.is_dir():
            raise InvalidRecord(f"{root} is not a directory", needed="a run record", remedy="name a folder below runs/")
        self._sizes = dict(sorted(_walk(root, "", 0)))
        if len(self._sizes) > MAX_FILES:
            raise InvalidRecord(
                f"{root} holds {len(self._sizes)} files", needed=f"at most {MAX_FILES}", remedy=AS_WRITTEN
            )
        kept = sum(size for name, size in self._sizes.items() if not is_detachable(name))
        for found, limit, which in ((kept, MAX_KEPT, "the files to parse"), (self.size, MAX_ALL, "all files")):
            if found > limit:
                raise InvalidRecord(
                    f"{which} have {found} bytes together",
                    needed=f"at most {limit}",
                    remedy="ask for the record without its videos, or for one of fewer samples",
                )
        self._bytes: dict[str, bytes] = {}
        self._digests: dict[str, str] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    @property
    def size(self) -> int:
        """Bytes of all files, as the directory tells them."""
        return sum(self._sizes.values())

    def read(self, name: str) -> bytes:
        """The bytes of a file that was listed.

        Raises:
            InvalidRecord: it is not there, has changed since, cannot be read, or does not fit into memory.
        """
        if name in self._bytes:
            return self._bytes[name]
        self._listed(name)
        try:
            data = b"".join(_pieces(self.root / name, name, MAX_ALL))
        except MemoryError:
            raise InvalidRecord(
                f"{name} has {self._sizes[name]} bytes, more than this machine's memory has room for", remedy=ELSEWHERE
            ) from None
        if not is_detachable(name):
            self._bytes[name] = data
        elif self._digests.setdefault(name, digest := sha256_bytes(data)) != digest:
            raise InvalidRecord(f"{name} was changed while it was judged", remedy="judge a copy that nobody writes to")
        return data

    def sha256(self, name: str) -> str:
        """SHA-256 of the bytes that `read` returns."""
        if name not in self._digests:
            self._listed(name)
            large = is_detachable(name)
            pieces = _pieces(self.root / name, name, PIECE) if large else iter([self.read(name)])
            digest = hashlib.sha256()
            for piece in pieces:
                digest.update(piece)
            self._digests[name] = digest.hexdigest()
        return self._digests[name]

    def _listed(self, name: str) -> None:
        if name not in self._sizes:
            raise InvalidRecord(f"{name} is missing", remedy="ask for the whole record")


def _walk(root: Path, prefix: str, depth: int) -> Iterator[tuple[str, int]]:
    if depth > MAX_DEPTH:
        raise InvalidRecord(
            f"{prefix} lies deeper than a record goes",
            needed=f"at most {MAX_DEPTH} levels of folders",
            remedy=AS_WRITTEN,
        )
    try:
        entries = sorted(os.scandir(root / prefix), key=lambda entry: entry.name)
        for count, entry in enumerate(entries):
            if count > MAX_FILES:
                raise InvalidRecord(f"{prefix or '.'} holds more than {MAX_FILES} entries", remedy=AS_WRITTEN)
            name = prefix + entry.name
            if not _is_text(entry.name):
                raise InvalidRecord(f"a file name is not UTF-8 text: {name!r}", remedy="remove the file")
            mode = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(mode.st_mode):
                yield from _walk(root, name + "/", depth + 1)
            else:
                yield name, _checked_size(name, mode)
    except OSError as error:
        raise InvalidRecord(f"{prefix or '.'} cannot be read: {error.strerror}", remedy=COPY) from None


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
        raise InvalidRecord(f"{name} has {found.st_size} bytes", needed=f"at most {limit}", remedy=AS_WRITTEN)
    return found.st_size


def _pieces(path: Path, name: str, most: int) -> Iterator[bytes]:
    # Opened without following a link and without waiting for a FIFO, and looked at again: the tree may have changed
    # since.
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb", buffering=0) as file:
            left = _checked_size(name, os.fstat(file.fileno()))
            while left > 0 and (piece := file.read(min(left, most))):
                left -= len(piece)
                yield piece
    except OSError as error:
        raise InvalidRecord(f"{name} cannot be read: {error.strerror}", remedy=COPY) from None
