"""Host weights that stay on disk: an open mode for machines whose memory does not hold them (field reports 14 and 38).

SGLang's layer-wise offload copies each layer into a buffer in host memory. With `offload.mapped` the layers stay in the
checkpoint's own files, mapped into the process: the kernel reads their pages when a layer is loaded, and may drop them
whenever memory is short. What SGLang changes while it loads (it sorts the rows of Q, K and V) stands in no file; it
goes into a file without a name, mapped as well. No bit of a weight changes.

Three of SGLang's functions are wrapped, so that at no moment more than one tensor lies in memory beside its file: both
loaders hand over each tensor as it is done, and the offload manager takes the mapped tensors instead of copying them.
"""

from __future__ import annotations

import bisect
import ctypes
import importlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.store import cache_root, user_cache

LOADER = "sglang.multimodal_gen.runtime.loader.fsdp_load"
TEXT_ENCODER = "sglang.multimodal_gen.runtime.models.encoders.minimax_h3_qwen3vl"
OFFLOAD = "sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload"
MAPS = Path("/proc/self/maps")
ANONYMOUS = ("/dev/zero", "/memfd:", "/SYSV", "/dev/shm/")
"""Paths in /proc/self/maps that stand for memory."""


def spill_folder() -> Path:
    """Where tensors that stand in no file go: beside the checkpoints, or in the user's cache when that is read-only.

    Raises:
        OSError: neither can be written.
    """
    for root in (cache_root(), user_cache()):
        folder = root / "offload"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            failed = error
            continue
        return folder
    raise failed


