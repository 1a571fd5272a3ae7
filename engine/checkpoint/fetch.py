"""Fetch a published checkpoint: exactly its files, each checked by digest, resumable at the byte.

The order is that of cost: what is there already, licence, token and one small file, the listing against the shipped
list, disk space for what is missing, and only then the first byte of a weight.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from config.checkpoint import ManifestEntry, manifest
from config.errors import CheckpointError, EnvironmentRefused, Interrupted
from config.schema import Checkpoint
from engine.checkpoint import access, published
from engine.checkpoint import listing as listings
from engine.checkpoint import marker as markers
from engine.checkpoint.hashing import Digest, digest
from engine.checkpoint.listing import Listing, RemoteFile
from engine.checkpoint.marker import STATE
from engine.checkpoint.store import user_cache
from engine.checkpoint.transfer import Patience, Worker, part_size, persist

ENDPOINT = "https://huggingface.co"
MODEL_FOLDER = "MiniMax-H3"
"""SGLang finds its pipeline by the last part of the path."""
SPARE = 0.05
"""Share of the missing bytes that must be free beside them."""
REFETCHES = 2
"""How often a file that came with the right size and the wrong content is fetched again, as a whole."""


class Watch(Protocol):
    """Whoever wants to see a fetch go on."""

    def say(self, text: str) -> None:
        """One line about something that happened."""

    def progress(self, what: str, done: int, total: int) -> None:
        """So many bytes of a phase, `hashing` or `fetching`, are done. Called often, and from several threads."""


class Silent:
    """Shows nothing."""

    def say(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Options:
    """How to fetch. `entries`: the list of published files, the shipped one when None."""

    jobs: int = 4
    rehash: bool = False
    patience: Patience = Patience()
    entries: tuple[ManifestEntry, ...] | None = None


def destination(named: Path) -> Path:
    """The checkpoint's root for a directory that a user names."""
    return named if named.name == MODEL_FOLDER else named / MODEL_FOLDER


def fetch(checkpoint: Checkpoint, root: Path, options: Options, watch: Watch) -> published.Verified:
    """Make a published checkpoint complete and verified; what is there and right is not touched.

    Args:
        checkpoint: repository, revision and partition.
        root: the folder that will hold the partition.

    Raises:
        CheckpointError: refused, unreachable, or not what was published.
        EnvironmentRefused: too little disk, or a directory that cannot be written.
        Interrupted: stopped; what arrived is kept and the next fetch goes on there.
    """
    known = listings.recorded(checkpoint, root, user_cache())
    if known is not None:  # with everything there, not even a writable directory is needed
        seen = hash_present(root, known, options, watch)
        if not seen.missing and not seen.bad:
            return finish(checkpoint, root, known, seen, 0)
    access.require_licence(checkpoint.repo)
    endpoint, token = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/"), access.token()
    stop = threading.Event()
    with locked(root):
        if known is None:
            known = ask_hub(checkpoint, endpoint, token, options, stop, watch)
            markers.keep(root, user_cache(), "listing", known)
        seen = hash_present(root, known, options, watch)
        wanted = seen.missing + seen.bad
        if wanted:
            prepare(root, wanted, seen.bad, watch)
            job = {**listings.job(checkpoint, endpoint, token), "do": "transfer"}
            before = sum(part_size(part_path(root, file)) for file in wanted)
            markers.keep(root, user_cache(), "verified", seen.marker)
            download(root, wanted, job, options, stop, watch)
            seen = hash_present(root, known, options, watch)
            if seen.missing or seen.bad:
                raise CheckpointError(
                    f"{root / (seen.missing + seen.bad)[0].path} changed while it was fetched",
                    remedy="let nothing else write there, and type the command again",
                )
            return finish(checkpoint, root, known, seen, sum(file.bytes for file in wanted) - before)
    return finish(checkpoint, root, known, seen, 0)


