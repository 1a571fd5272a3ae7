"""How long the doctor takes: measured by the command that users have, and bounded where the machine's load cannot
matter."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from config.lock import load_target
from engine.doctor import examine
from engine.doctor.run import families
from engine.doctor.timing import LIMIT_SECONDS
from tests.engine.nvml.machine import H100, VARIABLE, Machine, library


def test_all_checks_of_four_h100_take_less_than_ten_seconds_of_processor_time(tmp_path: Path) -> None:
    """In a process of its own, torch's import and every probe included, against a stand-in NVML; `make test` may run on
    a busy machine, where the wall clock says little."""
    machine = Machine(tmp_path / "machine", *[H100] * 4)
    place = {VARIABLE: str(machine.path), "LD_LIBRARY_PATH": str(library().parent)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "engine.doctor.timing", "h100x4"],
        env={**os.environ, **place},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    pattern = r"h100x4: ([\d.]+) s \((gpus .*)\), ([\d.]+) s of processor time; at most 10 s is asked for"
    match = re.fullmatch(pattern, line)
    assert match is not None, line
    parts = [float(part.split()[1]) for part in match[2].split(", ")]
    assert abs(sum(parts) - float(match[1])) < 0.05 and len(parts) == 7
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert 0 < float(match[3]) <= spent + 0.1 < LIMIT_SECONDS


@pytest.mark.parametrize("name", ["cpu", "rtx4090"])
def test_the_families_are_all_that_is_examined(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command times is what `sol doctor` does, but for the NCCL smoke."""
    monkeypatch.setenv("SOL_CACHE", str(tmp_path))
    target = load_target(name)
    timed = [check.name for _, look in families(target, tmp_path) for check in look()]
    assert timed == [check.name for check in examine(target, tmp_path)]
    assert len(timed) == len(set(timed))


WITHOUT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for capability in range(64):  # PR_CAPBSET_DROP, until there is no such one
    if libc.prctl(24, capability, 0, 0, 0):
        break
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
EXAMINE = """
import sys
from pathlib import Path
from config.lock import load_target
from engine.doctor.run import families
print(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff")))
for _, look in families(load_target(sys.argv[1]), Path(sys.argv[2])):
    for check in look():
        print(check.name, check.severity, sep="\\t")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has something to lose; here nobody is root anyway")
def test_no_check_needs_root(tmp_path: Path) -> None:
    """With and without every capability of root, the doctor says the same of one machine: four H100 that a stand-in
    plays."""
    machine = Machine(tmp_path / "machine", *[H100] * 4)
    place = {VARIABLE: str(machine.path), "LD_LIBRARY_PATH": str(library().parent), "SOL_CACHE": str(tmp_path)}
    told = []
    for before in ([], ["-c", WITHOUT]):
        command = [sys.executable, *before, "-c", EXAMINE, "h100x4", str(tmp_path / "runs")]
        done = subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-1500:]
        told.append(done.stdout.splitlines())
    (with_, *all_), (without, *some) = told
    assert int(with_.split()[1], 16) and not int(without.split()[1], 16)
    assert some == all_
    assert "gpu\tok" in some and len(some) > 25
