"""Fetch against a real server with the hub's protocol: right bytes in the end, or one clear error; nothing twice."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from config.checkpoint import ManifestEntry
from config.errors import CheckpointError, EnvironmentRefused, Exit, SolError, UsageError
from config.schema import Checkpoint
from engine.checkpoint import access, published
from engine.checkpoint import fetch as fetching
from engine.checkpoint import marker as markers
from engine.checkpoint.fetch import Options, Silent, fetch
from engine.checkpoint.published import verify_published
from engine.checkpoint.transfer import Patience
from tests.engine.checkpoint.hub import REPO, REVISION, Fault, Hub, serving

CHECKPOINT = Checkpoint(kind="hub", repo=REPO, revision=REVISION)
RANDOM = random.Random(4)
BIG, INDEX, CODE, TWIN = (
    "FL2VA/dit/model.safetensors",
    "FL2VA/model_index.json",
    "FL2VA/dit/code.py",
    "FL2VA/b/twin.json",
)
FILES = {
    INDEX: b'{"_class_name": "H3"}',
    BIG: RANDOM.randbytes(300_000),
    "FL2VA/vae/model.safetensors": RANDOM.randbytes(70_001),
    CODE: b"print('not in the list')\n",
    TWIN: b'{"_class_name": "H3"}',
}
SMALL = (INDEX, CODE, TWIN)
QUICK = Patience(stall_seconds=2.5, stall_bytes=2000, attempts=3, first_wait=0.05, longest_wait=2.0)


class Told(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.done: list[tuple[str, int, int]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, what: str, done: int, total: int) -> None:
        self.done.append((what, done, total))


def entries(hub: Hub) -> tuple[ManifestEntry, ...]:
    return tuple(
        ManifestEntry(path=path, bytes=len(data), sha256=hub.sha256(path))
        for path, data in hub.files.items()
        if path != CODE
    )


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HF_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("SOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("SOL_ACCEPT_LICENCE", "yes")
    with serving(Hub(dict(FILES), small=SMALL)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "weights" / "MiniMax-H3"


def get(hub: Hub, root: Path, told: Told | None = None, **changes: object) -> published.Verified:
    options = replace(Options(entries=entries(hub), patience=QUICK, jobs=1), **changes)  # type: ignore[arg-type]
    return fetch(CHECKPOINT, root, options, told or Told())


def assert_right(root: Path, files: dict[str, bytes] = FILES) -> None:
    found = {
        path.relative_to(root).as_posix(): path.read_bytes() for path in (root / "FL2VA").rglob("*") if path.is_file()
    }
    assert found == files


def test_everything_arrives_once_and_a_second_fetch_asks_nothing(hub: Hub, root: Path) -> None:
    told = Told()
    verified = get(hub, root, told, jobs=2)
    assert_right(root)
    assert [file.path for file in verified.found.files] == sorted(FILES)
    assert verified.fetched == sum(map(len, FILES.values()))
    assert verified.hashed == len(FILES[TWIN]), "what was hashed while it came is not hashed again; a copy is"
    assert told.done[-1][0] == "hashing" or told.done[-1][1] == told.done[-1][2]
    assert [asked.path for asked in hub.asked[:2]] == [INDEX, "listing"], "field report 10: one small file first"
    assert hub.asked[0].method == "HEAD"
    before = len(hub.asked)
    again = get(hub, root)
    assert len(hub.asked) == before
    assert (again.fetched, again.hashed) == (0, 0)
    assert again.found == verified.found


def test_the_token_stays_with_the_hub_and_the_storage_host_never_sees_it(
    hub: Hub, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    (tmp_path / "token").write_text("hf_secret\n")
    monkeypatch.setenv("HF_TOKEN_FILE", str(tmp_path / "token"))
    get(hub, root)
    assert_right(root)
    assert {asked.authorization for asked in hub.asked if asked.server == "storage"} == {None}
    assert {asked.authorization for asked in hub.asked if asked.server == "hub"} == {"Bearer hf_secret"}


@pytest.mark.parametrize("cut", [0, 1, 17, 65_536, 150_000, 299_999])
def test_a_transfer_cut_at_any_byte_goes_on_there(hub: Hub, root: Path, cut: int) -> None:
    hub.faults[BIG] = [Fault("cut", cut)]
    get(hub, root)
    assert_right(root)
    assert [asked.start for asked in hub.gets(BIG)] == [0, cut]


def test_cut_again_and_again(hub: Hub, root: Path) -> None:
    hub.faults[BIG] = [Fault("cut", 50_000) for _ in range(5)]
    get(hub, root)
    assert_right(root)
    assert [asked.start for asked in hub.gets(BIG)] == [0, 50_000, 100_000, 150_000, 200_000, 250_000]


def test_field_report_9_wrong_content_of_the_right_size_is_fetched_again_alone(hub: Hub, root: Path) -> None:
    hub.faults[BIG] = [Fault("corrupt", 1000)]
    told = Told()
    get(hub, root, told)
    assert_right(root)
    assert [asked.start for asked in hub.gets(BIG)] == [0, 0]
    assert all(len(hub.gets(path)) == 1 for path in FILES if path not in (BIG, INDEX, TWIN))
    assert any("wrong content" in line and BIG in line for line in told.lines)


def test_wrong_content_for_ever_is_one_clear_error_and_no_file(hub: Hub, root: Path) -> None:
    hub.always[BIG] = Fault("corrupt", 0)
    with pytest.raises(CheckpointError, match="content that was not published") as caught:
        get(hub, root)
    assert BIG in str(caught.value)
    assert not (root / BIG).exists()
    assert caught.value.exit_code is Exit.CHECKPOINT


@pytest.mark.parametrize("fault", [Fault("long"), Fault("wrong range"), Fault("ignore range"), Fault("short", 40_000)])
def test_wrong_sizes_and_ranges_end_in_the_right_bytes(hub: Hub, root: Path, fault: Fault) -> None:
    hub.faults[BIG] = [Fault("cut", 20_000), fault]
    get(hub, root)
    assert_right(root)


def test_a_part_longer_than_the_file_begins_anew(hub: Hub, root: Path) -> None:
    part = root / ".sol-fetch/parts" / f"{hub.sha256(BIG)}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 400_000)
    get(hub, root)
    assert_right(root)


def test_a_part_with_a_wrong_prefix_is_noticed_by_digest(hub: Hub, root: Path) -> None:
    part = root / ".sol-fetch/parts" / f"{hub.sha256(BIG)}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 100_000)
    get(hub, root)
    assert_right(root)
    assert [asked.start for asked in hub.gets(BIG)] == [100_000, 0]


def test_416_begins_anew(hub: Hub, root: Path) -> None:
    hub.faults[BIG] = [Fault("cut", 10_000), Fault("status", 416)]
    get(hub, root)
    assert_right(root)
    assert [asked.start for asked in hub.gets(BIG)] == [0, 10_000, 0]


def test_429_waits_as_long_as_the_server_asks(hub: Hub, root: Path) -> None:
    hub.faults[BIG] = [Fault("status", 429, {"Retry-After": "1"})]
    told = Told()
    began = time.monotonic()
    get(hub, root, told)
    assert time.monotonic() - began >= 1
    assert_right(root)
    assert any("HTTP 429; attempt 2 of 3 in 1 s" in line for line in told.lines)


@pytest.mark.parametrize("status", [500, 502, 503, 504, 408])
def test_server_errors_are_tried_again(hub: Hub, root: Path, status: int) -> None:
    hub.faults[BIG] = [Fault("status", status)] * 2
    get(hub, root)
    assert_right(root)


@pytest.mark.parametrize("place", [BIG, "listing", f"HEAD {INDEX}"])
def test_server_errors_without_end_are_one_error(hub: Hub, root: Path, place: str) -> None:
    hub.always[place] = Fault("status", 503)
    with pytest.raises(CheckpointError, match="3 attempts in a row did not get on, the last one: HTTP 503"):
        get(hub, root)
    assert not (root / BIG).exists()


@pytest.mark.parametrize("status", [401, 403])
def test_field_report_10_a_refusal_names_its_three_causes_at_once(hub: Hub, root: Path, status: int) -> None:
    hub.always[f"HEAD {INDEX}"] = Fault("status", status, {"X-Error-Code": "GatedRepo"})
    with pytest.raises(CheckpointError, match=f"HTTP {status}; no token was sent") as caught:
        get(hub, root)
    for cause in ("licence is not accepted", "HF_TOKEN_FILE", "id is wrong"):
        assert cause in caught.value.remedy
    assert len(hub.asked) == 1


def test_a_missing_repository_is_told_at_once(hub: Hub, root: Path) -> None:
    hub.always[f"HEAD {INDEX}"] = Fault("status", 404, {"X-Error-Code": "RepoNotFound"})
    with pytest.raises(CheckpointError, match="HTTP 404"):
        get(hub, root)


def test_another_revision_than_the_pinned_one_is_refused(hub: Hub, root: Path) -> None:
    hub.revision = "c" * 40
    with pytest.raises(CheckpointError, match="instead of " + REVISION):
        get(hub, root)


@pytest.mark.parametrize("kind", ["hang", "trickle"])
def test_a_transfer_that_hangs_or_trickles_is_ended_and_resumed(hub: Hub, root: Path, kind: str) -> None:
    hub.faults[BIG] = [Fault("cut", 30_000), Fault(kind)]
    told = Told()
    get(hub, root, told)
    assert_right(root)
    assert any("too few bytes came in 2.5 s" in line for line in told.lines)
    assert hub.gets(BIG)[2].start >= 30_000


def test_a_hanging_listing_ends(hub: Hub, root: Path) -> None:
    hub.always["listing"] = Fault("hang")
    with pytest.raises(CheckpointError, match="did not get on"):
        get(hub, root, patience=replace(QUICK, stall_seconds=0.7, attempts=2))


def test_a_server_that_is_gone_is_one_error(hub: Hub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="did not get on") as caught:
        get(hub, root)
    assert "http://127.0.0.1:9" in caught.value.needed


@pytest.mark.parametrize("xet", ["hang", "refuse", "http://127.0.0.1:9"])
def test_field_report_8_when_xet_fails_plain_http_takes_over(
    root: Path, hub: Hub, xet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.xet = xet
    told = Told()
    get(hub, root, told)
    assert_right(root)
    assert len([line for line in told.lines if "Xet failed" in line]) == 1, "the next file does not try it again"
    assert any(asked.path == "xet" for asked in hub.asked)


def test_over_xet_everything_arrives_and_the_storage_host_is_not_asked(hub: Hub, root: Path) -> None:
    hub.xet = "serve"
    told = Told()
    get(hub, root, told)
    assert_right(root)
    assert told.lines == []
    assert not hub.gets(BIG)
    assert [asked.start for asked in hub.asked if asked.path == f"xet {BIG}"] == [0]


@pytest.mark.parametrize("there", [1, 39_999, 40_000, 150_001, 299_999])
def test_over_xet_it_goes_on_at_the_byte(hub: Hub, root: Path, there: int) -> None:
    hub.xet = "serve"
    part = root / ".sol-fetch/parts" / f"{hub.sha256(BIG)}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(FILES[BIG][:there])
    verified = get(hub, root)
    assert_right(root)
    assert [asked.start for asked in hub.asked if asked.path == f"xet {BIG}"] == [there]
    assert verified.fetched == sum(map(len, FILES.values())) - there


def test_field_report_8_a_xet_transfer_that_stalls_midway_is_ended_and_http_goes_on(hub: Hub, root: Path) -> None:
    hub.xet = "serve"
    hub.always[f"xorb {BIG}"] = Fault("hang", 130_000)
    told = Told()
    get(hub, root, told)
    assert_right(root)
    assert any("Xet failed" in line and "in 2.5 s" in line for line in told.lines)
    assert len(hub.gets(BIG)) == 1


def test_field_report_9_wrong_content_over_xet_is_fetched_again_over_http(hub: Hub, root: Path) -> None:
    hub.xet = "serve"
    hub.always[f"xorb {BIG}"] = Fault("corrupt")
    told = Told()
    get(hub, root, told)
    assert_right(root)
    assert any("wrong content" in line for line in told.lines)
    assert [asked.start for asked in hub.gets(BIG)] == [0]


def test_xet_can_be_switched_off(root: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.xet = "hang"
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    get(hub, root)
    assert_right(root)
    assert not any(asked.path == "xet" for asked in hub.asked)


def test_field_report_11_too_little_disk_refuses_before_the_first_byte(
    hub: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = sum(map(len, FILES.values()))
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: usage._replace(free=int(missing * 1.049)))
    with pytest.raises(EnvironmentRefused, match="GB free"):
        get(hub, root)
    assert not hub.gets(BIG)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: usage._replace(free=int(missing * 1.051)))
    get(hub, root)
    assert_right(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_that_fills_while_fetching_is_one_error_and_nothing_is_lost(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine mounts no file system")
    try:
        usage = shutil.disk_usage("/")
        monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(EnvironmentRefused, match="No space left") as caught:
            get(hub, disk / "MiniMax-H3")
        assert "--dest" in caught.value.remedy
        assert not (disk / "MiniMax-H3" / BIG).exists()
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        get(hub, disk / "MiniMax-H3")
        assert_right(disk / "MiniMax-H3")
        starts = [asked.start for asked in hub.gets(BIG)]
        assert len(starts) > 1 and starts[-1] > 0, "went on where the disk was full"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_killed_at_random_moments_it_goes_on_at_the_byte(hub: Hub, root: Path, tmp_path: Path) -> None:
    (tmp_path / "list.tsv").write_text(
        "path\tbytes\tsha256\n" + "".join(f"{e.path}\t{e.bytes}\t{e.sha256}\n" for e in entries(hub))
    )
    script = (
        "import sys; from pathlib import Path; from config.checkpoint import parse\n"
        "from config.schema import Checkpoint\n"
        "from engine.checkpoint.fetch import Options, Silent, fetch\n"
        f"fetch(Checkpoint(kind='hub', repo={REPO!r}, revision={REVISION!r}), Path(sys.argv[1]),"
        " Options(jobs=2, entries=parse(Path(sys.argv[2]).read_text())), Silent())\n"
    )
    command = [sys.executable, "-c", script, str(root), str(tmp_path / "list.tsv")]
    hub.bytes_a_second = 150_000
    part = root / ".sol-fetch/parts" / f"{hub.sha256(BIG)}.part"
    sizes = [0]
    for _ in range(3):
        process = subprocess.Popen(command, start_new_session=True)
        wanted = sizes[-1] + RANDOM.randrange(10_000, 70_000)
        while process.poll() is None and not (part.exists() and part.stat().st_size >= wanted):
            time.sleep(0.01)
        assert process.poll() is None, "killed before its end"
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.3)  # the worker sees its parent's end and goes
        sizes.append(part.stat().st_size)
        assert not (root / BIG).exists()
    hub.bytes_a_second = 0
    assert subprocess.run(command).returncode == 0
    assert_right(root)
    assert [asked.start for asked in hub.gets(BIG)] == sizes
    assert len([asked for asked in hub.asked if asked.path == "listing"]) == 1


def test_interrupted_it_ends_at_once_with_130_and_keeps_what_arrived(hub: Hub, root: Path, tmp_path: Path) -> None:
    (tmp_path / "list.tsv").write_text(
        "path\tbytes\tsha256\n" + "".join(f"{e.path}\t{e.bytes}\t{e.sha256}\n" for e in entries(hub))
    )
    script = (
        "import sys; from pathlib import Path; from config.checkpoint import parse\n"
        "from config.errors import SolError; from config.schema import Checkpoint\n"
        "from engine.checkpoint.fetch import Options, Silent, fetch\n"
        "from entrypoints.benchmark import interrupts_raise\n"
        "try:\n  with interrupts_raise():\n"
        f"    fetch(Checkpoint(kind='hub', repo={REPO!r}, revision={REVISION!r}), Path(sys.argv[1]),"
        " Options(jobs=2, entries=parse(Path(sys.argv[2]).read_text())), Silent())\n"
        "except SolError as error: sys.exit(int(error.exit_code))\n"
    )
    hub.bytes_a_second = 100_000
    part = root / ".sol-fetch/parts" / f"{hub.sha256(BIG)}.part"
    process = subprocess.Popen([sys.executable, "-c", script, str(root), str(tmp_path / "list.tsv")])
    while not (part.exists() and part.stat().st_size > 10_000):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == Exit.INTERRUPTED
    size = part.stat().st_size
    hub.bytes_a_second = 0
    get(hub, root)
    assert_right(root)
    assert [asked.start for asked in hub.gets(BIG)] == [0, size]


def test_offline_mode_is_told_at_once(hub: Hub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        get(hub, root)
    assert not hub.asked


def test_a_file_that_rotted_on_disk_is_fetched_again_alone(hub: Hub, root: Path) -> None:
    get(hub, root)
    rotten = bytearray(FILES[BIG])
    rotten[5] ^= 1
    (root / BIG).write_bytes(rotten)
    before = len(hub.asked)
    with pytest.raises(CheckpointError, match="is not what was published"):
        verify_published(CHECKPOINT, root, entries=entries(hub))
    verified = get(hub, root)
    assert_right(root)
    assert verified.fetched == len(FILES[BIG])
    assert {asked.path for asked in hub.asked[before:]} == {BIG}


def test_rot_that_keeps_size_time_and_inode_is_found_by_rehash(hub: Hub, root: Path) -> None:
    get(hub, root)
    stat = (root / BIG).stat()
    with (root / BIG).open("r+b") as handle:
        handle.write(b"\0\1\2\3")
    os.utime(root / BIG, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    verify_published(CHECKPOINT, root, entries=entries(hub))
    with pytest.raises(CheckpointError, match="1 wrong"):
        verify_published(CHECKPOINT, root, entries=entries(hub), rehash=True)
    get(hub, root, rehash=True)
    assert_right(root)


def test_offline_a_verified_checkpoint_needs_no_network_and_no_hashing(
    hub: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = get(hub, root)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert get(hub, root).found == first.found
    verified = verify_published(CHECKPOINT, root, entries=entries(hub))
    assert (verified.found, verified.hashed, verified.notes) == (first.found, 0, ())


def test_copied_by_hand_it_is_hashed_and_what_no_list_names_makes_the_run_open(hub: Hub, root: Path) -> None:
    for path, data in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    verified = verify_published(CHECKPOINT, root, entries=entries(hub))
    assert len(verified.found.files) == len(FILES)
    assert len(verified.notes) == 1 and CODE in verified.notes[0]
    fetched = get(hub, root)
    assert (fetched.fetched, fetched.notes) == (0, ())
    oids = {path: entry.git_oid for path, entry in markers.read(root, root).files.items()}
    assert [path for path, oid in oids.items() if oid] == [CODE], "SHA-1 costs as much as SHA-256: only where needed"
    assert not hub.gets(BIG)
    assert verify_published(CHECKPOINT, root, entries=entries(hub)).notes == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting read-only needs root")
def test_a_complete_checkpoint_on_a_read_only_mount_is_verified_once(hub: Hub, root: Path) -> None:
    for path, data in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    bind = [["mount", "--bind", str(root), str(root)], ["mount", "-o", "remount,ro,bind", str(root)]]
    if any(subprocess.run(command, capture_output=True).returncode for command in bind):
        subprocess.run(["umount", str(root)], capture_output=True)
        pytest.skip("this machine mounts nothing read-only")
    try:
        assert get(hub, root).hashed == sum(map(len, FILES.values()))
        before = len(hub.asked)
        assert get(hub, root).hashed == 0
        assert len(hub.asked) == before
        assert not (root / ".sol-fetch").exists()
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_a_file_too_many_is_named(hub: Hub, root: Path) -> None:
    get(hub, root)
    (root / "FL2VA/dit/extra.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"extra\.safetensors does not belong"):
        verify_published(CHECKPOINT, root, entries=entries(hub))
    with pytest.raises(CheckpointError, match=r"extra\.safetensors does not belong"):
        get(hub, root)


def test_a_hub_that_contradicts_the_shipped_list_is_refused_before_the_first_byte(hub: Hub, root: Path) -> None:
    wrong = tuple(e.model_copy(update={"sha256": "0" * 64}) if e.path == BIG else e for e in entries(hub))
    with pytest.raises(CheckpointError, match="the hub says"):
        get(hub, root, entries=wrong)
    more = (*entries(hub), ManifestEntry(path="FL2VA/absent.bin", bytes=1, sha256=None))
    with pytest.raises(CheckpointError, match=r"lacks 1 of 5 listed files, first FL2VA/absent\.bin"):
        get(hub, root, entries=more)
    assert not hub.gets(BIG)


def test_a_listing_cannot_lead_outside_the_folder(hub: Hub, root: Path) -> None:
    hub.files["FL2VA/../../evil"] = b"x"
    with pytest.raises(CheckpointError, match="cannot be"):
        get(hub, root, entries=tuple(e for e in entries(hub) if "evil" not in e.path))


def test_two_at_once_are_refused(hub: Hub, root: Path) -> None:
    with fetching.locked(root), pytest.raises(EnvironmentRefused, match="another `sol fetch`"):
        get(hub, root)


def test_the_licence_is_asked_for_once_and_before_anything(
    hub: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOL_ACCEPT_LICENCE")
    with pytest.raises(CheckpointError, match="licence") as caught:
        get(hub, root)
    assert "--accept-licence" in caught.value.remedy and not hub.asked
    access.acknowledge(REPO)
    get(hub, root)
    assert_right(root)


def test_a_token_file_that_is_not_there_or_holds_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        access.token({"HF_TOKEN_FILE": str(tmp_path / "absent")})
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="does not hold one token"):
        access.token({"HF_TOKEN_FILE": str(tmp_path / "empty")})


def test_a_secret_is_taken_and_an_empty_one_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "hf_token"
    monkeypatch.setattr(access, "SECRET", secret)
    assert access.token({"HF_TOKEN": "hf_variable"}) == "hf_variable"
    secret.write_text("")
    assert access.token({"HF_TOKEN": "hf_variable"}) == "hf_variable"
    secret.write_text("hf_secret\n")
    assert access.token({"HF_TOKEN": "hf_variable"}) == "hf_secret"


def test_every_failure_is_one_of_ours(hub: Hub, root: Path) -> None:
    hub.always["listing"] = Fault("status", 418)
    with pytest.raises(SolError):
        get(hub, root)
