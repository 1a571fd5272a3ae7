"""Whether the files of a published checkpoint are the ones that its listing describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from config.canonical import sha256_json
from config.checkpoint import ManifestEntry, manifest
from config.errors import CheckpointError
from config.record import CheckpointFound
from config.schema import Checkpoint
from engine.checkpoint import marker as markers
from engine.checkpoint.hashing import digests
from engine.checkpoint.listing import Listing, RemoteFile, recorded, shipped
from engine.checkpoint.store import digest_files, user_cache


@dataclass
class Examined:
    """Files of a listing as they lie on disk. `hashed`: bytes that had to be read."""

    marker: markers.Marker
    good: list[RemoteFile] = field(default_factory=list)
    bad: list[RemoteFile] = field(default_factory=list)
    missing: list[RemoteFile] = field(default_factory=list)
    hashed: int = 0


@dataclass(frozen=True)
class Verified:
    """A checkpoint whose every file was checked. `notes`: sentences that make a run of it open."""

    folder: Path
    found: CheckpointFound
    notes: tuple[str, ...]
    hashed: int
    fetched: int = 0


def examine(
    root: Path,
    files: Iterable[RemoteFile],
    *,
    rehash: bool = False,
    on_hash: Callable[[int, int], None] = lambda done, total: None,
) -> Examined:
    """Compare files with what they should be. Only those are hashed that changed since they were last.

    `on_hash` hears how many bytes of how many are hashed.

    Raises:
        CheckpointError: a file cannot be read.
    """
    known = markers.Marker() if rehash else markers.read(root, user_cache())
    out = Examined(marker=markers.Marker())
    entries: dict[str, markers.Seen] = {}
    unknown: list[RemoteFile] = []
    try:
        for file in files:
            path = root / file.path
            if not path.is_file():
                out.missing.append(file)
            elif path.stat().st_size != file.bytes:
                out.bad.append(file)
            elif (digest := known.digest(root, file.path)) is not None and file.is_content(digest):
                out.good.append(file)
                entries[file.path] = known.files[file.path]
            else:
                unknown.append(file)
        before = [(root / file.path).stat() for file in unknown]
        done, total = 0, sum(stat.st_size for stat in before)

        def count(number: int) -> None:
            nonlocal done
            done += number
            on_hash(done, total)

        git = {root / file.path for file in unknown if file.sha256 is None}
        found = digests([root / file.path for file in unknown], git=git, on_bytes=count)
        for file, stat, digest in zip(unknown, before, found, strict=True):
            (out.good if file.is_content(digest) else out.bad).append(file)
            out.hashed += stat.st_size
            if file.is_content(digest):
                entries[file.path] = markers.seen(digest, stat)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: {error.strerror}", needed="readable files", remedy="check the mount and its permissions"
        ) from error
    out.marker = markers.Marker(files=entries)
    return out


def surplus(root: Path, listing: Listing) -> list[str]:
    """Files of the partition that the listing does not name. SGLang would load some of them."""
    known = {file.path for file in listing.files}
    found = (path.relative_to(root).as_posix() for path in (root / listing.partition).rglob("*") if path.is_file())
    return sorted(path for path in found if path not in known)


def verify_published(
    checkpoint: Checkpoint,
    root: Path,
    *,
    entries: tuple[ManifestEntry, ...] | None = None,
    rehash: bool = False,
    on_hash: Callable[[int, int], None] = lambda done, total: None,
) -> Verified:
    """Check a published checkpoint without the network.

    With the listing that `sol fetch` left beside it every file is known. Without one, files that the shipped list does
    not name cannot be judged: they are recorded, and make a run open.

    Raises:
        CheckpointError: a file is missing, cut, changed or surplus.
    """
    listing, notes, extra = recorded(checkpoint, root, user_cache()), list[str](), list[str]()
    remedy = "`sol fetch TARGET` fetches just what is missing or wrong"
    if listing is None:
        listing, missing = shipped(checkpoint, root, manifest() if entries is None else entries)
        if missing:
            raise CheckpointError(
                f"{root}: {len(missing)} listed files are missing, first {missing[0]}",
                needed=f"partition {checkpoint.partition} of {checkpoint.repo}: the folder that holds "
                f"{checkpoint.partition}/model_index.json",
                remedy=remedy,
            )
        extra = surplus(root, listing)
        if extra:
            notes.append(
                f"{len(extra)} files of the checkpoint are in no list here, first {extra[0]}; `sol fetch` asks the hub"
            )
    elif unexpected := surplus(root, listing):
        raise CheckpointError(f"{root / unexpected[0]} does not belong to the checkpoint", remedy="remove it")
    seen = examine(root, listing.files, rehash=rehash, on_hash=on_hash)
    for file in [*seen.missing, *seen.bad]:
        what = "is missing" if file in seen.missing else "is not what was published"
        raise CheckpointError(
            f"{root / file.path} {what}; {len(seen.missing)} missing and {len(seen.bad)} wrong in all",
            needed=f"{file.bytes} bytes with {file.content[:20]}…",
            remedy=remedy,
        )
    markers.keep(root, user_cache(), "verified", seen.marker)
    return conclude(checkpoint, root, seen, extra, notes)


def conclude(
    checkpoint: Checkpoint, root: Path, seen: Examined, extra: list[str], notes: list[str], fetched: int = 0
) -> Verified:
    """What the record says of files that are all there. `extra`: files beside the list, which are hashed here."""
    files = markers.files(seen.marker, [file.path for file in seen.good]) + digest_files(root, extra)
    files = tuple(sorted(files, key=lambda file: file.path))
    found = CheckpointFound(
        kind="hub",
        revision=checkpoint.revision,
        sha256=sha256_json([file.model_dump() for file in files]),
        files=files,
    )
    return Verified(folder=root, found=found, notes=tuple(notes), hashed=seen.hashed, fetched=fetched)
