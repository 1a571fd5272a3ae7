"""Telemetry of a run: `telemetry-gpu<N>.jsonl` and `telemetry-host.jsonl` of an arm, one JSON object a line.

Each process of an arm has a sampler of its own, which appends: a file is a list of sessions, each from a
`telemetry_start` to a `telemetry_end`. `t` counts from the session's start; `clock` of the start is the machine's
monotonic clock at t = 0, and so is `clock` of the driver's arm_start: with both, samples and requests lie on one line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from config.schema import Model, Sha256

SLOWDOWN = 0x8 | 0x20 | 0x40 | 0x80
"""Clocks event reasons that mean throttled: hardware slowdown, software and hardware thermal slowdown, power brake
(nvml.h, nvmlClocksEventReason*)."""
POWER_CAP = 0x4
"""The software power cap. At the board's own limit it is how the board works, and no throttling; a lowered limit makes
a run open instead."""


class Line(Model):
    """Base of all lines. `t`: seconds since the session's start."""

    t: float = Field(ge=0)


class TelemetryStart(Line):
    """A sampler began. `gpu` and `uuid_sha256` are null in the host's file."""

    event: Literal["telemetry_start"] = "telemetry_start"
    clock: float = Field(description="the machine's monotonic clock at t = 0, seconds")
    interval: float = Field(gt=0, description="seconds between samples")
    gpu: int | None = Field(ge=0)
    uuid_sha256: Sha256 | None
    xid_watched: bool = Field(description="whether the driver lets this process hear of Xid errors")


class GpuSample(Line):
    """One look at a GPU. Null where the board does not tell.

    own_processes: of the arm; foreign_processes: visible here and not the arm's; hidden_processes: known to the driver
    and not visible in this container, which may be either.
    """

    event: Literal["gpu_sample"] = "gpu_sample"
    memory_used_mib: float
    memory_peak_mib: float = Field(
        description="most that was used since the sample before, looked at ten times a second"
    )
    power_w: float | None
    energy_j: float | None = Field(description="counter of the driver")
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    reasons: int | None = Field(description="clocks event reasons, bits as in nvml.h")
    pcie_tx_mib_s: float | None
    pcie_rx_mib_s: float | None
    own_processes: int | None
    foreign_processes: int | None
    hidden_processes: int | None


class HostSample(Line):
    """One look at the host. The arm is every process of its session."""

    event: Literal["host_sample"] = "host_sample"
    processes: int
    rss_mib: float = Field(description="resident sets of the arm's processes; shared pages count in each")
    anonymous_mib: float | None = Field(
        default=None, description="of rss_mib, what is no file's: the kernel can drop the rest when memory is short"
    )
    pinned_mib: float = Field(description="locked and pinned memory of the arm, as far as the kernel accounts for it")
    available_mib: float = Field(description="MemAvailable")
    page_cache_mib: float
    pressure: float | None = Field(description="share of the last 10 s in which somebody waited for memory, percent")
    refaults: int = Field(description="pages of files read again since the last sample: the page cache was too small")
    arm_cores: float = Field(description="cores that the arm kept busy since the last sample")
    busy_cores: float = Field(description="cores that anybody kept busy since the last sample")


class Xid(Line):
    """The driver reported an error of this GPU; NVIDIA lists the numbers."""

    event: Literal["xid"] = "xid"
    number: int


class GpuLost(Line):
    """NVML or the GPU stopped answering; no sample follows in this session."""

    event: Literal["gpu_lost"] = "gpu_lost"
    reason: str


class TelemetryEnd(Line):
    """The sampler was told to end. `oom_kills`: processes that the kernel killed for memory in the arm's control group
    meanwhile; null in a GPU's file."""

    event: Literal["telemetry_end"] = "telemetry_end"
    samples: int
    oom_kills: int | None


AnyLine = Annotated[
    TelemetryStart | GpuSample | HostSample | Xid | GpuLost | TelemetryEnd, Field(discriminator="event")
]
TELEMETRY: TypeAdapter[Any] = TypeAdapter(AnyLine)
