"""Machines that the stand-in libnvidia-ml.so.1 plays, so that the real binding is exercised without a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

VARIABLE = "SOL_STAND_IN_NVML"
SOURCE = Path(__file__).with_name("stand_in.c")
GIB = 2**30

RTX4090 = {
    "name": "NVIDIA GeForce RTX 4090",
    "uuid": "GPU-4090",
    "capability": "8.9",
    "memory_total": 24564 * 2**20,
    "memory_used": 300 * 2**20,
    "power_limit": 450000,
    "power_default": 450000,
    "power": 21000,
    "sm_clock_max": 3105,
    "sm_clock": 210,
    "memory_clock_max": 10501,
    "memory_clock": 405,
    "temperature": 33,
    "reasons": 1,
    "persistence": 1,
    "virtualisation": 0,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_generation": 1,
    "pcie_generation_max": 4,
    "pcie_tx": 10,
    "pcie_rx": 20,
}
H100 = {
    **RTX4090,
    "name": "NVIDIA H100 80GB HBM3",
    "capability": "9.0",
    "memory_total": 81559 * 2**20,
    "power_limit": 700000,
    "power_default": 700000,
    "energy": 1000000,
    "sm_clock_max": 1980,
    "memory_clock_max": 2619,
    "ecc": 1,
    "ecc_corrected": 0,
    "ecc_uncorrected": 0,
    "mig": 0,
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "nvlinks": 18,
    "ancestor": 40,
}


@cache
def library() -> Path:
    """The compiled stand-in, in a folder of its own, under the name that the binding loads."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the tests of NVML need a C compiler"
    out = Path(mkdtemp(prefix="sol-nvml-")) / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(out), str(SOURCE)], check=True
    )
    return out


def load() -> None:
    """Put it into this process: what is loaded under a name already is what the binding's dlopen finds."""
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)


class Machine:
    """A machine whose boards can be changed while something looks at it."""

    def __init__(self, path: Path, *boards: dict[str, object], driver: str = "570.133.20", **values: object) -> None:
        self.path = path
        self.boards = [{**board, "uuid": f"{board['uuid']}-{index}"} for index, board in enumerate(boards)]
        self.values: dict[str, object] = {"driver": driver, "cuda": 12080, **values}
        self.extra: list[str] = []
        self.write()

    def write(self) -> None:
        lines = [f"count {len(self.boards)}", *(f"{key} {value}" for key, value in self.values.items())]
        for index, board in enumerate(self.boards):
            lines += [f"{index}.{key} {value}" for key, value in board.items()]
        partial = self.path.with_suffix(".partial")
        partial.write_text("\n".join([*lines, *self.extra]) + "\n")
        os.replace(partial, self.path)

    def change(self, gpu: int, **values: object) -> None:
        self.boards[gpu].update(values)
        self.write()

    def say(self, line: str) -> None:
        self.extra.append(line)
        self.write()
