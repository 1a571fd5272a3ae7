"""Checkpoints without data: safetensors files that end after their header, and tensors that exist once they have a
device.

A full-size checkpoint is 129 GB of numbers that `engine.checkpoint.draw` can make faster than a disk reads them. Its
files hold the header alone: names, dtypes, shapes, and how each tensor is drawn. SGLang's own loaders read them through
the stand-ins below and run every check they have; a tensor's numbers are generated on the device it is moved or copied
to. Anything else that opens such a file finds it cut, and says so.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from config.errors import CheckpointError
from engine.checkpoint.draw import Draw

MARK = "sol_h3_draw"
"""Key in a header's `__metadata__`: this file has no data, and here is how it is drawn."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

LOADERS = {
    "sglang.multimodal_gen.runtime.loader.weight_utils": "safe_open",
    "sglang.multimodal_gen.runtime.utils.quantization_utils": "safe_open",
    "sglang.multimodal_gen.runtime.loader.component_loaders.vae_loader": "safetensors_load_file",
}
"""Where SGLang's MiniMax-H3 loaders look up a reader of safetensors files."""


def write_header(path: Path, draws: Mapping[str, Draw]) -> None:
    """Write a safetensors file that ends after its header. Keys are the tensors' names in the file.

    Raises:
        OSError: it cannot be written.
    """
    seeds = {draw.seed for draw in draws.values()}
    how = {
        name: {"name": draw.name, "std": draw.std, "mean": draw.mean, "values": list(draw.values)}
        for name, draw in draws.items()
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt", MARK: json.dumps({"seed": seeds.pop(), "draws": how})}}
    offset = 0
    for name, draw in draws.items():
        end = offset + draw.elements * draw.dtype.itemsize
        header[name] = {"dtype": NAMES[draw.dtype], "shape": list(draw.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def read_header(path: str | Path) -> dict[str, Draw] | None:
    """The draws of a file that `write_header` wrote; None for any other safetensors file.

    Raises:
        CheckpointError: the mark is there and what it says is not whole.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        text = handle.read(min(length, 1 << 26))
    try:
        header = json.loads(text)
        metadata = header.get("__metadata__", {})
        if MARK not in metadata:
            return None
        mark = json.loads(metadata[MARK])
        draws = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            how = mark["draws"][name]
            draws[name] = Draw(
                seed=int(mark["seed"]),
                name=str(how["name"]),
                shape=tuple(int(size) for size in entry["shape"]),
                dtype=DTYPES[entry["dtype"]],
                std=float(how["std"]),
                mean=float(how["mean"]),
                values=tuple(float(value) for value in how["values"]),
            )
        return draws
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if MARK.encode() not in text:
            return None
        raise CheckpointError(
            f"{path} is the header of synthetic weights, and not whole: {type(error).__name__}: {error}",
            needed="a file as `sol synth` writes it",
            remedy="`sol synth TARGET --force` writes it anew",
        ) from None


def lacks_data(folder: Path) -> bool:
    """Whether a checkpoint has files without data.

    Raises:
        CheckpointError: such a file is not whole.
        OSError: a file cannot be read.
    """
    return any(read_header(path) is not None for path in sorted(folder.rglob("*.safetensors")))


class DeferredTensor(torch.Tensor):
    """A tensor that is drawn when something needs its elements: on the device it is moved to, or on that of the tensor
    it is copied into. Until then it has shape and dtype, lies on the meta device, and takes no memory.

    Raises:
        RuntimeError: an operation needs the elements, and no device can be told from its arguments.
    """

    draw: Draw

    @staticmethod
    def __new__(cls, draw: Draw) -> DeferredTensor:
        made: DeferredTensor = torch.Tensor._make_wrapper_subclass(cls, draw.shape, dtype=draw.dtype, device="meta")  # type: ignore[attr-defined]
        made.draw = draw
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeferredTensor({self.draw.name}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten.detach.default:
            return cls(args[0].draw)
        flat = _tensors((args, kwargs))
        where = [tensor.device for tensor in flat if not isinstance(tensor, DeferredTensor)]
        device = kwargs.get("device") or (where[0] if where else None)
        if device is None or torch.device(device).type == "meta":
            names = ", ".join(tensor.draw.name for tensor in flat if isinstance(tensor, DeferredTensor))
            raise RuntimeError(f"{function} needs the elements of {names}, which no device holds yet: move it to one")

        def real(leaf: Any) -> Any:
            return leaf.draw.tensor(device) if isinstance(leaf, DeferredTensor) else leaf

        return function(*tree_map(real, args), **tree_map(real, kwargs))


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, torch.Tensor) else None, tree)
    return found


class HeaderFile:
    """What `safetensors.safe_open` gives, for a file without data."""

    def __init__(self, draws: Mapping[str, Draw]) -> None:
        self._draws = draws

    def __enter__(self) -> HeaderFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def keys(self) -> Iterable[str]:
        """Names of the tensors."""
        return list(self._draws)

    def metadata(self) -> dict[str, str]:
        """A plain file's metadata: none of a quantised one's."""
        return {"format": "pt"}

    def get_tensor(self, name: str) -> DeferredTensor:
        """One tensor, deferred."""
        return DeferredTensor(self._draws[name])


def install_deferred_loading() -> str:
    """Let SGLang's loaders read files without data; every other file goes to the reader it always went to."""
    for module_name, name in LOADERS.items():
        module = importlib.import_module(module_name)
        setattr(module, name, _reader(getattr(module, name), whole=name == "safetensors_load_file"))
    return "synthetic.deferred_loading"


def _reader(original: Any, *, whole: bool) -> Any:
    def read(path: Any, *args: Any, **kwargs: Any) -> Any:
        draws = read_header(path)
        if draws is None:
            return original(path, *args, **kwargs)
        if whole:
            return {name: DeferredTensor(draw) for name, draw in draws.items()}
        return HeaderFile(draws)

    return read
