"""compute-sanitizer over the attention kernels: ``python -m engine.attention.sanitize [--json FILE]``.

memcheck and racecheck on small calls that reach every kernel, and racecheck on three control kernels. Exit code 0: both
tools are clean, after one suppression for racecheck; 1: they are not, or the controls say that racecheck saw nothing;
10: no CUDA device of capability 9.0 or no compute-sanitizer.

The suppression. A warp-specialised kernel of Triton 3.6 starts its partitions by way of a few bytes of shared memory,
one a worker warp: the default warps write which partition each warp shall run, ``barrier.sync 1`` holds all threads of
the block, then the workers read. Once a kernel waits on an mbarrier, racecheck (2025.3.1) no longer follows that
barrier and reports these bytes, also for ``race_controls.ordered_word``, which has none of our code. A hazard is put
down to this only if its address is one of these bytes, read off the kernel's own code, and both instructions belong to
the lines that start the partitions. Triton gives these bytes an interval of their own in shared memory, and no buffer
of a kernel of ours overlaps it; so no race between our own loads and stores can be hidden. What racecheck reports
varies from launch to launch, so each control is launched ``LAUNCHES`` times. The verdict is void unless
``race_controls.planted_race`` is reported, and, where anything was put aside, ``ordered_word`` on those bytes as well.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config.errors import Exit

TOOLKIT = Path("/usr/local/cuda/bin/compute-sanitizer")
OPTIONS = {
    "memcheck": (),
    "racecheck": ("--racecheck-report", "hazard"),
}
WINDOW = 0x400  # where a block's dynamic shared memory begins in the addresses of reports: the system has the first KiB
WORDS = "words: "
LAUNCHES = 16  # of each control: a single one was once reported on its word alone and not on the dispatch bytes

HAZARD = re.compile(
    r"Potential (?P<kind>\w+) hazard detected at __shared__ (?P<address>0x[0-9a-f]+) in block [^\n]*\n"
    r"=+\s+(?P<first>\w+) Thread \([\d,]+\) at (?P<first_kernel>\w+)\+0x[0-9a-f]+ in (?P<first_line>[^\n]+)\n"
    r"=+\s+(?P<second>\w+) Thread \([\d,]+\) at (?P<second_kernel>\w+)\+0x[0-9a-f]+ in (?P<second_line>[^\n]+)\n"
)
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors?")


@dataclass(frozen=True)
class Hazard:
    """One report of racecheck. offset: bytes from the beginning of the block's shared memory; lines: ``file:line``."""

    kind: str
    kernel: str
    offset: int
    lines: tuple[str, str]


@dataclass(frozen=True)
class Dispatch:
    """Where a kernel starts its partitions: bytes [first, stop) of shared memory, and the ``file:line`` that do it."""

    kernel: str
    first: int
    stop: int
    lines: tuple[str, ...]

    def explains(self, hazard: Hazard) -> bool:
        """Whether the hazard is between instructions that start partitions, on the bytes that are there for it."""
        here = hazard.kernel == self.kernel and self.first <= hazard.offset < self.stop
        return here and set(hazard.lines) <= set(self.lines)


def hazards(log: str) -> list[Hazard]:
    """All hazards of a racecheck log. Raises ValueError when their number is not the one in the log's summary."""
    found = []
    for match in HAZARD.finditer(log):
        lines = match["first_line"].strip(), match["second_line"].strip()
        kernels = {match["first_kernel"], match["second_kernel"]}
        kernel = kernels.pop() if len(kernels) == 1 else " and ".join(sorted(kernels))
        found.append(Hazard(match["kind"], kernel, int(match["address"], 16) - WINDOW, lines))
    summary = SUMMARY.search(log)
    if summary is None or int(summary[1]) != len(found):
        told = "no summary" if summary is None else f"a summary of {summary[1]}"
        raise ValueError(f"racecheck's log has {len(found)} hazards that can be read, and {told}")
    return found


