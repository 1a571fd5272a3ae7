"""Transfers that end at any byte, and processes that are killed at any moment: right bytes in the end, nothing wrong in
between, and no byte asked for that is there already."""

from __future__ import annotations

import fcntl
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.checkpoint import ManifestEntry
from engine.checkpoint.fetch import part_path
from engine.checkpoint.listing import RemoteFile
from engine.checkpoint.transfer import part_size
from engine.checkpoint.worker import Refused, transfer
from tests.engine.checkpoint.hub import REPO, REVISION, Fault, Hub, serving

SMALL = 257
LARGE = 200_000
PATHS = {"FL2VA/small.safetensors": SMALL, "FL2VA/large.safetensors": LARGE}
DATA = {path: random.Random(size).randbytes(size) for path, size in PATHS.items()}
INDEX = "FL2VA/model_index.json"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving(Hub({**DATA, INDEX: b"{}"}, small=(INDEX,))) as hub:
        yield hub


@pytest.fixture(autouse=True)
def fresh(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server.asked.clear()
    server.faults.clear()
    server.bytes_a_second = 0
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("SOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SOL_ACCEPT_LICENCE", "yes")
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)


def arrive(hub: Hub, path: str, part: Path, attempts: int) -> None:
    """The worker's own transfer in this process, as often as it is cut."""
    job = {"endpoint": hub.endpoint, "token": None, "repo": REPO, "revision": REVISION, "transport": "http"}
    job |= {"path": path, "bytes": PATHS[path], "part": str(part)}
    for _ in range(attempts):
        try:
            transfer(job)
            return
        except Exception as error:  # what the worker turns into a refusal
            assert not isinstance(error, Refused) or error.kind == "retry", error
    raise AssertionError("it did not arrive")


def assert_nothing_twice(hub: Hub, path: str, there: int) -> None:
    """Every request begins where the bytes of the one before ended, so no byte was sent twice."""
    asked, deadline = hub.gets(path), time.monotonic() + 10
    while asked[-1].start + asked[-1].sent < PATHS[path] and time.monotonic() < deadline:
        time.sleep(0.001)  # the server's thread counts after the client has its bytes
    begun = [there, *(one.start + one.sent for one in asked)]
    assert [one.start for one in asked] == begun[:-1]
    assert begun[-1] == PATHS[path]
    assert sum(one.sent for one in asked) == PATHS[path] - there


@pytest.mark.parametrize("cut", range(SMALL))
def test_a_transfer_cut_at_each_byte_of_a_file_goes_on_there(server: Hub, tmp_path: Path, cut: int) -> None:
    (path, _) = PATHS
    server.faults[path] = [Fault("cut", cut)]
    arrive(server, path, tmp_path / "part", 2)
    assert (tmp_path / "part").read_bytes() == DATA[path]
    assert_nothing_twice(server, path, 0)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(sorted(PATHS)), there=st.floats(0, 1), cuts=st.lists(st.integers(0, LARGE), max_size=6))
def test_cut_at_any_bytes_any_number_of_times(
    server: Hub, tmp_path: Path, path: str, there: float, cuts: list[int]
) -> None:
    """Some bytes are there already, and each further transfer ends after any number of bytes."""
    server.asked.clear()
    server.faults[path] = [Fault("cut", cut) for cut in cuts]
    part, first = tmp_path / "part", int(there * PATHS[path])
    part.write_bytes(DATA[path][:first])
    arrive(server, path, part, len(cuts) + 1)
    assert part.read_bytes() == DATA[path]
    assert_nothing_twice(server, path, first) if first < PATHS[path] else None
    assert first < PATHS[path] or not server.asked, "what is complete is not asked for"


SCRIPT = """
import sys
from pathlib import Path
from config.checkpoint import parse
from config.schema import Checkpoint
from engine.checkpoint.fetch import Options, Silent, fetch
from engine.checkpoint.transfer import Patience
checkpoint = Checkpoint(kind="hub", repo=sys.argv[3], revision=sys.argv[4])
patience = Patience(stall_seconds=20, stall_bytes=1, attempts=4, first_wait=0.05)
options = Options(jobs=2, entries=parse(Path(sys.argv[2]).read_text()), patience=patience)
fetch(checkpoint, Path(sys.argv[1]), options, Silent())
"""


def start(hub: Hub, root: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    """A fetch in a process of its own."""
    entries = [ManifestEntry(path=path, bytes=len(data), sha256=hub.sha256(path)) for path, data in hub.files.items()]
    rows = "".join(f"{entry.path}\t{entry.bytes}\t{entry.sha256}\n" for entry in entries)
    (tmp_path / "list.tsv").write_text("path\tbytes\tsha256\n" + rows)
    command = [sys.executable, "-c", SCRIPT, str(root), str(tmp_path / "list.tsv"), REPO, REVISION]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)


def parts(hub: Hub, root: Path) -> dict[str, int]:
    """Bytes that are there of each large file, once no worker writes any more: it holds a lock on its part."""
    out = {}
    for path, data in DATA.items():
        file = RemoteFile(path=path, bytes=len(data), sha256=hub.sha256(path), git_oid=None, xet_hash=None)
        part = part_path(root, file)
        if part.exists():
            with part.open("rb") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX)
        out[path] = len(data) if (root / path).exists() else part_size(part)
    return out


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_it_is_never_wrong_and_asks_for_the_missing_bytes_only(
    server: Hub, tmp_path: Path, seed: int
) -> None:
    """SIGKILL within a second of the first request of each run: before the listing, amid bytes, while it hashes."""
    chance, root = random.Random(seed), tmp_path / "MiniMax-H3"
    server.bytes_a_second = 150_000
    expected = {**DATA, INDEX: b"{}"}
    sizes, killed, code = [dict.fromkeys(DATA, 0)], 0, None
    while code is None:
        before = len(server.asked)
        process = start(server, root, tmp_path)
        while process.poll() is None and len(server.asked) == before:
            time.sleep(0.005)
        if killed < 6:
            time.sleep(chance.uniform(0, 1.0))
            process.kill()
            killed += 1
        _, errors = process.communicate()
        code = 0 if process.returncode == 0 else None
        assert process.returncode in (0, -9), errors.decode()[-2000:]
        asked = server.asked[before:]
        time.sleep(0.2)  # the worker sees its parent's end and goes
        sizes.append(parts(server, root))
        for path in DATA:
            starts = [one.start for one in asked if one.path == path and one.method == "GET" and one.sent >= 0]
            assert starts in ([], [sizes[-2][path]]), (path, starts, sizes)
        for path in (root / "FL2VA").rglob("*"):
            assert path.is_dir() or path.read_bytes() == expected[path.relative_to(root).as_posix()], path
    assert sizes[-1] == PATHS
    assert {path: (root / path).read_bytes() for path in expected} == expected
    assert all(now[path] >= earlier[path] for earlier, now in pairwise(sizes) for path in DATA)
    assert killed > 1


def test_a_server_that_goes_away_amid_a_file_and_comes_back(server: Hub, tmp_path: Path) -> None:
    (_, path), root = PATHS, tmp_path / "MiniMax-H3"
    server.faults[path] = [Fault("cut", 70_000), Fault("drop"), Fault("drop")]
    assert start(server, root, tmp_path).wait(timeout=120) == 0
    assert (root / path).read_bytes() == DATA[path]
    assert [one.start for one in server.gets(path)] == [0, 70_000, 70_000, 70_000]
