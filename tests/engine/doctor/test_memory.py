"""Host memory, shared memory and limits: what a run may take, on machines of files."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from config.lock import load_target
from engine import cgroup
from engine.doctor import Severity, memory
from engine.doctor.memory import needed_gib

CPU, ONE, FOUR = load_target("cpu"), load_target("rtx4090"), load_target("h100x4")
GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups in a folder, none of them limited yet."""
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    return tmp_path


def group(folder: Path, limit: object, used: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")


def have(monkeypatch: pytest.MonkeyPatch, total_gib: float, available_gib: float) -> None:
    monkeypatch.setattr(memory, "memory_mib", lambda: (int(total_gib * 1024), int(available_gib * 1024)))


def test_a_control_group_limits_what_is_available(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 16, 12)
    group(machine, 3 * GIB, 1 * GIB)
    check = memory.memory(CPU)
    assert check.severity is Severity.ERROR
    assert check.found.startswith("2.0 GiB available")


def test_the_least_of_all_levels_counts(machine: Path) -> None:
    (machine / "own").write_text("0::/user.slice/job-7\n")
    group(machine / "user.slice", 50 * GIB)
    group(machine / "user.slice/job-7", "max")
    assert cgroup.cgroup_left_mib() == 50 * 1024
    group(machine / "user.slice/job-7", 9 * GIB, GIB)
    assert cgroup.cgroup_left_mib() == 8 * 1024


def test_control_groups_of_version_1(machine: Path) -> None:
    (machine / "own").write_text("5:memory:/docker/abc\n")
    folder = machine / "memory/docker/abc"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    (folder / "memory.usage_in_bytes").write_text("0")
    assert cgroup.cgroup_left_mib() is None
    (folder / "memory.limit_in_bytes").write_text(str(4 * GIB))
    assert cgroup.cgroup_left_mib() == 4096


def test_field_report_14_60_gb_do_not_hold_the_weights_of_the_4090_target(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, 62, 57)
    check = memory.memory(ONE)
    assert check.severity is Severity.ERROR
    assert (check.found, check.needed) == ("57.0 GiB available", "140 GiB")
    assert "killed while it loads" in check.remedy
    have(monkeypatch, 192, 180)
    assert memory.memory(ONE).severity is Severity.OK


def test_field_report_38_pinned_buffers_need_nearly_twice_as_much(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = load_target("rtx4090", ["offload.pin_cpu_memory=true"])
    assert needed_gib(pinned) == pytest.approx(266)
    have(monkeypatch, 192, 180)
    check = memory.memory(pinned)
    assert check.severity is Severity.ERROR
    assert "pinned buffers" in check.needed
    resident = load_target("h100x4", ["offload.pin_cpu_memory=true"])
    assert needed_gib(resident) == 500, "nothing is offloaded there, so nothing waits in pinned memory"


def test_field_report_14_a_host_of_64_gb_is_shown_the_mode_that_leaves_weights_on_disk(
    machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """66.3 GB of the published list are the DiT's; the remedy names the setting, and the setting is enough."""
    monkeypatch.setenv("SOL_CACHE", str(tmp_path / "absent"))
    have(monkeypatch, 62, 57)
    check = memory.memory(ONE)
    assert check.severity is Severity.ERROR
    assert "--set offload.mapped=true" in check.remedy and "DiT's 66.3 GB" in check.remedy
    assert "open and not comparable" in check.remedy and "not measured" in check.remedy
    assert check.fix == ("sol benchmark rtx4090 --set offload.mapped=true",)
    mapped = load_target("rtx4090", ["offload.mapped=true"])
    assert memory.memory(mapped).severity is Severity.OK
    assert [check.name for check in memory.check_memory(mapped)][:2] == ["host memory", "weights"]
    told = memory.weights_on_disk(mapped)
    assert told.severity is Severity.WARNING and "66.3 GB" in told.remedy
    have(monkeypatch, 32, 30)
    assert memory.memory(mapped).severity is Severity.ERROR
    assert "offload.mapped" not in memory.memory(ONE).remedy, "32 GB are too little for that as well"


def test_the_cost_of_weights_on_disk_is_told_from_the_disk_itself(
    machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """40 MB of weights, and the rate at which this disk gave them past the page cache."""
    monkeypatch.setenv("SOL_CACHE", str(tmp_path))
    folder = memory.checkpoint_folder(CPU.checkpoint) / "FL2VA/transformer"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(os.urandom(40_000_000))
    rate = memory.read_rate(CPU)
    if rate is None:
        pytest.skip("the file system of the temporary directory has no direct reads")
    assert 1e6 < rate < 1e12
    assert memory.dit_bytes(CPU) == 40_000_000
    assert "GB/s that this disk gives" in memory.cost(CPU)


def test_a_virtual_machine_that_can_grow_is_warned_not_refused(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 32, 30)
    group(machine, 256 * GIB)
    check = memory.memory(ONE)
    assert check.severity is Severity.WARNING
    assert "256.0 GiB" in check.found


def test_field_report_5_64_mb_of_shared_memory_are_refused_for_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = memory.shutil.disk_usage("/")
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage._replace(free=64 * 2**20))
    check = memory.shared_memory(FOUR)
    assert check.severity is Severity.ERROR
    assert "--shm-size 32g" in check.remedy
    assert memory.shared_memory(CPU).severity is Severity.OK


def test_field_report_15_a_memlock_limit_refuses_only_what_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (8 * 2**20, 8 * 2**20))
    assert memory.memlock(CPU).severity is Severity.OK
    assert memory.memlock(FOUR).severity is Severity.WARNING
    pinned = load_target("rtx4090", ["offload.pin_cpu_memory=true"])
    check = memory.memlock(pinned)
    assert (check.severity, check.found) == (Severity.ERROR, "8192 KiB")
    assert "--ulimit memlock=-1" in check.remedy
    monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert memory.memlock(pinned).severity is Severity.OK


def test_swap_is_read() -> None:
    assert memory.swap().severity in (Severity.OK, Severity.WARNING)
