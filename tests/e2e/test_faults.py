"""Faults of the world: what the user sees, what the record says, and that the next run starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import SHORT, Sol, benchmark, events

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def the_record(out: Path) -> Path | None:
    return next((path for path in out.iterdir() if (path / "status").exists()), None) if out.is_dir() else None


def status(record: Path) -> str:
    return json.loads((record / "status").read_text())["state"]


def seen(out: Path, kind: str, source: str, number: int = 1) -> bool:
    record = the_record(out)
    if record is None or not (record / "arms/fullopt/events-rank0.jsonl").exists():
        return False
    return sum(event["source"] == source for event in events(record, "fullopt", kind)) >= number


NO_REVISION = {"GIT_DIR": os.devnull}
"""Resume asks for the same code: without this a commit made while the test runs would be refused."""

STAGES: dict[str, Callable[[Path], bool]] = {
    "imports": lambda out: any(out.glob("*/arms/fullopt")),
    "gated": lambda out: seen(out, "gate", "worker"),
    "load": lambda out: seen(out, "arm_start", "worker"),
    "text encoding": lambda out: seen(out, "request_start", "driver"),
    "denoising": lambda out: seen(out, "step", "worker"),
    "decoding": lambda out: seen(out, "request_end", "worker"),
    "measured": lambda out: seen(out, "request_start", "worker", 2),
}


def descendants(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """The arm's driver and SGLang's worker of a running `sol`."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        line = " ".join(child.cmdline())
        if "engine.h3.arm" in line:
            found["driver"] = child
        elif "spawn_main" in line or "sgl" in child.name().lower():
            found["worker"] = child
    return found


@pytest.fixture
def family() -> Iterator[list[psutil.Process]]:
    """Processes that must all be gone when the test ends."""
    processes: list[psutil.Process] = []
    yield processes
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == [], f"orphans: {[process.cmdline() for process in alive]}"


def killed(
    sol: Sol, out: Path, family: list[psutil.Process], stage: str, victim: str, number: signal.Signals
) -> tuple[subprocess.Popen[str], Path, str]:
    """A benchmark of one arm, of which a process got a signal at a stage: `sol` as it ended, the record, the output."""
    process = sol.start("benchmark", "cpu", "--arm", "fullopt", *SHORT, "--out", out, **NO_REVISION)
    deadline = time.monotonic() + 300
    while not STAGES[stage](out):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    members = descendants(process)
    family += psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid if victim == "parent" else members[victim].pid, number)
    output, _ = process.communicate(timeout=60)
    record = the_record(out)
    assert record is not None
    return process, record, output


@pytest.mark.parametrize(
    ("stage", "victim", "number"),
    [
        ("load", "parent", signal.SIGINT),
        ("load", "parent", signal.SIGKILL),
        ("load", "worker", signal.SIGKILL),
        ("text encoding", "parent", signal.SIGTERM),
        ("text encoding", "worker", signal.SIGKILL),
        ("denoising", "parent", signal.SIGINT),
        ("denoising", "parent", signal.SIGKILL),
        ("denoising", "worker", signal.SIGKILL),
        ("denoising", "driver", signal.SIGKILL),
        ("decoding", "parent", signal.SIGTERM),
        ("decoding", "worker", signal.SIGKILL),
        ("measured", "parent", signal.SIGINT),
    ],
)
def test_a_killed_run_is_closed_as_aborted_and_leaves_no_process(
    sol: Sol, tmp_path: Path, family: list[psutil.Process], stage: str, victim: str, number: signal.Signals
) -> None:
    process, record, output = killed(sol, tmp_path, family, stage, victim, number)
    if victim == "parent" and number is signal.SIGKILL:
        deadline = time.monotonic() + 20
        while status(record) != "aborted" and time.monotonic() < deadline:
            time.sleep(0.1)
    else:
        assert process.returncode == (130 if victim == "parent" else 1), output
        assert "Traceback" not in output
    assert status(record) == "aborted"
    finished = sol("verify", record)
    assert finished.code in (13, 14), finished.output
    assert "aborted" in finished.output
    if stage == "measured":
        assert benchmark(record)["arms"]["fullopt"]["warmup"]["sample"] == 0


@pytest.mark.parametrize(
    ("stage", "victim", "number"),
    [
        ("imports", "parent", signal.SIGINT),
        ("denoising", "parent", signal.SIGINT),
        ("gated", "parent", signal.SIGKILL),
        ("denoising", "driver", signal.SIGKILL),
    ],
)
def test_a_stopped_run_is_resumed_signed_and_sound(
    sol: Sol, tmp_path: Path, family: list[psutil.Process], stage: str, victim: str, number: signal.Signals
) -> None:
    """Whatever stopped a sparse arm in its warm-up: --resume completes the record that it left."""
    _, record, output = killed(sol, tmp_path, family, stage, victim, number)
    assert not (record / "attestation.json").exists()
    if number is signal.SIGINT:
        assert f"--resume {record}" in output and f"`sol sign {record}`" in output
    psutil.wait_procs(family, timeout=20)
    added = sol("benchmark", "cpu", "--arm", "fullopt", *SHORT, "--resume", record, **NO_REVISION)
    assert added.code == 0, added.output
    assert status(record) == "complete"
    found = sol("verify", record, "--json")
    assert found.code == 14, found.output
    assert json.loads(found.output)["verdict"] == "UNTRUSTED"


