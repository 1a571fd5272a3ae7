"""Checks of what compiles and of what starts containers: Triton's C compiler, the CUDA folder, Docker on the host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from config.schema import Target
from engine.doctor.check import Check, Severity, judged
from engine.doctor.gpu import TOOLKIT
from engine.environment import in_container

PATIENCE_SECONDS = 5.0


def check_toolchain(target: Target) -> Iterator[Check]:
    """Only CUDA targets compile at run time, and only they need the container runtime."""
    if target.hardware.kind != "cuda":
        return
    yield compiler()
    yield cuda_home()
    if not in_container():
        yield from docker()


def compiler() -> Check:
    """Triton builds its launcher with a C compiler at the first kernel (field report 34): one is used here."""
    remedy = "use the target's image, or install gcc and the C library's headers"
    name = os.environ.get("CC") or next((name for name in ("gcc", "clang", "cc") if shutil.which(name)), None)
    if name is None:
        return judged("c compiler", False, "none on PATH", "one that builds a shared library", remedy)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "probe.c", Path(folder) / "probe.so"
        source.write_text("#include <stdint.h>\nint32_t probe(void) { return 7; }\n")
        try:
            done = subprocess.run(
                [name, "-shared", "-fPIC", "-o", out, source], capture_output=True, text=True, timeout=PATIENCE_SECONDS
            )
            good, text = done.returncode == 0, (done.stderr.strip().splitlines() or ["no message"])[0]
        except (OSError, subprocess.TimeoutExpired) as error:
            good, text = False, str(error)
    return judged("c compiler", good, name if good else f"{name}: {text}", "one that builds a shared library", remedy)


def cuda_home() -> Check:
    """Kernels that are compiled from source look for nvcc below CUDA_HOME (field report 34)."""
    home = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    found = shutil.which("nvcc") or (home / "bin" / "nvcc" if (home / "bin" / "nvcc").exists() else None)
    return judged(
        "cuda toolkit",
        found is not None,
        str(found or "no nvcc on PATH or below CUDA_HOME"),
        "nvcc",
        "use the target's image, which is built on a devel image, or set CUDA_HOME",
        bad=Severity.WARNING,
    )


def docker() -> Iterator[Check]:
    """On a host with Docker: whether Docker can hand a GPU to a container (field report 1)."""
    program = shutil.which("docker")
    if program is None:
        return
    if "/snap/" in str(Path(program).resolve()) or str(program).startswith("/snap/"):
        yield judged(
            "docker",
            False,
            "installed as a snap",
            "Docker from its own packages",
            "a snap cannot see the NVIDIA container toolkit: remove it and install docker-ce",
            bad=Severity.WARNING,
            fix=("snap remove docker",),
        )
        return
    try:
        done = subprocess.run(
            [program, "info", "--format", "{{json .}}"], capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
        info = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        info = None
    if not isinstance(info, dict) or info.get("ServerErrors"):
        remedy = "start the Docker service, or add yourself to the group docker; runs without containers need neither"
        yield judged("docker", False, "does not answer", "a running daemon", remedy, bad=Severity.WARNING)
        return
    runtimes, devices = info.get("Runtimes") or {}, info.get("DiscoveredDevices") or []
    cdi = any("nvidia.com/gpu" in str(device) for device in devices)
    ways = [way for way, there in (("runtime nvidia", "nvidia" in runtimes), ("CDI", cdi)) if there]
    yield judged(
        "docker",
        bool(ways),
        ", ".join(ways) or f"runtimes: {', '.join(sorted(runtimes)) or 'none'}; no CDI device of NVIDIA",
        "the runtime nvidia, or CDI",
        "install nvidia-container-toolkit on the host, then type the three commands",
        bad=Severity.WARNING,
        fix=TOOLKIT,
    )
