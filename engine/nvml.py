"""NVML through nvidia-ml-py, in the few forms that doctor, environment and telemetry need. Nothing here needs root."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NVLINKS = 18
"""NVLink ports of one board, at most (Hopper)."""
VIRTUALISATION = {0: "none", 1: "passthrough", 2: "vgpu", 3: "host-vgpu", 4: "host-vsga"}
ANCESTORS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""How two boards are connected over PCIe, in the words of `nvidia-smi topo -m`."""
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock",
}
"""Bits of NVML's clocks event reasons (nvml.h, nvmlClocksEventReason*)."""


class NvmlAbsent(Exception):
    """NVML cannot be used: `library`, `driver`, `mismatch` or `other`, and NVML's own words."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text
        super().__init__(text)


@dataclass(frozen=True)
class Board:
    """One GPU as it is now. None where the board or its virtual machine does not tell.

    Powers in W, clocks in MHz, memory in bytes; `processes` holds (pid, bytes or None) of every compute process.
    """

    index: int
    lost: str = ""
    name: str = ""
    uuid: str = ""
    capability: str = ""
    memory_total: int = 0
    memory_used: int = 0
    power_limit: float | None = None
    power_default: float | None = None
    sm_clock_max: int | None = None
    memory_clock_max: int | None = None
    sm_clock: int | None = None
    reasons: int | None = None
    ecc: bool | None = None
    ecc_uncorrected: int | None = None
    mig: bool | None = None
    persistence: bool | None = None
    virtualisation: str | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation_max: int | None = None
    nvlinks: int | None = None
    processes: tuple[tuple[int, int | None], ...] | None = None


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """The initialised binding.

    Raises:
        NvmlAbsent: there is no library, no driver, or the two do not fit.
    """
    import pynvml

    kinds = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "library",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "driver",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "mismatch",
    }
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlAbsent(kinds.get(error.value, "other"), str(error)) from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def ask(nvml: Any, name: str, *arguments: object) -> Any:
    """One question; None where the answer is that the board does not tell.

    Raises:
        pynvml.NVMLError_GpuIsLost: the board has fallen off.
    """
    try:
        return getattr(nvml, name)(*arguments)
    except nvml.NVMLError_GpuIsLost:
        raise
    except nvml.NVMLError:
        return None


def boards(nvml: Any) -> tuple[Board, ...]:
    """Every GPU that NVML shows; one that is lost is in the list, and says so."""
    return tuple(_board(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))


def _board(nvml: Any, index: int) -> Board:
    try:
        return _living_board(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError as error:
        return Board(index=index, lost=str(error))


def _living_board(nvml: Any, index: int, handle: Any) -> Board:
    def get(name: str, *arguments: object) -> Any:
        return ask(nvml, name, handle, *arguments)

    def watts(milliwatts: Any) -> float | None:
        return None if milliwatts is None else milliwatts / 1000

    def first(pair: Any) -> bool | None:
        return None if pair is None else bool(pair[0])

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    persistence = get("nvmlDeviceGetPersistenceMode")
    running = get("nvmlDeviceGetComputeRunningProcesses")
    uncorrected = get("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    links = [get("nvmlDeviceGetNvLinkState", link) for link in range(NVLINKS)]
    return Board(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        capability=f"{major}.{minor}",
        memory_total=memory.total,
        memory_used=memory.used,
        power_limit=watts(get("nvmlDeviceGetEnforcedPowerLimit")),
        power_default=watts(get("nvmlDeviceGetPowerManagementDefaultLimit")),
        sm_clock_max=get("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_max=get("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        sm_clock=get("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        reasons=event_reasons(nvml, handle),
        ecc=first(get("nvmlDeviceGetEccMode")),
        ecc_uncorrected=uncorrected,
        mig=first(get("nvmlDeviceGetMigMode")),
        persistence=None if persistence is None else bool(persistence),
        virtualisation=VIRTUALISATION.get(get("nvmlDeviceGetVirtualizationMode")),
        pcie_width=get("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=get("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_generation_max=get("nvmlDeviceGetMaxPcieLinkGeneration"),
        nvlinks=None if all(link is None for link in links) else sum(link == 1 for link in links),
        processes=None if running is None else tuple((process.pid, process.usedGpuMemory) for process in running),
    )


def event_reasons(nvml: Any, handle: Any) -> int | None:
    """Why the clocks are what they are, as bits; older drivers know the question by its old name only."""
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        if (found := ask(nvml, name, handle)) is not None:
            return int(found)
    return None


def reason_names(bits: int) -> list[str]:
    """The names of the bits that are set."""
    return [REASONS.get(1 << place, f"bit {place}") for place in range(bits.bit_length()) if bits >> place & 1]


def links(nvml: Any, found: tuple[Board, ...]) -> dict[tuple[int, int], str]:
    """How each pair of boards is connected over PCIe; pairs that NVML does not tell are left out."""
    out: dict[tuple[int, int], str] = {}
    for one in found:
        for other in found[one.index + 1 :]:
            if one.lost or other.lost:
                continue
            handles = (nvml.nvmlDeviceGetHandleByIndex(board.index) for board in (one, other))
            ancestor = ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", *handles)
            if ancestor is not None:
                out[one.index, other.index] = ANCESTORS.get(ancestor, str(ancestor))
    return out
