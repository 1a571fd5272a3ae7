"""What the published checkpoint consists of: path, size and SHA-256 of each file, where they are known."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath

from pydantic import Field

from config.schema import Setting, Sha256

FILE = Path(__file__).resolve().parent / "MiniMax-H3-FL2VA.tsv"
COLUMNS = ("path", "bytes", "sha256")


class ManifestEntry(Setting):
    """One published file. `path` is relative to the repository; a star in its last part stands for any characters."""

    path: str = Field(min_length=1)
    bytes: int = Field(ge=0)
    sha256: Sha256 | None = Field(description="null where no public list gives it")

    def matches(self, path: str) -> bool:
        """Whether a file of the repository is this one. A star does not cross a folder."""
        mine, other = PurePosixPath(self.path), PurePosixPath(path)
        return mine.parent == other.parent and fnmatchcase(other.name, mine.name)


@cache
def manifest() -> tuple[ManifestEntry, ...]:
    """Every file of the published partition that a public list names, in the list's order."""
    return parse(FILE.read_text("utf-8"))


def of_partition(partition: str, entries: Sequence[ManifestEntry] | None = None) -> list[ManifestEntry]:
    """The entries of the folder that is fetched. The published list has two files beside it, the repository's licence
    and an index of all partitions, which no run reads."""
    listed = manifest() if entries is None else entries
    return [entry for entry in listed if PurePosixPath(entry.path).is_relative_to(partition)]


def entry_for(path: str, entries: Sequence[ManifestEntry] | None = None) -> ManifestEntry | None:
    """The entry of one file, or None where the list does not name it.

    Args:
        path: relative to the repository, with forward slashes, such as `FL2VA/model_index.json`.
        entries: the list to look in; the shipped one by default.
    """
    return next((entry for entry in (manifest() if entries is None else entries) if entry.matches(path)), None)


def parse(text: str) -> tuple[ManifestEntry, ...]:
    """Read the tab-separated form: comment lines, a header, one line a file.

    Raises:
        ValueError: a line is not of that form (pydantic's ValidationError is one).
    """
    lines = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    if not lines or tuple(lines[0]) != COLUMNS:
        raise ValueError(f"the header must be {', '.join(COLUMNS)}")
    wrong = [line for line in lines if len(line) != len(COLUMNS)]
    if wrong:
        raise ValueError(f"a line has {len(wrong[0])} columns instead of {len(COLUMNS)}: {wrong[0]}")
    return tuple(ManifestEntry(path=path, bytes=int(size), sha256=digest or None) for path, size, digest in lines[1:])
