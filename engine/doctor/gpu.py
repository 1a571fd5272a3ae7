"""Checks of the GPUs against the target's hardware, through NVML: what is visible, what it is, and whether it is free.

No check needs root. Numbers in brackets are rows of the field reports; the README has the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from config.schema import Target
from engine import nvml
from engine.doctor.check import Check, Severity, judged
from engine.nvml import Board

FREE_SHARE = 0.96
"""Of the target's GPU memory, what must be free: 22.5 GiB of an RTX 4090's 24,000 MiB (field report 16)."""
SLOWED = 0x8 | 0x20 | 0x40 | 0x80
"""Event reasons that slow an idle board down: heat, or the power supply."""
DEVICES = Path("/dev")
TOOLKIT = (
    "nvidia-ctk runtime configure --runtime=docker",
    "systemctl restart docker",
    "docker run --rm --gpus all ubuntu nvidia-smi",
)
"""On the host, after `apt-get install nvidia-container-toolkit`; a Docker from snap cannot see the toolkit."""


def check_gpus(target: Target) -> Iterator[Check]:
    """Number, model, compute capability, driver and state, exactly as the target names them."""
    try:
        with nvml.session() as binding:
            found, driver = nvml.boards(binding), nvml.ask(binding, "nvmlSystemGetDriverVersion") or ""
            links = nvml.links(binding, found)
    except nvml.NvmlAbsent as absent:
        yield unseen(target, absent)
        return
    if not found:
        yield unseen(target, nvml.NvmlAbsent("other", "NVML shows no GPU"))
        return
    yield from models(target, found, driver)
    living = [board for board in found if not board.lost]
    yield from sharing(target, living)
    yield from clocks(living)
    yield from health(living)
    yield from connections(target, living, links)


def unseen(target: Target, absent: nvml.NvmlAbsent) -> Check:
    """Why no GPU is visible (field report 1), told apart as far as the device files and NVML's words allow."""
    hardware = target.hardware
    devices = sorted(path.name for path in DEVICES.glob("nvidia*"))
    fix: tuple[str, ...] = ()
    if absent.kind == "mismatch":
        found, remedy = "the driver was updated and the old one still runs", "restart the machine"
    elif (DEVICES / "dxg").exists():
        found = "WSL without a visible NVIDIA GPU"
        remedy = "WSL is not supported: it caps pinned memory and hides NVML counters; use Linux"
    elif devices:
        found = f"/dev has {', '.join(devices[:3])} but not the driver's libraries ({absent.text})"
        remedy = (
            "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility; outside one install the driver's utilities"
        )
    elif (DEVICES / "kfd").exists():
        found, remedy = "an AMD GPU, no NVIDIA GPU", "none: the published benchmarks are of NVIDIA GPUs"
    else:
        found = f"no /dev/nvidia* and no NVML ({absent.text})"
        remedy = (
            'a container: pass --gpus all; if Docker then says `could not select device driver "" with capabilities: '
            "[[gpu]]`, install the NVIDIA container toolkit on the host and restart Docker. A machine: install the "
            "driver"
        )
        fix = TOOLKIT
    return judged("gpu", False, found, f"{hardware.gpu_count}x {hardware.gpu_name}", remedy, fix=fix)


def models(target: Target, found: tuple[Board, ...], driver: str) -> Iterator[Check]:
    """What the boards are (field reports 3, 23 and 26)."""
    hardware = target.hardware
    for board in found:
        if board.lost:
            yield judged(
                f"gpu {board.index}",
                False,
                f"lost: {board.lost}",
                "a GPU that answers",
                "look for Xid in `dmesg`; reset the GPU or restart the machine",
                fix=(f"nvidia-smi --gpu-reset -i {board.index}",),
            )
    names = [board.name or "lost" for board in found]
    wanted = f"{hardware.gpu_count}x {hardware.gpu_name}"
    remedy = "choose the target of this machine, or show the container only those (--gpus device=0)"
    yield judged("gpu", names == [hardware.gpu_name] * hardware.gpu_count, ", ".join(names), wanted, remedy)
    living = [board for board in found if not board.lost]
    capabilities = sorted({board.capability for board in living})
    good = capabilities == [hardware.compute_capability]
    text = ", ".join(capabilities) or "none"
    yield judged("compute capability", good, text, hardware.compute_capability, "choose the target of this machine")
    smallest = min((board.memory_total for board in living), default=0) // 2**20
    needed = f"{hardware.gpu_memory_mib} MiB"
    yield judged("gpu memory", smallest >= hardware.gpu_memory_mib, f"{smallest} MiB", needed, "use the target's GPU")
    if hardware.driver_floor:
        good = version(driver) >= version(hardware.driver_floor)
        remedy = (
            "install a newer NVIDIA driver on the host; NVIDIA_DISABLE_REQUIRE hides the message and is unsupported"
        )
        yield judged("driver", good, driver or "unknown", f"{hardware.driver_floor} or newer", remedy)
    split = [board.index for board in living if board.mig]
    found_text = f"on for GPU {numbers(split)}" if split else "off"
    fix = tuple(f"nvidia-smi -i {index} -mig 0" for index in split)
    yield judged("mig", not split, found_text, "off", "switch MIG off, then restart the GPU's users", fix=fix)
    shared = [board.index for board in living if board.virtualisation in ("vgpu", "host-vgpu", "host-vsga")]
    found_text = f"GPU {numbers(shared)} is a slice of one" if shared else "whole GPUs"
    yield judged(
        "virtual gpu", not shared, found_text, "whole GPUs", "take a machine with the whole GPU passed through"
    )


