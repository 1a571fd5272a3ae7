"""Weights that stay on disk: which tensor lies in which file, to the bit, and what SGLang's offload manager does with
them. The whole pipeline in this mode: tests/e2e/test_mapped_weights.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import safe_open, save_file

from engine.h3 import mapped
from engine.h3.mapped import FileRanges, Spill, Weights, same_bits, spread


@pytest.fixture
def spill(tmp_path: Path) -> Spill:
    return Spill(lambda: tmp_path)


def from_file(path: Path, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    with safe_open(path, framework="pt", device="cpu") as handle:
        return {name: handle.get_tensor(name) for name in tensors}


def test_a_tensor_of_a_safetensors_file_lies_in_it_and_others_do_not(tmp_path: Path) -> None:
    found = from_file(tmp_path / "a.safetensors", one=torch.randn(300, 70), two=torch.randn(5).bfloat16())
    ranges = FileRanges()
    assert all(ranges.hold(tensor) for tensor in found.values())
    assert ranges.hold(found["one"].t()) and ranges.hold(found["one"][3:, 1])
    assert not ranges.hold(found["one"].clone()) and not ranges.hold(torch.empty(10_000_000))
    assert not ranges.hold(torch.empty(3, device="meta"))


def test_memory_that_only_looks_like_a_file_is_none(tmp_path: Path) -> None:
    """/dev/shm is memory: weights kept there would be what the mode is to avoid."""
    shared = Path("/dev/shm") / f"sol-test-{os.getpid()}.safetensors"
    try:
        found = from_file(shared, one=torch.randn(100, 100))
        assert not FileRanges().hold(found["one"])
    finally:
        shared.unlink(missing_ok=True)


shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes, dtype=dtypes, seed=st.integers(0, 1000), turned=st.booleans())
def test_a_spilled_tensor_has_the_bits_and_strides_it_had(
    spill: Spill, shape: list[int], dtype: torch.dtype, seed: int, turned: bool
) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)
    if turned and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    out = spill.put(tensor)
    assert out.stride() == tensor.stride() and out.dtype == tensor.dtype
    assert torch.equal(out, tensor)
    assert not tensor.numel() or FileRanges().hold(out)


def test_a_spill_leaves_no_file_behind_and_its_tensors_do_not_overlap(spill: Spill, tmp_path: Path) -> None:
    tensors = [torch.full((1000 + n,), float(n)) for n in range(20)]
    out = [spill.put(tensor) for tensor in tensors]
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(one, other) for one, other in zip(tensors, out, strict=True))
    ends = sorted((tensor.data_ptr(), tensor.data_ptr() + spread(tensor) * 4) for tensor in out)
    assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    """A write to a mapping of a file that the disk has no room for kills the process; here it is said before."""
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine mounts no file system")
    try:
        small = Spill(lambda: disk)
        small.put(torch.zeros(10_000))
        with pytest.raises(OSError, match="No space left"):
            small.put(torch.zeros(100_000))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_what_is_in_the_file_to_the_bit_stays_there_and_anything_else_is_spilled(spill: Spill, tmp_path: Path) -> None:
    values = torch.tensor([1.0, float("nan"), -0.0, 3.5])
    original = from_file(tmp_path / "a.safetensors", one=values)["one"]
    weights = Weights(spill)
    assert weights.keep(values.clone(), original).data_ptr() == original.data_ptr()
    for index, value in ((0, 1.0000001), (2, 0.0)):
        changed = values.clone()
        changed[index] = value
        kept = weights.keep(changed, original)
        assert kept.data_ptr() != original.data_ptr() and same_bits(kept, changed)
    for other in (values.double(), values[:3], values.view(2, 2)):
        assert same_bits(weights.keep(other, original), other)
    assert same_bits(weights.keep(values, None), values)


def test_the_spill_goes_beside_the_checkpoints_or_to_the_users_cache_when_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert mapped.spill_folder() == tmp_path / "cache/offload"
    monkeypatch.setenv("SOL_CACHE", "/proc/read-only")
    assert mapped.spill_folder() == tmp_path / "user/sol-h3/offload"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/read-only")
    with pytest.raises(OSError):
        mapped.spill_folder()


def test_reading_ahead_brings_pages_of_the_file_into_memory(tmp_path: Path) -> None:
    """/proc/self/pagemap and mincore both need the page cache: dropped before, there afterwards."""
    import ctypes
    import mmap
    import time

    path = tmp_path / "a.safetensors"
    tensor = from_file(path, one=torch.randn(2_000_000))["one"]
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    first = tensor.data_ptr() - tensor.data_ptr() % mmap.PAGESIZE
    pages = tensor.numel() * 4 // mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)

    def there() -> int:
        flags = (ctypes.c_ubyte * pages)()
        assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), flags) == 0
        return sum(flag & 1 for flag in flags)

    libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), mmap.MADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if there() > pages // 2:
        pytest.skip("this file system keeps its pages")
    mapped.Ahead().read([tensor]).result(timeout=30)
    deadline = time.monotonic() + 30
    while there() < pages * 0.9 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert there() >= pages * 0.9


MANAGER = """
import sys
from pathlib import Path
import torch
from safetensors.torch import safe_open, save_file
from engine.h3.cpu import declare_torchvision_operators, install_cpu_streams
declare_torchvision_operators(), install_cpu_streams()
from sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload import LayerwiseOffloadManager
from engine.h3 import mapped

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(64, 64)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64).to(torch.bfloat16) for _ in range(5))
    def forward(self, x):
        x = self.first(x).bfloat16()
        for block in self.blocks:
            x = block(x)
        return x

