"""Compiler, Docker, caches, kind of machine, and the collective smoke."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from config.lock import load_target
from engine.doctor import Severity, collective, host, toolchain
from engine.doctor import run as doctor
from engine.doctor.check import Check

CPU, ONE, FOUR = load_target("cpu"), load_target("rtx4090"), load_target("h100x4")


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_field_report_34_a_compiler_is_used_not_only_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert toolchain.compiler().severity is Severity.OK
    program(tmp_path, "gcc", "echo 'fatal error: stdint.h: No such file' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    check = toolchain.compiler()
    assert check.severity is Severity.ERROR
    assert "stdint.h" in check.found
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert toolchain.compiler().found == "none on PATH"


def test_field_report_34_no_nvcc_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert toolchain.cuda_home().severity is Severity.WARNING
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    assert toolchain.cuda_home().severity is Severity.OK


@pytest.mark.parametrize(
    ("info", "good"),
    [
        ({"Runtimes": {"runc": {}, "nvidia": {}}}, True),
        ({"Runtimes": {"runc": {}}, "DiscoveredDevices": [{"ID": "nvidia.com/gpu=all"}]}, True),
        ({"Runtimes": {"runc": {}}}, False),
        ({"ServerErrors": ["permission denied"]}, False),
        (None, False),
    ],
)
def test_field_report_1_docker_without_the_nvidia_runtime_is_named_with_three_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, info: object, good: bool
) -> None:
    program(tmp_path, "docker", f"echo '{json.dumps(info)}'" if info else "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (check,) = toolchain.docker()
    assert check.severity is (Severity.OK if good else Severity.WARNING)
    if info and "Runtimes" in str(info) and not good:
        assert len(check.fix) == 3


def test_field_report_1_docker_as_a_snap_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "snap").mkdir()
    program(tmp_path / "snap", "docker", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "snap"))
    (check,) = toolchain.docker()
    assert "snap" in check.found


def test_field_reports_18_and_19_caches_must_be_writable_local_and_lasting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not list(host.compile_caches(CPU))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/triton")
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"):
        monkeypatch.setenv(variable, str(tmp_path))
    checks = {check.name: check for check in host.compile_caches(ONE)}
    assert checks["TRITON_CACHE_DIR"].severity is Severity.ERROR
    assert checks["CUDA_CACHE_PATH"].severity is Severity.OK
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(host, "MOUNTS", mounts)
    for kind, good in (("ext4", True), ("nfs4", False), ("tmpfs", False), ("overlay", False)):
        mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n")
        check = {check.name: check for check in host.compile_caches(ONE)}["compile caches"]
        assert (check.severity is Severity.OK) == good, kind


def test_field_report_28_root_writing_into_a_users_directory_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.os, "geteuid", lambda: 0)
    (tmp_path / "runs").mkdir()
    if os.getuid() == 0:
        os.chown(tmp_path / "runs", 1000, 1000)
        check = host.user(tmp_path / "runs")
        assert check.severity is Severity.WARNING
        assert "--user" in check.remedy
    monkeypatch.setattr(host.os, "geteuid", lambda: 1000)
    assert host.user(tmp_path / "runs").severity is Severity.OK


def test_field_report_15_wsl_is_a_warning_on_a_gpu_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "KERNEL_VERSION", tmp_path / "version")
    (tmp_path / "version").write_text("Linux version 5.15.153.1-microsoft-standard-WSL2")
    assert host.machine(ONE).severity is Severity.WARNING
    assert host.machine(CPU).severity is Severity.OK


def test_field_reports_6_and_7_an_all_reduce_over_real_processes() -> None:
    good, found = collective.all_reduce(2, "gloo", dict(os.environ), 60)
    assert good, found
    assert not list(collective.check_collective(ONE))


def test_field_reports_6_and_7_a_hanging_all_reduce_ends_at_its_limit(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    good, found = collective.all_reduce(2, "gloo", environment, 1.0)
    assert not good
    assert "rank 0, 1 did not come back in 1 s" in found
    assert time.monotonic() - began < 10


def test_field_report_7_a_failing_all_reduce_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def fail(world: int, backend: str, environment: dict[str, str], limit: float) -> tuple[bool, str]:
        seen.update(world=world, backend=backend, nvls=environment["NCCL_NVLS_ENABLE"], limit=limit)
        return False, "unhandled system error"

    monkeypatch.setattr(collective, "all_reduce", fail)
    (check,) = collective.check_collective(FOUR)
    assert seen == {"world": 4, "backend": "nccl", "nvls": "0", "limit": 60.0}
    assert check.severity is Severity.ERROR
    assert "NCCL_NVLS_ENABLE=0" in check.remedy and "NCCL_P2P_DISABLE=1" in check.remedy


def test_all_checks_of_the_cpu_target_have_names_of_their_own(tmp_path: Path) -> None:
    checks: list[Check] = doctor.examine(CPU, tmp_path)
    assert len({check.name for check in checks}) == len(checks) > 15
    assert all(check.remedy for check in checks if check.severity is not Severity.OK)
