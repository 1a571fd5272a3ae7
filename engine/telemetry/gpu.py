"""One look at a GPU through NVML, and the errors that the driver reports of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from config.canonical import sha256_bytes
from config.telemetry import GpuSample
from engine import nvml
from engine.telemetry.host import MIB, belongs


class GpuWatcher:
    """One GPU. Every question may raise pynvml.NVMLError when the board or the driver is gone."""

    def __init__(self, binding: Any, index: int, session: int) -> None:
        self.index, self._nvml, self._session = index, binding, session
        self._handle = binding.nvmlDeviceGetHandleByIndex(index)
        self.uuid_sha256 = sha256_bytes(binding.nvmlDeviceGetUUID(self._handle).encode())
        self._peak = 0
        self._events = self._register()

    def _register(self) -> Any:
        """An event set of Xid errors, or None where the driver does not let us hear of them."""
        events = nvml.ask(self._nvml, "nvmlEventSetCreate")
        try:
            self._nvml.nvmlDeviceRegisterEvents(self._handle, self._nvml.nvmlEventTypeXidCriticalError, events)
        except self._nvml.NVMLError:
            return None
        return events

    @property
    def hears_xid(self) -> bool:
        """Whether Xid errors reach us."""
        return self._events is not None

    def look(self) -> None:
        """Between two samples: follow the peak of used memory, which begins anew with each sample."""
        self._peak = max(self._peak, self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def xids(self) -> list[int]:
        """Numbers of the Xid errors since the last call."""
        out: list[int] = []
        while self._events is not None:
            try:
                out.append(int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData))
            except self._nvml.NVMLError_Timeout:
                break
        return out

    def sample(self, t: float) -> GpuSample:
        """Look now. The two questions about PCIe take about 20 ms each."""
        binding, handle = self._nvml, self._handle
        used = binding.nvmlDeviceGetMemoryInfo(handle).used
        peak, self._peak = max(self._peak, used), used

        def get(name: str, *arguments: object) -> Any:
            return nvml.ask(binding, name, handle, *arguments)

        power, energy = get("nvmlDeviceGetPowerUsage"), get("nvmlDeviceGetTotalEnergyConsumption")
        sent = get("nvmlDeviceGetPcieThroughput", binding.NVML_PCIE_UTIL_TX_BYTES)
        received = get("nvmlDeviceGetPcieThroughput", binding.NVML_PCIE_UTIL_RX_BYTES)
        own, foreign, hidden = self._processes(get("nvmlDeviceGetComputeRunningProcesses"))
        return GpuSample(
            t=t,
            memory_used_mib=round(used / MIB, 1),
            memory_peak_mib=round(peak / MIB, 1),
            power_w=None if power is None else power / 1000,
            energy_j=None if energy is None else energy / 1000,
            sm_clock_mhz=get("nvmlDeviceGetClockInfo", binding.NVML_CLOCK_SM),
            memory_clock_mhz=get("nvmlDeviceGetClockInfo", binding.NVML_CLOCK_MEM),
            temperature_c=get("nvmlDeviceGetTemperature", binding.NVML_TEMPERATURE_GPU),
            reasons=nvml.event_reasons(binding, handle),
            pcie_tx_mib_s=None if sent is None else round(sent / 1024, 1),
            pcie_rx_mib_s=None if received is None else round(received / 1024, 1),
            own_processes=own,
            foreign_processes=foreign,
            hidden_processes=hidden,
        )

    def _processes(self, running: Any) -> tuple[int | None, int | None, int | None]:
        if running is None:
            return None, None, None
        own = foreign = hidden = 0
        for process in running:
            if belongs(process.pid, self._session):
                own += 1
            elif process.pid != os.getpid() and Path(f"/proc/{process.pid}").exists():
                foreign += 1
            else:
                hidden += 1
        return own, foreign, hidden
