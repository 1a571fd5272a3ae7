"""Digests of large files on all cores; `python -m engine.checkpoint.hashing` measures their speed against sha256sum."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PIECE = 4 << 20


@dataclass(frozen=True)
class Digest:
    """What a file is: SHA-256, and git's object id of it as a blob (SHA-1 over `blob <size>`, a zero byte, content)."""

    sha256: str
    git_oid: str


def digest(path: Path, *, git: bool = True, on_bytes: Callable[[int], None] = lambda count: None) -> Digest:
    """Read a file once and digest it; `git=False` leaves `git_oid` empty and takes half the time.

    Raises:
        OSError: the file cannot be read.
    """
    sha256 = hashlib.sha256()
    with path.open("rb", buffering=0) as handle:
        blob = hashlib.sha1(b"blob %d\0" % os.fstat(handle.fileno()).st_size, usedforsecurity=False) if git else None
        buffer = bytearray(PIECE)
        view = memoryview(buffer)
        while count := handle.readinto(buffer):
            sha256.update(view[:count])
            if blob is not None:
                blob.update(view[:count])
            on_bytes(count)
    return Digest(sha256.hexdigest(), blob.hexdigest() if blob is not None else "")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def digests(
    paths: Iterable[Path],
    *,
    git: Container[Path] = (),
    threads: int = 0,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Iterator[Digest]:
    """Digest files side by side (OpenSSL works without the interpreter's lock), in the order given.

    `git` holds the paths whose git object id is wanted as well.

    Raises:
        OSError: a file cannot be read.
    """
    lock, over = threading.Lock(), threading.Event()

    def count(number: int) -> None:
        if over.is_set():
            raise InterruptedError("hashing was stopped")
        with lock:
            on_bytes(number)

    pool = ThreadPoolExecutor(threads or cores())
    try:
        yield from pool.map(lambda path: digest(path, git=path in git, on_bytes=count), paths)
    finally:  # whoever stops listening does not wait for gigabytes that are still to be read
        over.set()
        pool.shutdown(cancel_futures=True)


def measure(mib: int, folder: Path) -> str:
    """Hash one file a core, here and with as many `sha256sum` at once, and say how the rates compare."""
    count = cores()
    paths = [folder / f"{index}.bin" for index in range(count)]
    for path in paths:
        with path.open("wb") as handle:
            for _ in range(mib):
                handle.write(os.urandom(1 << 20))
    rates = {}
    for name, work in (("sha256sum", _with_sha256sum), ("sol", lambda paths: list(digests(paths)))):
        work(paths)  # the page cache is warm in both
        began = time.perf_counter()
        work(paths)
        rates[name] = count * mib / (time.perf_counter() - began)
    share = rates["sol"] / rates["sha256sum"]
    return (
        f"{count} cores, {count} files of {mib} MiB in the page cache: sol {rates['sol']:.0f} MiB/s, "
        f"{count} x sha256sum {rates['sha256sum']:.0f} MiB/s, ratio {share:.2f} (at least 0.80 is asked for)"
    )


def _with_sha256sum(paths: list[Path]) -> None:
    program = shutil.which("sha256sum")
    if program is None:
        raise SystemExit("sha256sum is not installed")
    processes = [subprocess.Popen([program, path], stdout=subprocess.DEVNULL) for path in paths]
    for process in processes:
        process.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 512, Path(place)))