def sharing(target: Target, found: list[Board]) -> Iterator[Check]:
    """Whether the boards are free (field reports 16 and 26)."""
    busy = [f"GPU {board.index}: {len(board.processes)} process(es)" for board in found if board.processes]
    yield judged(
        "foreign processes",
        not busy,
        "; ".join(busy) or "none",
        "nobody else computes on the GPUs",
        "end them; `nvidia-smi` lists them (from the host, where a container hides them)",
        fix=("nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv",),
    )
    needed = int(target.hardware.gpu_memory_mib * FREE_SHARE)
    free = min(((board.memory_total - board.memory_used) // 2**20 for board in found), default=0)
    yield judged(
        "free gpu memory",
        free >= needed,
        f"{free} MiB",
        f"{needed} MiB",
        "end what holds it: a desktop, a browser, another job; with 24 GB the VAE's decode needs nearly all",
    )


def clocks(found: list[Board]) -> Iterator[Check]:
    """Power limit, and clocks that are held down (field report 25)."""
    lowered = [
        f"GPU {board.index}: {board.power_limit:g} of {board.power_default:g} W"
        for board in found
        if board.power_limit is not None and board.power_default is not None and board.power_limit < board.power_default
    ]
    known = next((f"{board.power_limit:g} W" for board in found if board.power_limit is not None), "not told")
    remedy = "raise it, or expect longer times: the record holds the limit"
    fix = tuple(f"nvidia-smi -i {b.index} -pl {b.power_default:g}" for b in found if b.power_default is not None)
    yield judged(
        "power limit",
        not lowered,
        "; ".join(lowered) or known,
        "the board's default",
        remedy,
        bad=Severity.WARNING,
        fix=fix,
    )
    slowed = [
        f"GPU {board.index}: {', '.join(nvml.reason_names(board.reasons & SLOWED))}"
        for board in found
        if board.reasons is not None and board.reasons & SLOWED
    ]
    remedy = "let it cool down, check fans and power cables; over 1 % of throttled time makes a run INVALID"
    yield judged("throttling", not slowed, "; ".join(slowed) or "none now", "none", remedy, bad=Severity.WARNING)
    capped = [board.index for board in found if board.reasons is not None and board.reasons & 0x2]
    yield judged(
        "clocks",
        not capped,
        f"application clocks are set on GPU {numbers(capped)}" if capped else "not set by hand",
        "the board's own",
        "reset them",
        bad=Severity.WARNING,
        fix=("nvidia-smi -rac", "nvidia-smi -rgc"),
    )


def health(found: list[Board]) -> Iterator[Check]:
    """ECC and persistence."""
    broken = [f"GPU {board.index}: {board.ecc_uncorrected}" for board in found if board.ecc_uncorrected]
    yield judged(
        "memory errors",
        not broken,
        f"uncorrected since the driver started, {'; '.join(broken)}" if broken else "none",
        "none",
        "reset the GPU; if they come back, the board is defective",
    )
    off = [board.index for board in found if board.ecc is False]
    state = (
        f"off on GPU {numbers(off)}" if off else ("on" if any(board.ecc for board in found) else "not on this model")
    )
    remedy = (
        "switch it on, then restart; without it memory is a little larger and faster than on the published machines"
    )
    yield judged(
        "ecc", not off, state, "on where the board has it", remedy, bad=Severity.WARNING, fix=("nvidia-smi -e 1",)
    )
    lazy = [board.index for board in found if board.persistence is False]
    yield judged(
        "persistence mode",
        not lazy,
        f"off on GPU {numbers(lazy)}" if lazy else "on",
        "on",
        "switch it on on the host: without it the driver starts anew with each process",
        bad=Severity.WARNING,
        fix=("nvidia-smi -pm 1",),
    )


def connections(target: Target, found: list[Board], links: dict[tuple[int, int], str]) -> Iterator[Check]:
    """PCIe width, and how the boards reach each other (field report 7)."""
    narrow = [
        f"GPU {board.index}: x{board.pcie_width} of x{board.pcie_width_max}"
        for board in found
        if board.pcie_width is not None and board.pcie_width_max is not None and board.pcie_width < board.pcie_width_max
    ]
    heavy = bool(target.offload.components)
    remedy = "move the board to a full slot: " + (
        "weights cross PCIe in every forward, so half the width shows" if heavy else "loading takes longer"
    )
    yield judged("pcie width", not narrow, "; ".join(narrow) or "full", "full", remedy, bad=Severity.WARNING)
    if target.hardware.gpu_count < 2:
        return
    unlinked = [board.index for board in found if not board.nvlinks]
    pairs = ", ".join(f"{one}-{other} {how}" for (one, other), how in sorted(links.items())) or "not told"
    some = f"{min((board.nvlinks or 0 for board in found), default=0)} NVLinks a GPU; PCIe {pairs}"
    yield judged(
        "topology",
        not unlinked,
        f"no NVLink on GPU {numbers(unlinked)}; PCIe {pairs}" if unlinked else some,
        "NVLink between all, as on the published machines",
        "use a machine with NVLink; over PCIe alone the exchange of Ulysses takes longer, and IOMMU or ACS can hang it",
        bad=Severity.WARNING,
        fix=("nvidia-smi topo -m",),
    )


def numbers(indices: list[int]) -> str:
    """Indices in words."""
    return ", ".join(map(str, indices))


def version(text: str) -> tuple[int, ...]:
    """Numbers of a dotted version."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())
