"""Host memory, shared memory and limits: what a run may take, on machines of files."""

from __future__ import annotations

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