def test_two_runs_at_once_both_finish(sol: Sol, tmp_path: Path) -> None:
    runs = [sol.start("benchmark", "cpu", "--arm", "dense", *SHORT, "--out", tmp_path / name) for name in "ab"]
    for run in runs:
        output, _ = run.communicate(timeout=500)
        assert run.returncode == 0, output


def test_a_red_gate_ends_the_arm_without_timing_and_exits_12(sol: Sol, tmp_path: Path) -> None:
    finished = sol("benchmark", "cpu", "--arm", "fullopt", *SHORT, "--set", "gate.rel_l2=1e-9", "--out", tmp_path)
    assert finished.code == 12, finished.output
    record = finished.record(tmp_path)
    arm = benchmark(record)["arms"]["fullopt"]
    assert arm["outcome"] == "gate_failed"
    assert (arm["seconds"], arm["samples"], arm["warmup"]) == (None, [], None)
    assert status(record) == "complete"
    assert sol("verify", record, "--json").code in (1, 14)
    envelope = json.loads((record / "attestation.json").read_text())
    assert envelope["signatures"]


def test_resume_adds_samples_and_sign_closes(sol: Sol, tmp_path: Path) -> None:
    begun = sol("benchmark", "cpu", "--arm", "fullopt", *SHORT, "--no-sign", "--out", tmp_path, **NO_REVISION)
    assert begun.code == 0, begun.output
    record = begun.record(tmp_path)
    added = sol("benchmark", "cpu", "--arm", "fullopt", *SHORT, "--no-sign", "--resume", record, **NO_REVISION)
    assert added.code == 0, added.output
    found = benchmark(record)["arms"]["fullopt"]
    assert [sample["sample"] for sample in found["samples"]] == [1, 3]
    assert found["seconds"]["n"] == 2
    assert sol("sign", record).code == 0
    assert sol("verify", record).code == 14
    closed = sol("benchmark", "cpu", "--arm", "fullopt", *SHORT, "--resume", record)
    assert closed.code == 2
    assert "signed" in closed.output


def test_a_full_disk_is_one_message_and_loses_nothing_finished(sol: Sol, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    out = tmp_path / "small"
    out.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(out)]).returncode:
        pytest.skip("this container may not mount a tmpfs")
    try:
        process = sol.start("benchmark", "cpu", "--arm", "fullopt", *SHORT, "--out", out)
        while not list(out.glob("*/arms/fullopt/sample-0/timing.json")):  # the warm-up is finished, its request is not
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        with (out / "filler").open("wb") as filler, pytest.raises(OSError):
            while True:
                os.write(filler.fileno(), b"\0" * 4096)
        output, _ = process.communicate(timeout=200)
        assert process.returncode in (1, 10), output
        assert "Traceback" not in output
        record = the_record(out)
        assert record is not None
        assert status(record) == "aborted"
        assert (record / "arms/fullopt/sample-0/timing.json").stat().st_size > 0
    finally:
        subprocess.run(["umount", "-l", str(out)], check=True)


def test_a_missing_ffprobe_refuses_before_anything_is_loaded(sol: Sol, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("ffmpeg", "git"):
        if (path := shutil.which(name)) is not None:
            (tools / name).symlink_to(path)
    finished = sol("benchmark", "cpu", "--out", tmp_path / "runs", PATH=str(tools))
    assert finished.code == 10, finished.output
    assert "ffprobe" in finished.output and "apt-get install ffmpeg" in finished.output
    assert "Traceback" not in finished.output
    assert not (tmp_path / "runs").exists()


def test_an_unwritable_runs_directory_refuses(sol: Sol) -> None:
    finished = sol("benchmark", "cpu", "--out", "/proc/runs")
    assert finished.code == 10, finished.output
    assert "/proc" in finished.output and "--out" in finished.output
    assert "Traceback" not in finished.output


def test_a_truncated_checkpoint_file_is_named(sol: Sol, tmp_path: Path) -> None:
    cache = Path(sol.environment["SOL_CACHE"])
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    victim = next(copy.rglob("diffusion_pytorch_model.safetensors"))
    os.truncate(victim, victim.stat().st_size - 1)
    finished = sol("benchmark", "cpu", "--out", tmp_path / "runs", SOL_CACHE=str(copy))
    assert finished.code == 11, finished.output
    assert victim.name in finished.output and "sol synth" in finished.output
    assert "Traceback" not in finished.output


def test_an_influencing_variable_is_refused_by_name(sol: Sol, tmp_path: Path) -> None:
    finished = sol("benchmark", "cpu", "--out", tmp_path, SOL_ATTN_TAU="0.5")
    assert finished.code == 2, finished.output
    assert "SOL_ATTN_TAU" in finished.output
