"""The NCCL smoke of multi-GPU targets: one all-reduce over all GPUs, with a time limit (field reports 6 and 7).

A hang here costs a minute; the same hang after the weights are loaded costs an hour. Each rank is a process of its own,
`python -m engine.doctor.collective RANK WORLD PORT BACKEND`, with the target's locked environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from config.schema import Target
from engine.doctor.check import Check, Severity, judged
from engine.h3.server_arguments import free_ports

LIMIT_SECONDS = 60.0
ELEMENTS = 1 << 20


def check_collective(target: Target, *, backend: str = "nccl", limit: float = LIMIT_SECONDS) -> Iterator[Check]:
    """All-reduce over the target's GPUs; nothing for a target with one."""
    world = target.hardware.gpu_count
    if world < 2:
        return
    good, found = all_reduce(world, backend, {**os.environ, **target.env}, limit)
    remedy = (
        "NVLink multicast in a container: set NCCL_NVLS_ENABLE=0, which this target locks. PCIe with IOMMU or ACS on: "
        "switch them off in BIOS or kernel; `nvidia-smi topo -m` shows the paths. --set env.NCCL_P2P_DISABLE=1 may "
        "get round it; such a run is open and not comparable"
    )
    yield judged(
        "nccl", good, found, f"an all-reduce over {world} GPUs within {limit:g} s", remedy, fix=("nvidia-smi topo -m",)
    )
    if (nvls := target.env.get("NCCL_NVLS_ENABLE")) != "0":
        yield Check(
            name="nvls",
            severity=Severity.WARNING,
            found=f"NCCL_NVLS_ENABLE={nvls or 'unset'}",
            needed="0",
            remedy="NVLink multicast hangs or fails in many containers (nccl-tests 216)",
        )


def all_reduce(world: int, backend: str, environment: dict[str, str], limit: float) -> tuple[bool, str]:
    """Run it. Returns whether every rank got the right sum in time, and what was seen."""
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "engine.doctor.collective"]
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(port), backend],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    late, problems = [], []
    try:
        for rank, process in enumerate(processes):
            try:
                _, errors = process.communicate(timeout=max(0.0, limit - (time.monotonic() - began)))
                if process.returncode:
                    problems.append((errors.strip().splitlines() or [f"rank {rank}: code {process.returncode}"])[-1])
            except subprocess.TimeoutExpired:
                late.append(rank)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    if problems:
        return False, problems[0][:300]
    if late:
        return False, f"rank {', '.join(map(str, late))} did not come back in {limit:g} s"
    return True, f"right sums after {time.monotonic() - began:.1f} s, start included"


def main(rank: int, world: int, port: int, backend: str) -> None:
    """One rank: join, reduce, compare."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    values = torch.full((ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(values)
    wrong = int((values != world * (world + 1) / 2).sum())
    if wrong:
        raise SystemExit(f"rank {rank}: {wrong} of {ELEMENTS} sums are wrong")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
