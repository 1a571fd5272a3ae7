"""Checks of host memory: what the run may take, and what the machine lets it pin or share."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from config.schema import Target
from engine.cgroup import cgroup_left_mib
from engine.doctor.check import Check, Severity, judged
from engine.environment import meminfo_mib, memory_mib

SHM = Path("/dev/shm")
PINNED_FACTOR = 1.9
"""Pinned host buffers are rounded up to powers of two: 1.67 to 1.9 times the weights (sglang PR 39021, vllm 56410)."""
SHM_GIB_A_GPU = 1.0
"""NCCL's own segments and SGLang's messages; Docker's 64 MB are what fails (nccl issue 290)."""


def check_memory(target: Target) -> Iterator[Check]:
    """Memory, swap, /dev/shm and the memlock limit."""
    yield memory(target)
    yield swap()
    yield shared_memory(target)
    yield memlock(target)


def needed_gib(target: Target) -> float:
    """Host memory of the target, GiB; more when the weights that wait in it are pinned (field reports 14 and 38)."""
    pinned = target.offload.pin_cpu_memory and target.offload.components
    return target.hardware.host_memory_gib * (PINNED_FACTOR if pinned else 1)


def memory(target: Target) -> Check:
    """Memory that the run may take, against the target's need (field reports 14 and 38).

    A virtual machine may start with little memory and get more: where the control group's limit is enough, too little
    available memory is a warning.
    """
    needed, (total, available), left = needed_gib(target), memory_mib(), cgroup_left_mib()
    now = available if left is None else min(available, left)
    found = f"{now / 1024:.1f} GiB available"
    if left is not None and left <= available:
        found += " (the control group's limit)"
    weights = bool(target.offload.components)
    remedy = "end other programs, raise the container's memory limit, or use a machine with more memory" + (
        "; the weights wait in host memory, and a run that gets too little is killed while it loads" if weights else ""
    )
    enough_later = False
    if left is not None and left >= needed * 1024 > available:
        enough_later = True
        remedy = "nothing, if the host gives this machine more memory as it asks for it; else raise it"
        found += f", of {total / 1024:.1f} GiB so far; the control group allows {left / 1024:.1f} GiB"
    return judged(
        "host memory",
        now >= needed * 1024,
        found,
        f"{needed:g} GiB"
        + (" (pinned buffers cost up to 1.9 times)" if needed > target.hardware.host_memory_gib else ""),
        remedy,
        bad=Severity.WARNING if enough_later else Severity.ERROR,
    )


def swap() -> Check:
    """Whether memory is being swapped now: measured times would hold disk reads."""
    total = meminfo_mib("SwapTotal")
    used = total - meminfo_mib("SwapFree")
    return judged(
        "swap",
        used < 1024,
        f"{used} of {total} MiB used" if total else "none",
        "less than 1 GiB used",
        "end what was swapped out, then empty it",
        bad=Severity.WARNING,
        fix=("swapoff -a && swapon -a",),
    )


def shared_memory(target: Target) -> Check:
    """/dev/shm, which Docker makes 64 MB small (field report 5)."""
    several = target.hardware.gpu_count > 1
    needed = SHM_GIB_A_GPU * max(target.hardware.gpu_count, 1) if several else 0.06
    try:
        free = shutil.disk_usage(SHM).free / 2**30
    except OSError as error:
        return judged("shared memory", False, f"{SHM}: {error.strerror}", f"{needed:g} GiB", "mount a tmpfs there")
    return judged(
        "shared memory",
        free >= needed,
        f"{free:.2f} GiB free in {SHM}",
        f"{needed:g} GiB",
        "give the container more: --shm-size 32g, or --ipc host",
        bad=Severity.ERROR if several else Severity.WARNING,
    )


def memlock(target: Target) -> Check:
    """The limit of locked memory, which pinned buffers count against (field report 15)."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    pins = target.hardware.kind == "cuda"
    unlimited = soft == resource.RLIM_INFINITY
    return judged(
        "memlock",
        unlimited or not pins,
        "unlimited" if unlimited else f"{soft // 1024} KiB",
        "unlimited" if pins else "any: a CPU target pins nothing",
        "start the container with --ulimit memlock=-1 --ulimit stack=67108864; without one: ulimit -l unlimited",
        bad=Severity.ERROR if target.offload.pin_cpu_memory else Severity.WARNING,
    )