def dispatch_bytes(asm: Mapping[str, str]) -> tuple[int, int]:
    """First and last + 1 of the bytes from which worker warps read their partition, from a kernel's PTX and TTGIR.

    They read ``[global_smem + number of the warp in the block + constant]``, in the only byte load from shared memory;
    the numbers begin behind the default warps, which TTGIR counts. Raises ValueError when the code looks otherwise.
    """
    loads = re.findall(r"ld\.shared\.b8\s+%r\d+, \[%r\d+\+(\d+)\]", asm["ptx"])
    threads = re.search(r"\.reqntid (\d+)", asm["ptx"])
    default = re.search(r'"ttg\.num-warps" = (\d+)', asm["ttgir"])
    if len(loads) != 1 or threads is None or default is None:
        raise ValueError(f"{len(loads)} byte loads from shared memory; needed: one, that of Triton's dispatch")
    return int(loads[0]) + int(default[1]), int(loads[0]) + int(threads[1]) // 32


def starting_lines(function: Any) -> tuple[str, ...]:
    """``file:line`` of a kernel's ``def``, of its ``gl.warp_specialize`` calls and of the statements around those: the
    instructions that start partitions carry these lines (the last ones, that of an enclosing ``if``)."""
    source, first = inspect.getsourcelines(function)
    file = Path(inspect.getsourcefile(function) or "").name
    lines = set()
    for node in ast.walk(ast.parse(textwrap.dedent("".join(source)))):
        if isinstance(node, ast.stmt) and any(
            isinstance(call, ast.Call) and ast.unparse(call.func) == "gl.warp_specialize" for call in ast.walk(node)
        ):
            lines.add(first + node.lineno - 1)
    return tuple(f"{file}:{line}" for line in sorted(lines))


def compiled_dispatches(kernel: Any) -> list[Dispatch]:
    """Of every variant of a Gluon kernel that this process has launched."""
    name, found = kernel.fn.__name__, set()
    for caches in kernel.device_caches.values():
        for variant in caches[0].values():
            first, stop = dispatch_bytes(variant.asm)
            found.add(Dispatch(name, first, stop, starting_lines(kernel.fn)))
    return sorted(found, key=lambda x: (x.first, x.stop))


def run_calls() -> list[Dispatch]:
    """Small calls through every kernel: both thresholds, ragged blocks, sink, dense rows, LSE, repairs, rotation."""
    from engine.attention import kernels
    from engine.attention.call import SolAttentionOptions, ThreshType
    from engine.attention.kernels import attend_sm90
    from engine.attention.kernels.rotary import rotary_embedding

    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(300, 3, 2, 128, device="cuda", generator=generator).bfloat16()
    q, k, v = (x[None, :, i] for i in range(3))
    kinds: tuple[ThreshType, ...] = ("diag", "exact")
    for kind in kinds:
        for lse in (False, True):
            options = SolAttentionOptions(128**-0.5, 1.0, kind, (0, 100), (0, 130), lse)
            kernels.attend(q, k, v, options)
    kernels.attend(q * 30, k * 30, v, options)  # leaves the range of fixed references: repaired
    kernels.attend(q, k, v, options, plan=kernels.POINTER_OTHER)
    turned, cache = x[:, 0].half().view(300, -1), torch.ones(300, 96, device="cuda", dtype=torch.float16)
    rotary_embedding(torch.arange(300, device="cuda"), turned, turned.clone(), 128, cache)
    torch.cuda.synchronize()
    return compiled_dispatches(attend_sm90._attend_kernel)