class FileRanges:
    """The addresses of this process that files on disk are mapped to, as they are now."""

    def __init__(self) -> None:
        found = []
        for line in MAPS.read_text().splitlines():
            addresses, _, _, _, inode, *path = line.split(None, 5)
            if inode != "0" and path and not path[0].startswith(ANONYMOUS):
                begin, end = (int(address, 16) for address in addresses.split("-"))
                found.append((begin, end))
        self._ranges = sorted(found)

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether all of a CPU tensor lies in one file."""
        if tensor.device.type != "cpu":
            return False
        begin = tensor.data_ptr()
        place = bisect.bisect_right(self._ranges, (begin, 1 << 64)) - 1
        return place >= 0 and begin + spread(tensor) * tensor.element_size() <= self._ranges[place][1]


def spread(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


class Spill:
    """A file that has no name and goes with the process, whose pieces are mapped as tensors."""

    def __init__(self, folder: Callable[[], Path] = spill_folder) -> None:
        self._folder, self._file, self.bytes = folder, -1, 0
        self.addresses: set[int] = set()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A mapped copy of a tensor, with its strides.

        Raises:
            OSError: the disk is full; said before anything is written, where a write to the mapping would kill.
        """
        if not tensor.numel():
            return tensor.cpu()
        if self._file < 0:
            with tempfile.TemporaryFile(dir=self._folder()) as handle:
                self._file = os.dup(handle.fileno())
        needed = spread(tensor) * tensor.element_size()
        length = -(-needed // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.posix_fallocate(self._file, self.bytes, length)
        piece = mmap.mmap(self._file, length, offset=self.bytes)
        self.bytes += length
        flat = torch.frombuffer(piece, dtype=torch.uint8, count=needed).view(tensor.dtype)
        out = flat.as_strided(tensor.shape, tensor.stride())
        with torch.no_grad():
            out.copy_(tensor)
        self.addresses.add(out.data_ptr())
        return out


class Ahead:
    """Asks the kernel to read the pages of a layer's tensors before they are copied: the copy then waits less."""

    def __init__(self) -> None:
        self._advise = ctypes.CDLL(None, use_errno=True).madvise
        self._advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._thread = ThreadPoolExecutor(1, "read-ahead")

    def read(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Begin to read; returns a future. Advice that the kernel refuses changes no result and is not looked at."""
        spans = [(tensor.data_ptr(), spread(tensor) * tensor.element_size()) for tensor in tensors if tensor.numel()]
        return self._thread.submit(self._read, spans)

    def _read(self, spans: list[tuple[int, int]]) -> None:
        for begin, length in spans:
            first = begin - begin % mmap.PAGESIZE
            self._advise(first, begin + length - first, mmap.MADV_WILLNEED)


class Weights:
    """The loaded weights of one process, on their way from the loaders to the offload managers."""

    def __init__(self, spill: Spill | None = None) -> None:
        self.spill = spill or Spill()
        self.ahead = Ahead()

    def keep(self, loaded: torch.Tensor, original: torch.Tensor | None) -> torch.Tensor:
        """A loaded tensor as it lies in its file, if it is that to the bit; else its copy in the spill file."""
        if original is not None and (original.dtype, original.shape) == (loaded.dtype, loaded.shape):
            if original.data_ptr() == loaded.data_ptr() or same_bits(loaded, original):
                return original
        return self.spill.put(loaded)

    def loading(self, load: Callable[..., Any], module: Any) -> Callable[..., Any]:
        """SGLang's loader of the DiT: each parameter becomes its mapped form as soon as it is complete."""

        def load_mapped(model: Any, full_sd_iterator: Iterable[tuple[str, torch.Tensor]], *args: Any, **kw: Any) -> Any:
            rename = kw["param_names_mapping"]
            originals: dict[str, torch.Tensor] = {}

            def passing() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in full_sd_iterator:
                    target, part, _ = rename(name)
                    if part is None and target:
                        originals[target] = tensor
                    yield name, tensor

            names = {id(parameter): name for name, parameter in model.named_parameters()}
            unfilled = {name for name, p in model.named_parameters() if getattr(p, "weight_loader", None) is not None}
            make = module._make_param_like

            def make_mapped(like: torch.nn.Parameter, tensor: torch.Tensor) -> torch.nn.Parameter:
                name = names[id(like)]
                if name in unfilled:  # the first call makes what the parameter's own loader fills
                    unfilled.discard(name)
                elif tensor.device.type == "cpu":
                    tensor = self.keep(tensor, originals.pop(name, None))
                made: torch.nn.Parameter = make(like, tensor)
                return made

            module._make_param_like = make_mapped
            try:
                return load(model, passing(), *args, **kw)
            finally:
                module._make_param_like = make

        return load_mapped

    def loading_text_encoder(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """SGLang's loader of the text encoder: the same, after each tensor that was copied into a parameter."""

        def load_mapped(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            parameters = dict(model.named_parameters(remove_duplicate=False))

            def passing() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in weights:
                    yield name, tensor
                    parameter = parameters.get(name)
                    if parameter is not None and parameter.device.type == "cpu":
                        parameter.data = self.keep(parameter.data, tensor)

            return load(model, passing())

        return load_mapped

    def initialising(self, initialise: Callable[[Any], None]) -> Callable[[Any], None]:
        """The offload manager's own start, which then finds no layer left to copy."""

        def initialise_mapped(manager: Any) -> None:
            if manager.enabled:
                self.adopt(manager)
                manager._match_layer_idx = lambda name: None
            try:
                initialise(manager)
            finally:
                manager.__dict__.pop("_match_layer_idx", None)

        return initialise_mapped

    def adopt(self, manager: Any) -> None:
        """Give a manager every parameter of its layers as a host tensor of its own, mapped; the model keeps
        placeholders. SGLang has such tensors for layouts that a flat buffer would lose, and loads them one by one."""
        files, taken = FileRanges(), {True: 0, False: 0}
        for name, parameter in manager.model.named_parameters():
            layer = manager._match_layer_idx(name)
            if layer is None or layer >= manager.num_layers:
                continue
            tensor = parameter.data
            if not files.hold(tensor):
                tensor = self.spill.put(tensor)
            manager._consolidated_cpu_weights.setdefault(layer, {})
            manager._strided_cpu_weights.setdefault(layer, {})[name] = tensor
            manager._weight_metadata.setdefault(layer, {})[name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "stride": tensor.stride(),
                "preserve_strides": True,
            }
            parameter.data = manager._get_shared_empty_tensor(tensor.dtype)
            taken[tensor.data_ptr() in self.spill.addresses] += tensor.numel() * tensor.element_size()
        sizes = f"{taken[False]} bytes in the checkpoint's files, {taken[True]} in the file beside them"
        print(f"weights on disk, {manager.layers_attr_str}: {sizes}", flush=True)  # into the arm's log

    def prefetching(self, prefetch: Callable[..., Any]) -> Callable[..., Any]:
        """A layer is copied while the pages of the one after it are read."""

        @torch.compiler.disable  # as SGLang's own
        def prefetch_mapped(manager: Any, layer: int, *args: Any, **kw: Any) -> Any:
            before = layer in getattr(manager, "_gpu_layers", ())
            out = prefetch(manager, layer, *args, **kw)
            if not before and layer in getattr(manager, "_gpu_layers", ()):
                following = manager._strided_cpu_weights.get((layer + 1) % manager.num_layers, {})
                self.ahead.read(following.values())
            return out

        return prefetch_mapped


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are the same to the bit (NaN and the sign of zero included)."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.element_size())
    return words is not None and torch.equal(one.contiguous().view(words), other.contiguous().view(words))


def install_mapped_weights() -> str:
    """Wrap SGLang's loaders and its offload manager in this process, before the pipeline is built."""
    weights = Weights()
    loader = importlib.import_module(LOADER)
    loader.load_model_from_full_model_state_dict = weights.loading(  # type: ignore[attr-defined]
        loader.load_model_from_full_model_state_dict, loader
    )
    encoder = importlib.import_module(TEXT_ENCODER).MiniMaxH3Qwen3VLEncoder
    encoder.load_weights = weights.loading_text_encoder(encoder.load_weights)
    manager = importlib.import_module(OFFLOAD).LayerwiseOffloadManager
    manager._initialize = weights.initialising(manager._initialize)
    manager.prefetch_layer = weights.prefetching(manager.prefetch_layer)
    return "place.weights_on_disk"
