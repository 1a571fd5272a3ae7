"""`python -m engine.doctor.timing [TARGET ...]`: how long the doctor takes, by family of checks; of all targets by
default. The NCCL smoke is left out: it has a limit of its own."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

from config.lock import load_target, target_names
from engine.doctor.run import families

LIMIT_SECONDS = 10.0


def measure(name: str, out: Path) -> dict[str, float]:
    """Seconds of each family of one target's checks, in this process."""
    took = {}
    for family, look in families(load_target(name), out):
        began = time.perf_counter()
        list(look())
        took[family] = time.perf_counter() - began
    return took


def processor_seconds() -> float:
    """What this process and those that it started have used so far; unlike a clock, it hardly feels other load."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def report(name: str, took: dict[str, float], processor: float) -> str:
    """One line."""
    parts = ", ".join(f"{family} {seconds:.2f}" for family, seconds in took.items())
    return (
        f"{name}: {sum(took.values()):.2f} s ({parts}), {processor:.2f} s of processor time; at most "
        f"{LIMIT_SECONDS:g} s is asked for"
    )


def main(names: list[str]) -> None:
    """Each target in a process of its own, since the first one to import torch pays for all."""
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    for name in names:
        child = os.fork()
        if not child:
            before = processor_seconds()
            took = measure(name, Path("runs"))
            print(report(name, took, processor_seconds() - before), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:] or target_names())