def run_controls() -> list[Dispatch]:
    """The control kernels, one block each, several times. Raises RuntimeError when an ordered word did not arrive."""
    from engine.attention.kernels import race_controls

    for _ in range(LAUNCHES):
        word = race_controls.run(torch.device("cuda"))["ordered_word"]
        if word != race_controls.WORD:
            raise RuntimeError(
                f"ordered_word handed over {word}; needed: {race_controls.WORD}; "
                "an mbarrier did not order two partitions: use the Triton and the driver that NOTES.md names"
            )
    names = (race_controls.dispatch_only, race_controls.ordered_word, race_controls.planted_race)
    return [dispatch for kernel in names for dispatch in compiled_dispatches(kernel)]


CHILDREN = {"calls": run_calls, "controls": run_controls}


def sanitised(program: Path, tool: str, child: str) -> tuple[str, list[Dispatch]]:
    """A child's log under a tool, and the dispatch bytes that it names. Raises RuntimeError when it ended badly."""
    command: list[str] = [
        str(program), "--tool", tool, *OPTIONS[tool], "--print-limit", "0", "--show-backtrace", "no",
        sys.executable, "-m", "engine.attention.sanitize", "--child", child,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith(WORDS)), None)
    if done.returncode or line is None:
        raise RuntimeError(f"{tool} on {child} ended with code {done.returncode}:\n{done.stdout[-2000:]}")
    return done.stdout, [
        Dispatch(x["kernel"], x["first"], x["stop"], tuple(x["lines"])) for x in json.loads(line[len(WORDS) :])
    ]


def judge(memcheck: str, calls: tuple[str, list[Dispatch]], controls: tuple[str, list[Dispatch]]) -> dict[str, Any]:
    """The verdict on the logs of memcheck and racecheck on the calls, and of racecheck on the controls."""
    errors = ERRORS.search(memcheck)
    log, dispatches = calls
    found = hazards(log)
    rest = [hazard for hazard in found if not any(dispatch.explains(hazard) for dispatch in dispatches)]
    control_log, control_dispatches = controls
    of_controls = hazards(control_log)

    def outside(hazard: Hazard) -> bool:
        return not any(d.kernel == hazard.kernel and d.first <= hazard.offset < d.stop for d in control_dispatches)

    planted = [h for h in of_controls if h.kernel == "planted_race" and outside(h)]
    ordered = [h for h in of_controls if h.kernel == "ordered_word"]
    put_aside, reproduced = len(found) - len(rest), sum(not outside(h) for h in ordered)
    controlled = bool(planted) and (reproduced > 0 or put_aside == 0)
    return {
        "memcheck_errors": int(errors[1]) if errors else None,
        "racecheck_hazards": len(found),
        "of_triton_dispatch": put_aside,
        "of_ours": [h.__dict__ for h in rest],
        "planted_race_seen": bool(planted),
        "false_alarms_of_control": {
            "word handed over through an mbarrier": sum(outside(h) for h in ordered),
            "dispatch bytes": reproduced,
        },
        "passed": errors is not None and int(errors[1]) == 0 and not rest and controlled,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.attention.sanitize", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=sorted(CHILDREN), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(WORDS + json.dumps([dispatch.__dict__ for dispatch in CHILDREN[arguments.child]()]))
        return Exit.PASSED
    program = Path(shutil.which("compute-sanitizer") or TOOLKIT)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability != (9, 0) or not program.is_file():
        missing = (
            "compute-sanitizer" if capability == (9, 0) else f"a CUDA device of capability 9.0 (found {capability})"
        )
        print(f"needed: {missing}; the kernels are checked while they run there", file=sys.stderr)
        return Exit.ENVIRONMENT
    with ThreadPoolExecutor() as pool:  # of processes that mostly compile
        runs = [("memcheck", "calls"), ("racecheck", "calls"), ("racecheck", "controls")]
        (memcheck, _), calls, controls = pool.map(lambda run: sanitised(program, *run), runs)
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split("\n")
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tool": next((line for line in version if line.startswith("Version")), ""),
        **judge(memcheck, calls, controls),
    }
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return Exit.PASSED if report["passed"] else Exit.FAILED


if __name__ == "__main__":
    raise SystemExit(main())
