"""Packages, sources, media, disk and places: each check finds its fault; the refusal names found, needed, remedy."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from config.checkpoint import of_partition
from config.errors import EnvironmentRefused, Exit
from config.lock import load_target
from engine import environment
from engine.doctor import Severity, host, media, require_healthy, software
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


def test_field_report_20_an_ffmpeg_without_libx264_is_found_by_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ffmpeg", "ffprobe"):
        fake = tmp_path / name
        fake.write_text("#!/bin/sh\necho \"Unknown encoder 'libx264'\" >&2\nexit 1\n")
        fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = by_name(media.check_media())["video encoder"]
    assert found.severity is Severity.ERROR
    assert "Unknown encoder" in found.found


def test_field_report_11_too_little_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOL_CACHE", str(tmp_path / "cache"))
    huge = CPU.model_copy(update={"hardware": CPU.hardware.model_copy(update={"disk_gib": 1e9})})
    assert by_name(host.disk(huge, tmp_path))["disk (cache)"].severity is Severity.ERROR
    assert by_name(host.disk(CPU, tmp_path))["disk (runs)"].severity is Severity.OK


def test_published_weights_that_are_all_there_need_no_more_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list's sum held the repository's licence too, which no fetch brings: 150 GiB were asked for a second time."""
    monkeypatch.setenv("SOL_CACHE", str(tmp_path))
    target = load_target("rtx4090")
    folder = host.checkpoint_folder(target.checkpoint)
    for entry in of_partition(target.checkpoint.partition):
        path = folder / entry.path.replace("*", "model")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(entry.bytes)  # sparse: it takes no disk
    assert host.missing_gib(target) == host.COMPLETE_GIB
    path.unlink()
    assert host.missing_gib(target) > host.COMPLETE_GIB


def test_field_report_18_an_unwritable_directory_is_named(tmp_path: Path) -> None:
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


def test_field_report_24_two_cuda_majors_beside_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, name: str) -> None:
            self.metadata = {"Name": name}

    names = ["nvidia-cublas-cu12", "nvidia_cudnn_cu12", "nvidia-cuda-runtime-cu12", "nvidia-ml-py", "torch"]
    monkeypatch.setattr(software.importlib.metadata, "distributions", lambda: [Fake(name) for name in names])
    target = load_target("h100x4")
    assert by_name(software.cuda_packages(target))["cuda packages"].severity is Severity.OK
    names.append("nvidia-cublas-cu13")
    check = by_name(software.cuda_packages(target))["cuda packages"]
    assert check.severity is Severity.ERROR
    assert "nvidia-cublas-cu13" in check.found and "CUDA 13" in check.remedy


def test_field_report_24_a_torch_that_does_not_load_is_named_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is the loader's own, of a wheel for CUDA 13 on a machine with CUDA 12."""
    fault = "libcudart.so.13: cannot open shared object file: No such file or directory"
    (tmp_path / "torch.py").write_text(f"raise OSError({fault!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    check = by_name(software.check_software(load_target("rtx4090")))["torch build"]
    assert (check.severity, check.found) == (Severity.ERROR, f"cannot be imported: {fault}")
    assert "image" in check.remedy


def test_field_reports_21_and_35_an_sglang_without_the_model_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert software.diffusion_part().severity is Severity.OK

    class Bare:
        version = "0.5.1"

        def locate_file(self, name: str) -> Path:
            return tmp_path / name

    monkeypatch.setattr(software.importlib.metadata, "distribution", lambda name: Bare())
    check = software.diffusion_part()
    assert check.severity is Severity.ERROR
    assert "0.5.1 without" in check.found


def test_disk_counts_what_a_fetch_has_brought_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOL_CACHE", str(tmp_path))
    target = load_target("rtx4090")
    assert host.missing_gib(target) == target.hardware.disk_gib
    folder = host.checkpoint_folder(target.checkpoint)
    (folder / "FL2VA").mkdir(parents=True)
    with (folder / "FL2VA/a.safetensors").open("wb") as handle:
        handle.truncate(100 * 2**30)
    assert host.missing_gib(target) == target.hardware.disk_gib - 100
    with (folder / "FL2VA/b.safetensors").open("wb") as handle:
        handle.truncate(60 * 2**30)
    assert host.missing_gib(target) == 0
    assert host.cache_directory(target).found == "the checkpoint is complete"


def test_weights_on_disk_need_room_beside_what_is_still_to_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """150 GiB are asked for while nothing is there, and 24 GiB beside them in the mode that leaves weights on disk."""
    monkeypatch.setenv("SOL_CACHE", str(tmp_path / "cache"))
    mapped = load_target("rtx4090", ["offload.mapped=true"])
    found = {check.name: check for check in host.disk(mapped, tmp_path)}
    assert (found["disk (cache)"].needed, found["disk (offload)"].needed) == ("150 GiB", "174 GiB")
    assert "disk (offload)" not in {check.name for check in host.disk(load_target("rtx4090"), tmp_path)}
    monkeypatch.setattr(host.os, "access", lambda path, mode: path != host.existing(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/")
    found = {check.name: check for check in host.disk(mapped, tmp_path)}
    assert found["disk (offload)"].needed == "24 GiB", "a read-only cache is complete: the file goes elsewhere"


def test_a_machine_that_cannot_mux_is_warned_of_where_tensors_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    names = ("ffmpeg", "ffprobe", "PyAV", "imageio-ffmpeg")
    found = by_name(media.check_media())
    assert [found[name].severity for name in names] == [Severity.ERROR] * 4
    warned = by_name(media.check_media(Severity.WARNING))
    assert [warned[name].severity for name in names] == [Severity.WARNING] * 4
    assert all("digests of the output tensors" in warned[name].remedy for name in names)
    require_healthy(list(warned.values()))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("No module named 'av'", "No module named 'av'"),
        ("/opt/av/lib/libavcodec.so.61: undefined symbol: x264", "libavcodec.so.61: undefined symbol: x264"),
        ("lib/a.so: no such file, see ./x/y and 24/1 fps", "a.so: no such file, see y and 1 fps"),
    ],
)
def test_what_the_media_checks_found_holds_no_path(text: str, left: str) -> None:
    assert media.without_folders(text) == left