def manage(model):
    return LayerwiseOffloadManager(model, layers_attr_str="blocks", num_layers=5, enabled=True, pin_cpu_memory=False)

x = torch.randn(3, 64)
resident, plain, model = Model(), Model(), Model()
wanted = resident(x)
manage(plain)
assert torch.equal(plain(x), wanted)
folder = Path(sys.argv[1])
save_file({name: p.data for name, p in model.named_parameters()}, folder / "a.safetensors")
with safe_open(folder / "a.safetensors", "pt") as handle:
    for name, parameter in model.named_parameters():
        if not name.endswith("3.weight"):  # one that a loader has changed, so that it stands in no file
            parameter.data = handle.get_tensor(name)
weights = mapped.Weights(mapped.Spill(lambda: folder))
LayerwiseOffloadManager._initialize = weights.initialising(LayerwiseOffloadManager._initialize)
LayerwiseOffloadManager.prefetch_layer = weights.prefetching(LayerwiseOffloadManager.prefetch_layer)
manager = manage(model)
files = mapped.FileRanges()
hosts = [tensor for layer in manager._strided_cpu_weights.values() for tensor in layer.values()]
assert len(hosts) == 10 and all(files.hold(tensor) for tensor in hosts)
assert all(not buffers for buffers in manager._consolidated_cpu_weights.values()), "no copy in memory"
assert sum(p.numel() for p in model.blocks[4].parameters()) == 2, "placeholders"
assert weights.spill.bytes == 8192, "64 x 64 BF16 of one layer"
for _ in range(3):
    assert torch.equal(model(x), wanted)
named = dict(manager.iter_cpu_weights())
assert all(torch.equal(named[name], p) for name, p in resident.named_parameters() if name.startswith("blocks"))
manager.remove_forward_hooks(), manager.load_all_layers()
assert torch.equal(model(x), wanted)
with torch.no_grad():
    model.blocks[0].weight.mul_(2)
before = (folder / "a.safetensors").read_bytes()
manager.sync_all_layers_to_cpu(), manager.release_all(), manager.register_forward_hooks()
assert torch.equal(manager._strided_cpu_weights[0]["blocks.0.weight"], resident.blocks[0].weight * 2)
assert (folder / "a.safetensors").read_bytes() == before, "the checkpoint's file is not written to"
print("as wanted")
"""

MEMORY = """
import sys
from pathlib import Path
import torch
from safetensors.torch import safe_open, save_file
from engine.h3.cpu import declare_torchvision_operators, install_cpu_streams
declare_torchvision_operators(), install_cpu_streams()
from sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload import LayerwiseOffloadManager
from engine.h3 import mapped

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(4096, 4096, bias=False).bfloat16() for _ in range(8))

path, way = Path(sys.argv[1]) / "a.safetensors", sys.argv[2]
if way == "write":
    save_file({f"blocks.{n}.weight": torch.randn(4096, 4096).bfloat16() for n in range(8)}, path)
    raise SystemExit
model = Model()
weights = mapped.Weights(mapped.Spill(lambda: path.parent))
if way == "mapped":
    LayerwiseOffloadManager._initialize = weights.initialising(LayerwiseOffloadManager._initialize)
before = anonymous()
with safe_open(path, "pt") as handle:
    for name, _ in list(model.named_parameters()):
        tensor = handle.get_tensor(name)
        loaded = tensor.clone()  # as a loader fills a parameter
        kept = weights.keep(loaded, tensor) if way == "mapped" else loaded
        model.get_submodule(name.rpartition(".")[0]).weight = torch.nn.Parameter(kept, requires_grad=False)
        del tensor, loaded, kept
