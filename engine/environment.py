"""What a run is run on, as environment.json says it: enough to judge comparability, nothing that names a machine or a
person."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name

from config.canonical import sha256_bytes, sha256_file
from config.lock import Lock, read_recipe, recipes_root
from config.record import CheckpointFound, Cpu, Environment, Gpu, Package
from engine import nvml
from engine.cgroup import cgroup_left_mib
from engine.evidence import utc_now
from engine.image import changed_files, image_labels

IMAGE_DIGEST_VARIABLE = "SOL_IMAGE_DIGEST"
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
REVISION_LABEL = "org.opencontainers.image.revision"


def installed_packages() -> tuple[Package, ...]:
    """Every distribution on the path, by normalised name; of duplicates the one that an import would take."""
    found: dict[str, Package] = {}
    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        record = distribution.read_text("RECORD")
        digest = sha256_bytes(record.encode()) if record else None
        found.setdefault(name, Package(name=name, version=distribution.version, record_sha256=digest))
    return tuple(found[name] for name in sorted(found))


def locked_versions(image: str) -> dict[str, str]:
    """Normalised name to version of every line of a recipe's requirements.lock; empty where there is none."""
    path = recipes_root() / image / "requirements.lock"
    if not path.is_file():
        return {}
    pins = re.findall(r"^([A-Za-z0-9][\w.\-]*)==([^\s;\\]+)", path.read_text("utf-8"), flags=re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


def package_differences(image: str) -> list[str]:
    """One text a distribution whose installed version is not the recipe's."""
    out = []
    for name, version in locked_versions(image).items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "absent"
        if installed != version:
            out.append(f"{name} {installed} (locked {version})")
    return out


def sglang_pins(image: str) -> dict[str, str]:
    """Path below the sglang package to SHA-256, as the recipe pins them; empty where it pins none."""
    import tomllib

    recipe = tomllib.loads((recipes_root() / image / "image.toml").read_text("utf-8"))
    listed = recipe.get("sglang", {}).get("files")
    if not listed:
        return {}
    lines = (recipes_root() / listed).read_text("utf-8").splitlines()
    pairs = (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    return {path: digest for digest, path in pairs}


def sglang_sources(image: str) -> dict[str, str]:
    """SHA-256 of each pinned source in the package that an import takes, which need not be the installed one; a missing
    file has the digest of nothing, which no pin equals.

    Raises:
        PackageNotFoundError: nothing can be imported.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise importlib.metadata.PackageNotFoundError("sglang")
    root = Path(spec.submodule_search_locations[0])
    return {
        path: sha256_file(root / path) if (root / path).is_file() else sha256_bytes(b"") for path in sglang_pins(image)
    }


def source_revision() -> str:
    """Commit of the checkout this code runs from, with + when files differ from it; empty outside a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists() or not shutil.which("git"):
        return ""
    git = ["git", "-c", f"safe.directory={root}", "-C", str(root)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return ""
    dirty = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def cpu_model() -> str:
    """The processor's name from /proc/cpuinfo, or the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def meminfo_mib(name: str) -> int:
    """One line of /proc/meminfo, MiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields[name].split()[0]) // 1024


def memory_mib() -> tuple[int, int]:
    """MemTotal and MemAvailable, MiB."""
    return meminfo_mib("MemTotal"), meminfo_mib("MemAvailable")


def memlock_kib() -> int | None:
    """The limit of locked memory, KiB; None where there is none."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft // 1024


def in_container() -> bool:
    """Whether this process runs inside Docker or Podman."""
    return any(mark.exists() for mark in CONTAINER_MARKS)


def ffmpeg_version() -> str:
    """First line of `ffmpeg -version`, up to the copyright; empty where there is no ffmpeg."""
    if not shutil.which("ffmpeg"):
        return ""
    out = subprocess.run(["ffmpeg", "-hide_banner", "-version"], capture_output=True, text=True).stdout
    return out.split(" Copyright", 1)[0].strip()


def os_name() -> str:
    """PRETTY_NAME of the distribution."""
    return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())


def visible_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Every living GPU that NVML shows, and the driver version; nothing and "" where there is no NVML."""
    try:
        with nvml.session() as binding:
            driver = nvml.ask(binding, "nvmlSystemGetDriverVersion") or ""
            return tuple(_gpu(board) for board in nvml.boards(binding) if not board.lost), driver
    except nvml.NvmlAbsent:
        return (), ""


def _gpu(board: nvml.Board) -> Gpu:
    return Gpu(
        index=board.index,
        name=board.name,
        uuid_sha256=sha256_bytes(board.uuid.encode()),
        compute_capability=board.capability,
        memory_mib=board.memory_total // 2**20,
        power_limit_w=board.power_limit,
        sm_clock_max_mhz=board.sm_clock_max,
        ecc=board.ecc,
        mig=board.mig,
        power_limit_default_w=board.power_default,
        memory_clock_max_mhz=board.memory_clock_max,
        persistence=board.persistence,
        virtualisation=board.virtualisation,
        pcie_width=board.pcie_width,
        pcie_generation_max=board.pcie_generation_max,
        nvlinks=board.nvlinks,
    )


def topology() -> tuple[tuple[str, ...], str]:
    """How the GPUs are connected over PCIe, pair by pair, and the CUDA version of the driver."""
    try:
        with nvml.session() as binding:
            found = nvml.links(binding, nvml.boards(binding))
            cuda = nvml.ask(binding, "nvmlSystemGetCudaDriverVersion")
    except nvml.NvmlAbsent:
        return (), ""
    pairs = tuple(f"{one}-{other} {how}" for (one, other), how in sorted(found.items()))
    return pairs, f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""


def differences(lock: Lock, gpus: tuple[Gpu, ...], sources: dict[str, str], image_digest: str) -> list[str]:
    """What makes a run of this lock open here, beside its overrides."""
    target, out = lock.resolved, []
    if read_recipe(target.recipe).sha256 != lock.recipe.sha256:
        out.append(f"the recipe images/{target.recipe} differs from the lock's")
    pins = sglang_pins(target.recipe)
    changed = sorted(path for path, digest in pins.items() if sources.get(path) != digest)
    if changed:
        out.append(f"{len(changed)} installed SGLang sources differ from the pins, first {changed[0]}")
    packages = package_differences(target.recipe)
    if packages:
        out.append(f"{len(packages)} packages differ from the recipe's lock: {', '.join(packages[:4])}")
    if not image_digest and not target.bare_is_locked:
        out.append("the run is outside the target's image")
    if files := changed_files():
        out.append(f"{len(files)} files of the image were changed since its build, first {files[0]}")
    hardware = target.hardware
    for gpu in gpus:
        if gpu.power_limit_w and gpu.power_limit_default_w and gpu.power_limit_w < gpu.power_limit_default_w:
            limits = f"{gpu.power_limit_w:g} of {gpu.power_limit_default_w:g} W"
            out.append(f"the power limit of GPU {gpu.index} is lowered to {limits}")
    if hardware.kind == "cuda":
        wanted = [(hardware.gpu_name, hardware.compute_capability)] * hardware.gpu_count
        if [(gpu.name, gpu.compute_capability) for gpu in gpus] != wanted:
            names = ", ".join(gpu.name for gpu in gpus) or "none"
            out.append(f"GPUs are {names}, not {hardware.gpu_count}x {hardware.gpu_name}")
    return out


def compile_cache_folders() -> dict[str, Path]:
    """Where Triton, inductor and CUDA keep what they compiled, by the variable that says so.

    Without the variable they go below the home directory (inductor: the temporary one), which a user without an entry
    in /etc/passwd does not have.
    """
    home = Path(os.environ.get("HOME") or "/")
    defaults = {
        "TRITON_CACHE_DIR": home / ".triton",
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()) / f"torchinductor_{os.environ.get('USER', '')}",
        "CUDA_CACHE_PATH": home / ".nv",
    }
    return {name: Path(os.environ.get(name) or default) for name, default in defaults.items()}


def compile_caches() -> dict[str, Literal["cold", "warm"]]:
    """Whether each of these folders holds anything: a cold start compiles, and its warm-up takes longer."""
    found = {name: folder.is_dir() and any(folder.iterdir()) for name, folder in compile_cache_folders().items()}
    return {name: "warm" if warm else "cold" for name, warm in found.items()}


def capture(
    lock: Lock, checkpoint: CheckpointFound, extra_differences: list[str], warnings: Sequence[str] = ()
) -> Environment:
    """Read the machine, the packages and the sources.

    Args:
        lock: the run's lock.
        checkpoint: the verified weights.
        extra_differences: what the caller knows to make the run open.
        warnings: what the doctor warned of.
    """
    import torch

    target = lock.resolved
    cuda = target.hardware.kind == "cuda"
    gpus, driver = visible_gpus() if cuda else ((), "")
    pairs, cuda_driver = topology() if cuda else ((), "")
    sources = sglang_sources(target.recipe)
    image_digest = os.environ.get(IMAGE_DIGEST_VARIABLE, "")
    total, available = memory_mib()
    return Environment(
        captured_at=utc_now(),
        image_digest=image_digest,
        image_labels=image_labels(),
        recipe_sha256=read_recipe(target.recipe).sha256,
        source_revision=source_revision() or image_labels().get(REVISION_LABEL, ""),
        python=platform.python_version(),
        os=os_name(),
        kernel=platform.release(),
        packages=installed_packages(),
        sglang_sources=sources,
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        driver=driver,
        cpu=Cpu(model=cpu_model(), cores=len(os.sched_getaffinity(0)), torch_threads=torch.get_num_threads()),
        memory_total_mib=total,
        memory_available_mib=available,
        gpus=gpus,
        ffmpeg=ffmpeg_version(),
        checkpoint=checkpoint,
        env=dict(target.env),
        cuda_driver=cuda_driver,
        topology=pairs,
        in_container=in_container(),
        memory_limit_mib=cgroup_left_mib(),
        swap_total_mib=meminfo_mib("SwapTotal"),
        shared_memory_mib=shutil.disk_usage("/dev/shm").total // 2**20 if Path("/dev/shm").is_dir() else None,
        memlock_kib=memlock_kib(),
        compile_caches=compile_caches() if cuda else {},
        warnings=tuple(warnings),
        differences=tuple([*differences(lock, gpus, sources, image_digest), *extra_differences]),
    )
