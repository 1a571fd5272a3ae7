"""Checks of host memory: what the run may take, and what the machine lets it pin or share."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from config.checkpoint import manifest
from config.schema import Target
from engine.cgroup import cgroup_left_mib
from engine.checkpoint.store import checkpoint_folder
from engine.doctor.check import Check, Severity, judged
from engine.environment import meminfo_mib, memory_mib

SHM = Path("/dev/shm")
PINNED_FACTOR = 1.9
"""Pinned host buffers are rounded up to powers of two: 1.67 to 1.9 times the weights (sglang PR 39021, vllm 56410)."""
MAPPED_GIB = 48.0
"""Host memory of a run whose weights stay on disk (ours; not measured at full size): the processes, a tensor in flight,
and pages enough that the layers ahead are not dropped before they are used."""
READ_BYTES, READ_SECONDS, READ_PIECE = 256 << 20, 0.5, 16 << 20
"""How much of the weights the doctor reads to time the disk, at most."""
SHM_GIB_A_GPU = 1.0
"""NCCL's own segments and SGLang's messages; Docker's 64 MB are what fails (nccl issue 290)."""


def check_memory(target: Target) -> Iterator[Check]:
    """Memory, swap, /dev/shm and the memlock limit."""
    yield memory(target)
    if target.offload.mapped:
        yield weights_on_disk(target)
    yield swap()
    yield shared_memory(target)
    yield memlock(target)


def needed_gib(target: Target) -> float:
    """Host memory of the target, GiB; more when the weights that wait in it are pinned (field reports 14 and 38), less
    when they stay on disk."""
    pinned = target.offload.pin_cpu_memory and target.offload.components
    if target.offload.mapped:
        return min(target.hardware.host_memory_gib, MAPPED_GIB)
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
    weights = bool(target.offload.components) and not target.offload.mapped
    remedy = "end other programs, raise the container's memory limit, or use a machine with more memory" + (
        "; the weights wait in host memory, and a run that gets too little is killed while it loads" if weights else ""
    )
    fix: tuple[str, ...] = ()
    if weights and MAPPED_GIB * 1024 <= now < needed * 1024:
        remedy += f". This machine can run with the weights left on disk: --set offload.mapped=true. {cost(target)}"
        fix = (f"sol benchmark {target.name} --set offload.mapped=true",)
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
        fix=fix,
    )


def dit_bytes(target: Target) -> int:
    """Bytes of the DiT's weights: of its files where they are, else of the published list."""
    folder = checkpoint_folder(target.checkpoint) / target.checkpoint.partition / "transformer"
    there = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if there or target.checkpoint.kind != "hub":
        return there
    prefix = f"{target.checkpoint.partition}/transformer/"
    return sum(entry.bytes for entry in manifest() if entry.path.startswith(prefix))


def read_rate(target: Target) -> float | None:
    """Bytes a second that the disk gives from the largest file of the weights, past the page cache; None where there is
    no such file, or where its file system reads through the cache only."""
    folder = checkpoint_folder(target.checkpoint)
    files = [path for path in folder.rglob("*.safetensors") if path.stat().st_size >= READ_PIECE]
    if not files:
        return None
    path = max(files, key=lambda path: path.stat().st_size)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        read, began = 0, time.perf_counter()
        with mmap.mmap(-1, READ_PIECE) as buffer:
            while read < READ_BYTES and time.perf_counter() - began < READ_SECONDS:
                count = os.preadv(descriptor, [buffer], read)
                read += count
                if count < READ_PIECE:  # the file's end
                    break
        return read / (time.perf_counter() - began)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def cost(target: Target) -> str:
    """What weights on disk cost, in words."""
    size, rate = dit_bytes(target), read_rate(target)
    text = (
        f"It costs time: what does not stay in the page cache of the DiT's {size / 1e9:.1f} GB is read again in every "
        "computed forward"
    )
    if rate is None:
        text += ", up to that much divided by the disk's rate (not measured: the weights are not there yet)"
    else:
        text += f", up to {size / rate:.1f} s at the {rate / 1e9:.2f} GB/s that this disk gives"
    return f"{text}, partly hidden behind the computation. Such a run is open and not comparable"


def weights_on_disk(target: Target) -> Check:
    """A run that leaves its weights on disk is told what that costs, and the record keeps it."""
    return judged(
        "weights",
        False,
        "left on disk (offload.mapped)",
        f"in host memory, {target.hardware.host_memory_gib:g} GiB",
        cost(target),
        bad=Severity.WARNING,
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