def ask_hub(
    checkpoint: Checkpoint, endpoint: str, token: str | None, options: Options, stop: threading.Event, watch: Watch
) -> Listing:
    """The hub's listing, held against the shipped list."""
    worker = Worker(stop)
    try:
        what = f"listing {checkpoint.repo}"
        found = persist(
            worker, listings.job(checkpoint, endpoint, token), options.patience, stop, what=what, say=watch.say
        )
    finally:
        worker.close()
    return listings.reconcile(checkpoint, found, manifest() if options.entries is None else options.entries)


def hash_present(root: Path, listing: Listing, options: Options, watch: Watch) -> published.Examined:
    """Which files are there and right; hashes only what is not known to be unchanged."""
    return published.examine(
        root,
        listing.files,
        rehash=options.rehash,
        on_hash=lambda done, total: watch.progress("hashing", done, total),
    )


def finish(
    checkpoint: Checkpoint, root: Path, listing: Listing, seen: published.Examined, fetched: int
) -> published.Verified:
    """Everything is there: no file too many, the marker written, the part files gone."""
    if unexpected := published.surplus(root, listing):
        raise CheckpointError(f"{root / unexpected[0]} does not belong to the checkpoint", remedy="remove it")
    markers.keep(root, user_cache(), "verified", seen.marker)
    with contextlib.suppress(OSError):
        shutil.rmtree(root / STATE / "parts")
    return published.conclude(checkpoint, root, seen, [], [], fetched)


def prepare(root: Path, wanted: list[RemoteFile], bad: list[RemoteFile], watch: Watch) -> None:
    """Room for what is missing, before the first byte (field report 11); wrong files go (field report 9).

    Raises:
        EnvironmentRefused: too little space, or no write access.
    """
    try:
        (root / STATE / "parts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentRefused(
            f"{root}: {error.strerror}, and {len(wanted)} files are missing or wrong, first {wanted[0].path}",
            needed="a writable directory",
            remedy="name one with --dest DIR; only a complete checkpoint may be read-only",
        ) from error
    missing = sum(file.bytes - min(part_size(part_path(root, file)), file.bytes) for file in wanted)
    free = shutil.disk_usage(root).free + sum((root / file.path).stat().st_size for file in bad)
    if free < missing * (1 + SPARE):
        raise EnvironmentRefused(
            f"{root}: {free / 1e9:.2f} GB free",
            needed=f"{missing * (1 + SPARE) / 1e9:.2f} GB: {missing / 1e9:.2f} GB that are missing, and 5 %",
            remedy="free some space, or name a larger disk with --dest DIR or SOL_CACHE",
        )
    for file in bad:
        watch.say(f"{file.path} is not what was published; it is fetched again")
        (root / file.path).unlink()


def part_path(root: Path, file: RemoteFile) -> Path:
    """Where a file's bytes gather until they are all there. Named by content: files with one content share one."""
    return root / STATE / "parts" / f"{file.content}.part"