manager = LayerwiseOffloadManager(
    model, layers_attr_str="blocks", num_layers=8, enabled=True, pin_cpu_memory=False, prefetch_size=1
)
manager.release_all()
print(anonymous() - before)
"""


def test_layers_of_256_mib_take_no_memory_of_the_processs_own_when_they_are_mapped(tmp_path: Path) -> None:
    """SGLang's own manager, eight layers of 32 MiB: it holds them all, and holds none of them."""

    def grown(way: str) -> float:
        done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path), way], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return float(done.stdout.split()[-1]) if way != "write" else 0.0

    grown("write")
    plain, left = grown("plain"), grown("mapped")
    assert plain > 250, "what is measured is there to be measured"
    assert left < 64, "one layer at most, while it is loaded"


def test_sglangs_offload_manager_computes_the_same_from_mapped_weights(tmp_path: Path) -> None:
    """SGLang's own manager in a process of its own: nothing copied, the same bits out, the file never written to."""
    done = subprocess.run([sys.executable, "-c", MANAGER, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "as wanted"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_dits_loader_hands_over_each_tensor_as_it_is_done(spill: Spill, tmp_path: Path, device: str) -> None:
    """In the order of SGLang's loader: on a CPU an empty parameter is filled in place; on a GPU (played by `meta`: not
    host memory) it is filled there and comes back as a copy. Sorted rows are spilled, all else stays in its file."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 6) for name in ("qkv", "mlp", "norm")})
    tensors = {f"old.{name}": torch.randn(p.shape) for name, p in model.named_parameters()}
    originals = from_file(tmp_path / "a.safetensors", **tensors)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.weight_loader = lambda target, full, name=name: target.data.copy_(sort(name, full))

    def sort(name: str, full: torch.Tensor) -> torch.Tensor:
        return full.flip(0) if name == "qkv.weight" else full

    class Module:
        @staticmethod
        def _make_param_like(like: torch.nn.Parameter, tensor: torch.Tensor) -> torch.nn.Parameter:
            return torch.nn.Parameter(tensor, requires_grad=False)

    module = Module()
    loose = []

    def load(model: torch.nn.Module, pairs: object, place: str, *, param_names_mapping: object) -> dict[str, object]:
        full = {param_names_mapping(name)[0]: tensor for name, tensor in pairs}  # type: ignore[operator, attr-defined]
        out = {}
        for name, parameter in model.named_parameters():
            loader = getattr(parameter, "weight_loader", None)
            tensor = full[name]
            if loader is not None:
                made = module._make_param_like(parameter, torch.empty_like(tensor, device=place))
                if place == "cpu":
                    loader(made, tensor)
                tensor = made.data if place == "cpu" else sort(name, tensor).clone()
            out[name] = module._make_param_like(parameter, tensor)
            loose.append(not FileRanges().hold(out[name].data))
        return out

    weights = Weights(spill)
    loading = weights.loading(load, module)
    made = loading(model, iter(originals.items()), device, param_names_mapping=lambda name: (name[4:], None, None))
    assert loose == [False] * 6, "nothing stays in memory, not even until the next one is loaded"
    for name in made:
        assert torch.equal(made[name].data, sort(name, tensors[f"old.{name}"]))
        in_place = made[name].data.data_ptr() == originals[f"old.{name}"].data_ptr()
        assert in_place == (name != "qkv.weight"), name
    assert len(weights.spill.addresses) == 1
    assert module._make_param_like is Module._make_param_like, "the loader is left as it was"


def test_the_text_encoders_loader_hands_over_each_tensor_as_it_is_done(spill: Spill, tmp_path: Path) -> None:
    """Parameters in host memory become the file's own tensors as soon as they were copied into."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 6) for name in ("one", "two")})
    originals = from_file(tmp_path / "a.safetensors", **{n: torch.randn(p.shape) for n, p in model.named_parameters()})
    before = []

    def load(model: torch.nn.Module, pairs: object) -> set[str]:
        parameters, loaded = dict(model.named_parameters()), set[str]()
        for name, tensor in pairs:  # type: ignore[attr-defined]
            before.append(sum(FileRanges().hold(parameters[done].data) for done in loaded))
            parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded

    assert Weights(spill).loading_text_encoder(load)(model, iter(originals.items())) == set(originals)
    assert before == [0, 1, 2, 3]
    assert all(p.data_ptr() == originals[name].data_ptr() for name, p in model.named_parameters())
    assert not spill.bytes
