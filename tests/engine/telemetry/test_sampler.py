"""The sampling process against machines that a stand-in NVML plays, and against this host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from config.telemetry import (
    POWER_CAP,
    SLOWDOWN,
    TELEMETRY,
    GpuLost,
    GpuSample,
    HostSample,
    TelemetryEnd,
    TelemetryStart,
    Xid,
)
from engine import cgroup
from engine.telemetry import Sampler
from engine.telemetry.host import belongs, members
from tests.engine.nvml.machine import H100, RTX4090, VARIABLE, Machine, library

Play = Callable[..., Machine]


@pytest.fixture
def arm() -> Iterator[subprocess.Popen[bytes]]:
    """Something in a session of its own that stands for an arm: it holds 60 MiB, 40 MiB of a file, and a core."""
    code = (
        "import mmap, tempfile\nfile = tempfile.TemporaryFile()\nfile.truncate(40 << 20)\n"
        "pages = mmap.mmap(file.fileno(), 0)\nsum(pages[::4096])\ndata = bytearray(60 << 20)\nwhile True: pass"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    def begin(*boards: dict[str, object], **values: object) -> Machine:
        machine = Machine(tmp_path / "machine", *boards, **values)  # type: ignore[arg-type]
        monkeypatch.setenv(VARIABLE, str(machine.path))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library().parent))
        return machine

    return begin


def lines(folder: Path, name: str) -> list[Any]:
    return [TELEMETRY.validate_json(line) for line in (folder / f"telemetry-{name}.jsonl").read_bytes().splitlines()]


def eventually(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def of(folder: Path, name: str, kind: type[Any]) -> list[Any]:
    path = folder / f"telemetry-{name}.jsonl"
    return [line for line in lines(folder, name) if isinstance(line, kind)] if path.exists() else []


def test_a_gpu_is_sampled_as_nvml_tells_it(tmp_path: Path, play: Play, arm: subprocess.Popen[bytes]) -> None:
    play({**RTX4090, "process": f"{arm.pid} 1000", "reasons": 4, "power": 431500, "energy": 5000}, RTX4090)
    before = time.monotonic()
    sampler = Sampler(tmp_path, arm.pid, 2, interval=0.2)
    eventually(lambda: len(of(tmp_path, "gpu0", GpuSample)) >= 3)
    sampler.stop()
    found = lines(tmp_path, "gpu0")
    start, sample, end = found[0], found[1], found[-1]
    assert isinstance(start, TelemetryStart) and isinstance(end, TelemetryEnd)
    assert (start.gpu, start.interval, start.xid_watched) == (0, 0.2, True)
    assert before < start.clock < time.monotonic()
    assert start.uuid_sha256 != of(tmp_path, "gpu1", TelemetryStart)[0].uuid_sha256
    assert (sample.memory_used_mib, sample.power_w, sample.energy_j, sample.temperature_c) == (300.0, 431.5, 5.0, 33)
    assert (sample.reasons, sample.sm_clock_mhz, sample.memory_clock_mhz) == (4, 210, 405)
    assert (sample.pcie_tx_mib_s, sample.pcie_rx_mib_s) == (0.0, 0.0)
    assert (sample.own_processes, sample.foreign_processes, sample.hidden_processes) == (1, 0, 0)
    assert end.samples == len(of(tmp_path, "gpu0", GpuSample))
    assert [line.t for line in found] == sorted(line.t for line in found)


def test_the_peak_between_two_samples_is_seen(tmp_path: Path, play: Play, arm: subprocess.Popen[bytes]) -> None:
    machine = play(RTX4090)
    sampler = Sampler(tmp_path, arm.pid, 1, interval=1.5)
    eventually(lambda: len(of(tmp_path, "gpu0", GpuSample)) == 1)
    machine.change(0, memory_used=20000 * 2**20)
    time.sleep(0.4)
    machine.change(0, memory_used=300 * 2**20)
    eventually(lambda: len(of(tmp_path, "gpu0", GpuSample)) == 2)
    sampler.stop()
    second = of(tmp_path, "gpu0", GpuSample)[1]
    assert (second.memory_used_mib, second.memory_peak_mib) == (300.0, 20000.0)


def test_the_peak_after_the_last_sample_is_seen_and_each_sample_begins_anew(
    tmp_path: Path, play: Play, arm: subprocess.Popen[bytes]
) -> None:
    machine = play({**RTX4090, "memory_used": 9000 * 2**20})
    sampler = Sampler(tmp_path, arm.pid, 1, interval=1.5)
    eventually(lambda: len(of(tmp_path, "gpu0", GpuSample)) == 1)
    machine.change(0, memory_used=300 * 2**20)
    eventually(lambda: len(of(tmp_path, "gpu0", GpuSample)) == 3)
    machine.change(0, memory_used=20000 * 2**20)
    time.sleep(0.4)
    machine.change(0, memory_used=300 * 2**20)
    time.sleep(0.2)
    sampler.stop()
    peaks = [sample.memory_peak_mib for sample in of(tmp_path, "gpu0", GpuSample)]
    assert peaks == [9000.0, 9000.0, 300.0, 20000.0]
    assert isinstance(lines(tmp_path, "gpu0")[-1], TelemetryEnd)


def test_foreign_and_hidden_processes_xid_and_loss_are_written_down(
    tmp_path: Path, play: Play, arm: subprocess.Popen[bytes]
) -> None:
    machine = play(H100, H100)
    sampler = Sampler(tmp_path, arm.pid, 2, interval=0.2)
    eventually(lambda: len(of(tmp_path, "gpu1", GpuSample)) >= 1)
    machine.change(0, process=f"{os.getpid()} 1000")
    machine.change(1, process=f"{2**22 - 1} 1000")
    eventually(lambda: of(tmp_path, "gpu0", GpuSample)[-1].foreign_processes == 1)
    eventually(lambda: of(tmp_path, "gpu1", GpuSample)[-1].hidden_processes == 1)
    machine.say("0.xid 79")
    eventually(lambda: [line.number for line in of(tmp_path, "gpu0", Xid)] == [79])
    machine.change(0, lost=1)
    eventually(lambda: bool(of(tmp_path, "gpu0", GpuLost)))
    count = len(of(tmp_path, "gpu1", GpuSample))
    eventually(lambda: len(of(tmp_path, "gpu1", GpuSample)) > count)
    sampler.stop()
    (lost,) = of(tmp_path, "gpu0", GpuLost)
    assert "lost" in lost.reason
    assert isinstance(lines(tmp_path, "gpu0")[-1], TelemetryEnd)


def test_a_worker_in_a_session_of_its_own_is_still_the_arms() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    inner = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    arm = subprocess.Popen([sys.executable, "-c", code, inner], start_new_session=True, stdout=subprocess.PIPE)
    assert arm.stdout is not None
    worker = int(arm.stdout.readline())
    try:
        assert worker not in members(arm.pid)
        assert belongs(worker, arm.pid) and belongs(arm.pid, arm.pid)
        assert not belongs(os.getpid(), arm.pid) and not belongs(2**22 - 1, arm.pid)
    finally:
        os.kill(worker, 9)
        arm.wait()


def test_without_nvml_the_file_says_so(tmp_path: Path, arm: subprocess.Popen[bytes]) -> None:
    sampler = Sampler(tmp_path, arm.pid, 1, interval=0.2)
    eventually(lambda: len(of(tmp_path, "host", HostSample)) >= 2)
    sampler.stop()
    start, lost, end = lines(tmp_path, "gpu0")
    assert (start.uuid_sha256, end.samples) == (None, 0)
    assert lost.reason.startswith("NVML:")


def test_the_host_is_sampled_on_any_machine(tmp_path: Path, arm: subprocess.Popen[bytes]) -> None:
    sampler = Sampler(tmp_path, arm.pid, 0, interval=0.3)
    eventually(lambda: len(of(tmp_path, "host", HostSample)) >= 4)
    sampler.stop()
    samples = of(tmp_path, "host", HostSample)
    assert not list(tmp_path.glob("telemetry-gpu*"))
    assert samples[-1].processes == 1
    assert 100 < samples[-1].rss_mib < 240
    assert 60 < samples[-1].anonymous_mib < samples[-1].rss_mib - 40
    assert 0.05 < max(sample.arm_cores for sample in samples) < 1.3
    assert all(sample.busy_cores >= 0 and sample.available_mib > 0 for sample in samples)
    assert lines(tmp_path, "host")[-1].oom_kills == 0


def test_a_second_process_of_the_arm_appends_after_a_torn_line(tmp_path: Path, arm: subprocess.Popen[bytes]) -> None:
    for _ in range(2):
        sampler = Sampler(tmp_path, arm.pid, 0, interval=0.2)
        eventually(lambda: (tmp_path / "telemetry-host.jsonl").exists())
        sampler.stop()
        with (tmp_path / "telemetry-host.jsonl").open("ab") as handle:
            handle.write(b'{"event": "host_sa')
    text = (tmp_path / "telemetry-host.jsonl").read_bytes()
    assert text.count(b"telemetry_start") == text.count(b"telemetry_end") == 2
    assert text.count(b'{"event": "host_sa') == 1


def test_the_sampler_of_a_killed_run_ends_by_itself(tmp_path: Path, arm: subprocess.Popen[bytes]) -> None:
    code = (
        "import sys, time; from pathlib import Path; from engine.telemetry import Sampler\n"
        f"print(Sampler(Path({str(tmp_path)!r}), {arm.pid}, 0).pid, flush=True); time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert run.stdout is not None
    sampler = int(run.stdout.readline())
    eventually(lambda: len(of(tmp_path, "host", HostSample)) >= 1)
    run.kill()
    run.wait()
    eventually(lambda: not Path(f"/proc/{sampler}").exists() or "Z" in Path(f"/proc/{sampler}/stat").read_text())
    assert isinstance(lines(tmp_path, "host")[-1], TelemetryEnd)


def test_field_report_14_oom_kills_are_counted_from_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    (tmp_path / "own").write_text("0::/job\n")
    assert cgroup.oom_kills() == 0
    (tmp_path / "memory.events").write_text("low 0\nhigh 3\nmax 12\noom 2\noom_kill 7\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job/memory.events").write_text("low 0\nhigh 0\nmax 4\noom 1\noom_kill 1\n")
    assert cgroup.oom_kills() == 1, "the innermost group that tells"


def test_what_a_real_h200_left_while_it_computed() -> None:
    """Recorded beside bf16 matrix products: the board sits at its power limit, which is no throttling."""
    path = Path(__file__).with_name("h200-gpu0.jsonl")
    start, *samples, end = [TELEMETRY.validate_json(line) for line in path.read_bytes().splitlines()]
    assert (start.xid_watched, end.samples) == (True, len(samples))
    busy = [sample for sample in samples if sample.power_w > 600]
    assert len(busy) >= 5
    assert all(sample.own_processes == 1 and not sample.foreign_processes for sample in busy)
    assert any(sample.reasons & POWER_CAP for sample in busy)
    assert not any(sample.reasons & SLOWDOWN for sample in samples)
    assert [sample.energy_j for sample in samples] == sorted(sample.energy_j for sample in samples)
