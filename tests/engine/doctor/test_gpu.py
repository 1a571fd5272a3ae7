"""GPUs as the real NVML binding tells of them, on machines that a compiled stand-in library plays."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from config.lock import load_target
from engine import nvml
from engine.doctor import Severity, gpu
from engine.doctor.check import Check
from engine.environment import visible_gpus
from tests.engine.nvml.machine import GIB, H100, RTX4090, VARIABLE, Machine, load

RECORDING = Path(__file__).parents[1] / "nvml/h200.json"
ONE, FOUR = load_target("rtx4090"), load_target("h100x4")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    monkeypatch.delenv(VARIABLE, raising=False)


def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *boards: dict[str, object], **values: object) -> Machine:
    machine = Machine(tmp_path / "machine", *boards, **values)  # type: ignore[arg-type]
    monkeypatch.setenv(VARIABLE, str(machine.path))
    return machine


def examined(target: object) -> dict[str, Check]:
    return {check.name: check for check in gpu.check_gpus(target)}  # type: ignore[arg-type]


def errors(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if check.severity is Severity.ERROR}


def warnings(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if check.severity is Severity.WARNING}


def test_a_free_rtx_4090_is_what_its_target_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, tmp_path, RTX4090)
    checks = examined(ONE)
    assert errors(checks) == warnings(checks) == set()
    assert checks["ecc"].found == "not on this model"
    assert "topology" not in checks


def test_four_h100_are_what_their_target_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, tmp_path, *[H100] * 4)
    checks = examined(FOUR)
    assert errors(checks) == warnings(checks) == set()
    assert checks["topology"].found.startswith("18 NVLinks a GPU; PCIe 0-1 NODE, 0-2 NODE")


def test_field_report_26_a_busy_gpu_among_four_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = play(monkeypatch, tmp_path, *[H100] * 4)
    machine.change(2, process=f"4711 {30 * GIB}", memory_used=30 * GIB)
    checks = examined(FOUR)
    assert errors(checks) == {"foreign processes", "free gpu memory"}
    assert checks["foreign processes"].found == "GPU 2: 1 process(es)"


def test_field_report_26_mig_is_refused_with_the_command_to_end_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play(monkeypatch, tmp_path, H100, {**H100, "mig": 1}, H100, H100)
    checks = examined(FOUR)
    assert errors(checks) == {"mig"}
    assert checks["mig"].fix == ("nvidia-smi -i 1 -mig 0",)


def test_a_lost_gpu_is_told_and_the_others_are_still_examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, tmp_path, H100, H100, H100, {**H100, "lost": 1})
    checks = examined(FOUR)
    assert errors(checks) == {"gpu 3", "gpu"}
    assert "GPU is lost" in checks["gpu 3"].found
    assert checks["gpu"].found.endswith(", lost")
    gpus, driver = visible_gpus()
    assert (len(gpus), driver) == (3, "570.133.20")


@pytest.mark.parametrize(
    ("driver", "good"),
    [("550.54.15", False), ("570.86.16", False), ("570.124.05", False), ("570.124.06", True), ("580.65.06", True)],
)
def test_field_report_3_the_driver_floor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str, good: bool
) -> None:
    play(monkeypatch, tmp_path, RTX4090, driver=driver)
    checks = examined(ONE)
    assert errors(checks) == (set() if good else {"driver"})
    assert (checks["driver"].found, checks["driver"].needed) == (driver, "570.124.06 or newer")
    assert good or "unsupported" in checks["driver"].remedy


def test_field_report_23_an_l40s_is_not_a_4090_and_three_are_not_four(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play(monkeypatch, tmp_path, {**RTX4090, "name": "NVIDIA L40S", "memory_total": 46068 * 2**20})
    assert errors(examined(ONE)) == {"gpu"}
    play(monkeypatch, tmp_path, *[H100] * 3)
    assert errors(examined(FOUR)) == {"gpu"}
    play(monkeypatch, tmp_path, *[{**H100, "capability": "8.0"}] * 4)
    assert errors(examined(FOUR)) == {"compute capability"}


def test_field_report_16_a_desktop_on_the_only_gpu_leaves_too_little(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = play(monkeypatch, tmp_path, RTX4090)
    machine.change(0, memory_used=(24564 - 23040) * 2**20)
    assert errors(examined(ONE)) == set()
    machine.change(0, memory_used=(24564 - 23039) * 2**20)
    checks = examined(ONE)
    assert errors(checks) == {"free gpu memory"}
    assert (checks["free gpu memory"].found, checks["free gpu memory"].needed) == ("23039 MiB", "23040 MiB")


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        ({"power_limit": 300000}, "power limit", "300 of 450 W"),
        ({"reasons": 0x40}, "throttling", "hardware thermal slowdown"),
        ({"reasons": 0x2}, "clocks", "application clocks"),
        ({"persistence": 0}, "persistence mode", "off on GPU 0"),
        ({"pcie_width": 8}, "pcie width", "x8 of x16"),
    ],
)
def test_field_report_25_what_makes_numbers_differ_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, object], name: str, text: str
) -> None:
    play(monkeypatch, tmp_path, {**RTX4090, **change})
    checks = examined(ONE)
    assert (errors(checks), warnings(checks)) == (set(), {name})
    assert text in checks[name].found
    assert checks[name].remedy


@pytest.mark.parametrize(
    ("change", "error", "warning"),
    [
        ({"ecc": 0}, set(), {"ecc"}),
        ({"ecc_uncorrected": 3}, {"memory errors"}, set()),
        ({"virtualisation": 2}, {"virtual gpu"}, set()),
        ({"virtualisation": 1}, set(), set()),
        ({"nvlinks": 0}, set(), {"topology"}),
    ],
)
def test_state_of_data_centre_boards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, object], error: set[str], warning: set[str]
) -> None:
    play(monkeypatch, tmp_path, {**H100, **change}, H100, H100, H100)
    checks = examined(FOUR)
    assert (errors(checks), warnings(checks)) == (error, warning)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        (None, "no /dev/nvidia* and no NVML"),
        ("kfd", "an AMD GPU"),
        ("dxg", "WSL"),
        ("nvidiactl", "not the driver's libraries"),
    ],
)
def test_field_report_1_why_no_gpu_is_visible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str | None, text: str
) -> None:
    monkeypatch.setattr(gpu, "DEVICES", tmp_path)
    if device:
        (tmp_path / device).touch()
    (check,) = gpu.check_gpus(ONE)
    assert check.severity is Severity.ERROR
    assert text in check.found
    if device is None:
        assert 'could not select device driver ""' in check.remedy
        assert len(check.fix) == 3


def test_a_driver_that_was_updated_under_the_kernel_asks_for_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play(monkeypatch, tmp_path, RTX4090, init=18)
    (check,) = gpu.check_gpus(ONE)
    assert "restart" in check.remedy


def play_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The stand-in says what the real library said; returns the recording."""
    recorded: dict[str, Any] = json.loads(RECORDING.read_text())
    (board,) = recorded["boards"]
    numbers = {
        "name": board["name"],
        "uuid": "GPU",
        "capability": board["capability"],
        "memory_total": board["memory_total"],
        "memory_used": board["memory_used"],
        "power_limit": int(board["power_limit"] * 1000),
        "power_default": int(board["power_default"] * 1000),
        "sm_clock_max": board["sm_clock_max"],
        "sm_clock": board["sm_clock"],
        "memory_clock_max": board["memory_clock_max"],
        "reasons": board["reasons"],
        "ecc": int(board["ecc"]),
        "ecc_uncorrected": board["ecc_uncorrected"],
        "mig": int(board["mig"]),
        "persistence": int(board["persistence"]),
        "virtualisation": 1,
        "pcie_width": board["pcie_width"],
        "pcie_width_max": board["pcie_width_max"],
        "pcie_generation_max": board["pcie_generation_max"],
    }
    play(monkeypatch, tmp_path, numbers, driver=recorded["driver"])
    return recorded


def test_an_h200_plays_back_as_it_was_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """tests/engine/nvml/h200.json is what the real library said; through the stand-in it must come out the same."""
    (board,) = play_h200(monkeypatch, tmp_path)["boards"]
    with nvml.session() as binding:
        (found,) = nvml.boards(binding)
    expected = {**board, "uuid": found.uuid, "processes": tuple(board["processes"])}
    assert dataclasses.asdict(found) == expected
    checks = examined(load_target("h200"))
    assert errors(checks) == warnings(checks) == set()


def test_the_page_shows_what_the_doctor_says_of_the_recorded_h200(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """docs/field-reports.md holds the doctor's output; it is what the recording gives through today's checks."""
    play_h200(monkeypatch, tmp_path)
    shown = "".join(
        f"    {check.name:<20}{check.severity:<4}{check.found}\n" for check in gpu.check_gpus(load_target("h200"))
    )
    assert shown in (Path(__file__).parents[3] / "docs/field-reports.md").read_text("utf-8"), shown