def download(
    root: Path, wanted: list[RemoteFile], job: dict[str, Any], options: Options, stop: threading.Event, watch: Watch
) -> None:
    """Fetch files side by side; the first failure stops all."""
    groups: dict[str, list[RemoteFile]] = {}
    for file in wanted:
        groups.setdefault(file.content, []).append(file)
    unique = {content: files[0] for content, files in groups.items()}
    total = sum(file.bytes for file in unique.values())
    finished: set[str] = set()

    def report() -> None:
        sizes = (f.bytes if f.content in finished else part_size(part_path(root, f)) for f in unique.values())
        watch.progress("fetching", sum(sizes), total)

    xet_failed = threading.Event()  # after the first failure no file tries it again: each would wait for the watchdog
    if os.environ.get("HF_HUB_DISABLE_XET", "").lower() in ("1", "true", "yes", "on"):
        xet_failed.set()
    workers = threading.local()
    started: list[Worker] = []
    marking = threading.Lock()

    def one(files: list[RemoteFile]) -> None:
        if not hasattr(workers, "mine"):
            workers.mine = Worker(stop)
            started.append(workers.mine)
        found = obtain(root, files, job, options, workers.mine, stop, watch, xet_failed)
        with marking:  # what was hashed now is not hashed again, not even when the fetch is killed before its end
            known = markers.read(root, user_cache())
            entry = markers.seen(found, (root / files[0].path).stat())
            new = markers.Marker(files={**known.files, files[0].path: entry})
            markers.keep(root, user_cache(), "verified", new)
        finished.add(files[0].content)

    # Largest first: the last to end is then a small one.
    order = sorted(groups.values(), key=lambda files: -files[0].bytes)
    pool = ThreadPoolExecutor(options.jobs)
    try:
        running = {pool.submit(one, files) for files in order}
        failed = None
        while running and failed is None:
            done, running = wait(running, timeout=0.25, return_when=FIRST_EXCEPTION)
            report()
            failed = next((error for future in done if (error := future.exception()) is not None), None)
        if failed is not None:
            raise failed
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        for worker in started:
            worker.close()


def obtain(
    root: Path,
    files: list[RemoteFile],
    job: dict[str, Any],
    options: Options,
    worker: Worker,
    stop: threading.Event,
    watch: Watch,
    xet_failed: threading.Event,
) -> Digest:
    """One content: transferred, checked by digest, put in the places of its files by rename (copies for the others)."""
    file = files[0]
    part = part_path(root, file)
    task = {**job, "path": file.path, "bytes": file.bytes, "part": str(part), "xet_hash": file.xet_hash}
    for attempt in range(1 + REFETCHES):
        use_xet = file.xet_hash and not attempt and not xet_failed.is_set()
        persist(
            worker,
            {**task, "transport": "xet" if use_xet else "http"},
            options.patience,
            stop,
            what=file.path,
            progress=lambda: part_size(part),
            say=watch.say,
            fell_back=xet_failed.set,
        )
        found = digest(part, git=file.sha256 is None, on_bytes=lambda count: stop_if(stop))
        if part_size(part) == file.bytes and file.is_content(found):
            break
        part.unlink(missing_ok=True)
        watch.say(f"{file.path} came with the wrong content; it is fetched again as a whole")
    else:
        raise CheckpointError(
            f"{file.path} came {1 + REFETCHES} times with content that was not published",
            needed=f"{file.bytes} bytes with {file.content}",
            remedy="something between here and the hub changes it: check proxy and HF_ENDPOINT",
        )
    try:
        for copy in files[1:]:
            place(root, copy, part, keep=True)
        place(root, file, part, keep=False)
    except OSError as error:
        raise EnvironmentRefused(
            f"{root / file.path}: {error.strerror}",
            needed="a writable directory with free space",
            remedy="free some space",
        ) from error
    return found


def stop_if(stop: threading.Event) -> None:
    """End a long piece of work when the fetch is over.

    Raises:
        Interrupted: it is.
    """
    if stop.is_set():
        raise Interrupted("the fetch was stopped")


def place(root: Path, file: RemoteFile, part: Path, *, keep: bool) -> None:
    """Move (or copy) a whole part file to its name, atomically."""
    path = root / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    if keep:
        copy = part.with_suffix(".copy")
        shutil.copyfile(part, copy)
        copy.rename(path)
    else:
        part.rename(path)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Nobody else fetches to the same place meanwhile.

    Raises:
        EnvironmentRefused: somebody does.
    """
    try:
        (root / STATE).mkdir(parents=True, exist_ok=True)
        handle = open(root / STATE / "lock", "ab")
    except OSError:  # read-only: nobody fetches to it, and a complete one only needs to be checked
        yield
        return
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentRefused(
                f"another `sol fetch` is writing to {root}", remedy="wait for its end, then type the command again"
            ) from None
        except OSError:  # a network file system without locks
            pass
        yield
