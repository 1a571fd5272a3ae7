"""Compile kernels for a compute capability that this machine need not have, and read the compiler's report."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

POINTERS = {
    **dict.fromkeys(("p_q_mean", "p_mu", "p_variance", "p_lse", "p_reference"), "*fp32"),
    **dict.fromkeys(("p_lengths", "p_bits", "p_counts", "p_counter", "p_flags", "p_tickets"), "*i32"),
    "p_lists": "*i16",
}
FLOATS = ("c", "tau", "epsilon")


@dataclass(frozen=True)
class Report:
    """Of one kernel: registers a thread, bytes of shared memory, of spilled stores and loads; its PTX and TTGIR."""

    registers: int
    shared: int
    spill_stores: int
    spill_loads: int
    ptx: str
    ttgir: str


def compile_for(
    kernel: Any, capability: int, constants: dict[str, Any], types: dict[str, str] | None = None, **options: Any
) -> Report:
    """Compile ``kernel`` (Triton or Gluon). Arguments are typed by name: p_ pointers (bfloat16 unless POINTERS or
    ``types`` says otherwise), d_ descriptors of [64, 128] tiles, the floats above, and int32."""
    types = types or {}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.startswith("d_"):
            signature[name] = f"tensordesc<bf16[64, 128],{NVMMASharedLayout(128, 16, 2)!r}>"
        elif name.startswith("p_"):
            signature[name] = types.get(name, POINTERS.get(name, "*bf16"))
        else:
            signature[name] = types.get(name, "fp32" if name in FLOATS else "i32")
    aligned = [(i,) for i, name in enumerate(kernel.arg_names) if name.startswith(("p_", "stride_"))]
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(kernel, signature, constants, {i: [["tt.divisibility", 16]] for i in aligned})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    report = assemble(ptx, capability)
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report).groups()
    return Report(registers, compiled.metadata.shared, int(stores), int(loads), ptx, compiled.asm["ttgir"])


def assemble(ptx: str, capability: int) -> str:
    """What ptxas says about a kernel."""
    name = f"sm_{capability}a" if capability == 90 else f"sm_{capability}"
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={name}", path, "-o", Path(folder, "kernel.cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
