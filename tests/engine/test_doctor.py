"""Each check finds its fault, and the refusal names found, needed and remedy."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from config.errors import EnvironmentRefused, Exit
from config.lock import load_target
from engine import environment
from engine.doctor import Severity, gpu, host, media, require_healthy, software
from engine.doctor.check import Check, judged

CPU = load_target("cpu")


def by_name(checks: object) -> dict[str, Check]:
    return {check.name: check for check in checks}  # type: ignore[attr-defined]


def test_a_missing_ffprobe_is_named_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "ffmpeg"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = by_name(media.check_media())
    assert found["ffmpeg"].severity is Severity.OK
    assert found["ffprobe"].severity is Severity.ERROR
    assert "apt-get install ffmpeg" in found["ffprobe"].remedy


def test_an_ffmpeg_without_libx264_is_found_by_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ffmpeg", "ffprobe"):
        fake = tmp_path / name
        fake.write_text("#!/bin/sh\necho \"Unknown encoder 'libx264'\" >&2\nexit 1\n")
        fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = by_name(media.check_media())["video encoder"]
    assert found.severity is Severity.ERROR
    assert "Unknown encoder" in found.found


def test_a_control_group_limits_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    limit.write_text(str(3 * 2**30))
    used.write_text(str(1 * 2**30))
    monkeypatch.setattr(host, "CGROUP_LIMIT", limit)
    monkeypatch.setattr(host, "CGROUP_USED", used)
    check = host.memory(CPU)
    assert check.severity is Severity.ERROR
    assert check.found == "2.0 GiB available"


def test_too_little_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOL_CACHE", str(tmp_path / "cache"))
    huge = CPU.model_copy(update={"hardware": CPU.hardware.model_copy(update={"disk_gib": 1e9})})
    assert by_name(host.disk(huge, tmp_path))["disk (cache)"].severity is Severity.ERROR
    assert by_name(host.disk(CPU, tmp_path))["disk (runs)"].severity is Severity.OK


def test_an_unwritable_directory_is_named(tmp_path: Path) -> None:
    check = host.writable("runs directory", Path("/proc/nowhere"), "pass --out DIR")
    assert check.severity is Severity.ERROR
    assert check.found.startswith("/proc")
    assert host.writable("runs directory", tmp_path / "made" / "later", "").severity is Severity.OK


def test_another_version_warns_and_an_absent_package_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = {"numpy": "0.0.1", "rich": environment.importlib.metadata.version("rich")}
    monkeypatch.setattr(environment, "locked_versions", lambda image: locked)
    monkeypatch.setattr(software, "locked_versions", lambda image: locked)
    found = by_name(software.packages(CPU))
    assert found["packages"].severity is Severity.OK
    assert found["package versions"].severity is Severity.WARNING
    assert "numpy" in found["package versions"].found
    locked["no-such-package"] = "1.0"
    assert by_name(software.packages(CPU))["packages"].severity is Severity.ERROR


def test_a_cuda_build_of_torch_is_refused_on_a_cpu_target(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert software.torch_build(CPU).severity is Severity.OK
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check = software.torch_build(CPU)
    assert check.severity is Severity.ERROR
    assert "CPU build" in check.remedy


def test_an_edited_sglang_source_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.sources(CPU).severity is Severity.OK
    pins = dict(environment.sglang_pins("cpu"))
    name = sorted(pins)[0]
    monkeypatch.setattr(software, "sglang_pins", lambda image: {**pins, name: "0" * 64})
    check = software.sources(CPU)
    assert check.severity is Severity.ERROR
    assert name in check.found


def test_field_report_1_no_gpu_is_said_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "visible_gpus", lambda: ((), ""))
    (check,) = gpu.check_gpus(load_target("rtx4090"))
    assert check.severity is Severity.ERROR
    assert "--gpus all" in check.remedy


def test_field_report_23_the_wrong_gpu_and_an_old_driver_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from config.record import Gpu

    l40s = Gpu(
        index=0,
        name="NVIDIA L40S",
        uuid_sha256="0" * 64,
        compute_capability="8.9",
        memory_mib=46068,
        power_limit_w=350.0,
        sm_clock_max_mhz=2520,
        ecc=True,
        mig=False,
    )
    monkeypatch.setattr(gpu, "visible_gpus", lambda: ((l40s,), "550.54.15"))
    found = by_name(gpu.check_gpus(load_target("rtx4090")))
    assert found["gpu"].severity is Severity.ERROR
    assert found["compute capability"].severity is Severity.OK
    assert found["driver"].severity is Severity.ERROR


def test_the_refusal_names_every_error_and_no_warning() -> None:
    checks = [
        judged("a", False, "1", "2", "do this"),
        judged("b", False, "3", "4", "do that", bad=Severity.WARNING),
        judged("c", True, "5", "5", "nothing"),
    ]
    with pytest.raises(EnvironmentRefused, match="a: 1") as caught:
        require_healthy(checks)
    assert caught.value.exit_code is Exit.ENVIRONMENT
    assert "b: 3" not in str(caught.value)
    require_healthy(checks[1:])
