"""`python -m engine.telemetry.overhead [SECONDS]`: what the sampler costs a fixed piece of work.

The work runs alternately without and with a sampler: matrix products on the GPU where torch has one, on the CPU else.
Two figures come out: the sampler's own CPU time as a share of the machine, which no other load disturbs, and the ratio
of the work's median times, which is only as steady as the machine is quiet.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engine.telemetry.sampler import Sampler

TICKS = os.sysconf("SC_CLK_TCK")


def work() -> tuple[Callable[[], None], int, str]:
    """A step of work of some tens of milliseconds, the number of GPUs, and what it is."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        torch.set_num_threads(1)
    device = torch.device("cuda" if gpus else "cpu")
    size, kind = (8192, torch.bfloat16) if gpus else (700, torch.float32)
    left = torch.randn(size, size, dtype=kind, device=device)
    right = torch.randn(size, size, dtype=kind, device=device)

    def step() -> None:
        for _ in range(20 if gpus else 2):
            torch.matmul(left, right)
        if gpus:
            torch.cuda.synchronize()

    return step, gpus, f"{size}^3 matrix products on {device}"


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def has_begun(folder: Path) -> bool:
    """Whether a sampler has written its second sample."""
    path = folder / "telemetry-host.jsonl"
    return path.exists() and path.read_bytes().count(b"host_sample") > 1


def measure(seconds: float) -> str:
    """Eight spans of work, every second one sampled."""
    step, gpus, what = work()
    step()
    times: dict[bool, list[float]] = {False: [], True: []}
    spent = elapsed = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(8):
            sampled = bool(number % 2)
            place = Path(folder) / str(number)
            place.mkdir()
            sampler = Sampler(place, os.getsid(0), gpus) if sampled else None
            time.sleep(1.0)
            while sampler and not has_begun(place):  # on a busy machine its start takes longer, and is none of its cost
                time.sleep(0.1)
            before, began = cpu_seconds(sampler.pid) if sampler else 0.0, time.perf_counter()
            while time.perf_counter() - began < seconds / 8:
                start = time.perf_counter()
                step()
                times[sampled].append(time.perf_counter() - start)
            if sampler:
                spent += cpu_seconds(sampler.pid) - before
                elapsed += time.perf_counter() - began
                sampler.stop()
    without, with_ = statistics.median(times[False]), statistics.median(times[True])
    cores = os.cpu_count() or 1
    return (
        f"{what}, {len(times[False])} + {len(times[True])} steps: median {without * 1e3:.3f} ms without, "
        f"{with_ * 1e3:.3f} ms with the sampler ({with_ / without - 1:+.2%}); the sampler took "
        f"{spent / elapsed:.2%} of one core, {spent / elapsed / cores:.3%} of {cores} (at most 0.5 % is asked for)"
    )


if __name__ == "__main__":
    print(measure(float(sys.argv[1]) if len(sys.argv) > 1 else 40.0))
