"""What a GPU can do at most, by its CUDA device name: typed access to ceilings.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from config.schema import Setting

FILE = Path(__file__).resolve().parent / "ceilings.toml"


class Ceiling(Setting):
    """One figure, and where it is from."""

    value: float = Field(gt=0)
    origin: Literal["measured", "data sheet"]
    source: str = Field(min_length=1)


class Machine(Setting):
    """Where and when the measured figures were measured."""

    device: str = Field(min_length=1)
    driver: str = Field(min_length=1)
    software: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")


class Products(Setting):
    """TFLOP/s of matrix products by precision. `attention`: the fastest dense attention seen; it bounds nothing."""

    half: Ceiling
    tf32: Ceiling
    fp32: Ceiling
    attention: Ceiling | None = None


class Bandwidths(Setting):
    """GB/s (10^9 bytes): of device memory, reads and writes together; of one direction of PCIe and of NVLink."""

    memory: Ceiling
    host: Ceiling
    link: Ceiling | None = None


class Ceilings(Setting):
    """One GPU's ceilings."""

    tflops: Products
    gb_s: Bandwidths
    machine: Machine | None = None

    @property
    def all(self) -> dict[str, Ceiling]:
        """Every figure by its dotted name."""
        tables = {"tflops": self.tflops, "gb_s": self.gb_s}
        return {
            f"{table}.{name}": figure
            for table, figures in tables.items()
            for name in type(figures).model_fields
            if (figure := getattr(figures, name)) is not None
        }

    @model_validator(mode="after")
    def _measured_somewhere(self) -> Ceilings:
        if any(figure.origin == "measured" for figure in self.all.values()) != (self.machine is not None):
            raise ValueError("measured figures have a machine, and only they")
        return self


class _File(Setting):
    schema_version: Literal[1]
    gpus: dict[str, Ceilings]


@cache
def _file() -> _File:
    return _File.model_validate(tomllib.loads(FILE.read_text("utf-8")))


def known_gpus() -> list[str]:
    """Device names with ceilings, sorted."""
    return sorted(_file().gpus)


def ceilings_of(gpu_name: str) -> Ceilings | None:
    """The ceilings of the GPU that calls itself `gpu_name`; None when none are known."""
    return _file().gpus.get(gpu_name)


def ceilings_table() -> str:
    """Every figure as a Markdown table; docs/roofline.md holds it."""
    rows = ["| GPU | figure | | origin | source |", "|---|---|---:|---|---|"]
    for gpu in known_gpus():
        for name, figure in _file().gpus[gpu].all.items():
            unit = "TFLOP/s" if name.startswith("tflops") else "GB/s"
            rows.append(f"| {gpu} | `{name}` | {figure.value:g} {unit} | {figure.origin} | {figure.source} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(ceilings_table())
