"""Checks of the GPUs against the target's hardware, through NVML."""

from __future__ import annotations

from collections.abc import Iterator

from config.schema import Target
from engine.doctor.check import Check, judged
from engine.environment import visible_gpus


def check_gpus(target: Target) -> Iterator[Check]:
    """Number, model, compute capability and driver, exactly as the target names them."""
    hardware = target.hardware
    gpus, driver = visible_gpus()
    wanted = f"{hardware.gpu_count}x {hardware.gpu_name}"
    if not gpus:
        remedy = "run on the target's machine; in a container pass --gpus all and install the NVIDIA container toolkit"
        yield judged("gpu", False, "NVML shows no NVIDIA GPU", wanted, remedy)
        return
    names = [gpu.name for gpu in gpus]
    good = names == [hardware.gpu_name] * hardware.gpu_count
    yield judged("gpu", good, ", ".join(names), wanted, "choose the target of this machine, or hide other GPUs")
    capabilities = sorted({gpu.compute_capability for gpu in gpus})
    good = capabilities == [hardware.compute_capability]
    found, needed = ", ".join(capabilities), hardware.compute_capability
    yield judged("compute capability", good, found, needed, "choose the target of this machine")
    if hardware.driver_floor:
        good = version(driver) >= version(hardware.driver_floor)
        yield judged("driver", good, driver, f"{hardware.driver_floor} or newer", "install a newer NVIDIA driver")
    if any(gpu.mig for gpu in gpus):
        yield judged("mig", False, "MIG is on", "MIG off", "nvidia-smi -mig 0, then restart the GPU's users")


def version(text: str) -> tuple[int, ...]:
    """Numbers of a dotted version."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())
