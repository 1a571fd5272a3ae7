"""Checkpoints without data: headers on disk, numbers where they are loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from config.errors import CheckpointError
from engine.checkpoint.deferred import DeferredTensor, lacks_data, read_header, write_header
from engine.checkpoint.draw import Draw, uniform

FC1 = Draw(3, "transformer/blocks.0.mlp.fc1.weight", (24, 16), torch.bfloat16, std=0.25)
NORM = Draw(3, "transformer/norm.weight", (16,), torch.float32, std=0.02, mean=1.0)
FREQUENCIES = Draw(3, "transformer/rope.inv_freq", (4,), torch.float32, values=(1.0, 0.1, 0.01, 0.001))
DRAWS = {"fc1.weight": FC1, "norm.weight": NORM, "inv_freq": FREQUENCIES}

draws = st.builds(
    Draw,
    seed=st.just(7),
    name=st.text(min_size=1, max_size=20),
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    std=st.floats(0, 10),
    mean=st.floats(-10, 10),
    values=st.just(()),
)


@given(st.dictionaries(st.text(min_size=1, max_size=30).filter(lambda x: x != "__metadata__"), draws, min_size=1))
def test_a_header_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, written: dict[str, Draw]) -> None:
    path = tmp_path_factory.mktemp("headers") / "x.safetensors"
    write_header(path, written)
    assert read_header(path) == written


def test_the_real_library_reads_such_a_file_s_header_and_refuses_it_as_cut(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_header(path, DRAWS)
    with pytest.raises(SafetensorError):
        safe_open(str(path), framework="pt")
    with path.open("ab") as handle:  # with as many bytes behind it as it says, the library takes it
        handle.write(bytes(sum(draw.elements * draw.dtype.itemsize for draw in DRAWS.values())))
    with safe_open(str(path), framework="pt") as whole:
        found = {name: (whole.get_tensor(name).shape, whole.get_tensor(name).dtype) for name in whole.keys()}
    assert found == {name: (torch.Size(draw.shape), draw.dtype) for name, draw in DRAWS.items()}


def test_a_file_with_data_is_left_alone_and_a_damaged_header_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(3)}, str(tmp_path / "plain.safetensors"))
    assert read_header(tmp_path / "plain.safetensors") is None
    assert not lacks_data(tmp_path)
    path = tmp_path / "model.safetensors"
    write_header(path, DRAWS)
    assert lacks_data(tmp_path)
    data = path.read_bytes()
    for broken in (data[:200], data.replace(b'\\"mean\\"', b'\\"maen\\"'), data.replace(b'"BF16"', b'"BF61"')):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match="not whole"):
            read_header(path)
    for other in (b"", b"\x01", b"\xff" * 64):
        path.write_bytes(other)
        assert read_header(path) is None


def expected(draw: Draw) -> torch.Tensor:
    numbers = uniform(draw.seed, draw.name, draw.shape, draw.std * 3**0.5)
    return (torch.from_numpy(numbers) + torch.tensor(draw.mean, dtype=torch.float32)).to(draw.dtype)


def test_its_elements_exist_once_it_has_a_device() -> None:
    tensor = DeferredTensor(FC1)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (FC1.shape, FC1.dtype, "meta")
    moved = tensor.to("cpu")
    assert type(moved) is torch.Tensor and torch.equal(moved, expected(FC1))
    assert torch.equal(tensor.to(device="cpu", dtype=torch.float32), expected(FC1).float())
    assert tensor.to(torch.bfloat16) is tensor, "nothing to do yet"


def test_it_is_drawn_on_the_device_of_what_it_is_copied_into() -> None:
    target = torch.full(FC1.shape, torch.nan, dtype=FC1.dtype)
    target.copy_(DeferredTensor(FC1))
    assert torch.equal(target, expected(FC1))
    module = torch.nn.Linear(16, 24, bias=False, dtype=torch.bfloat16)
    module.load_state_dict({"weight": DeferredTensor(FC1)}, strict=True)
    assert torch.equal(module.weight, expected(FC1))
    with pytest.raises(RuntimeError, match="size mismatch"):
        torch.nn.Linear(8, 24, bias=False).load_state_dict({"weight": DeferredTensor(FC1)})


def test_without_a_device_it_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"fc1\.weight, which no device holds yet"):
        DeferredTensor(FC1) * 2.0


def test_values_that_are_not_random_are_kept() -> None:
    assert torch.equal(DeferredTensor(FREQUENCIES).to("cpu"), torch.tensor([1.0, 0.1, 0.01, 0.001]))


@given(first=st.integers(0, 383), count=st.integers(0, 384))
def test_a_shard_is_what_the_whole_holds_there(first: int, count: int) -> None:
    count = min(count, FC1.elements - first)
    assert torch.equal(FC1.elements_from(first, count), expected(FC1).flatten()[first : first + count])
    with pytest.raises(ValueError, match="which has 384"):
        FC1.elements_from(first, FC1.elements - first + 1)


@pytest.mark.e2e
def test_sglang_s_loaders_get_from_headers_what_they_get_from_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("loaded_from_headers.py")), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["bytes of headers"] < 2e6 < found["bytes of files"]
    assert set(found["tensors"]) == {"transformer", "text_encoder", "video_vae/source", "audio_vae"}
    assert all(count > 0 for count in found["tensors"].values())
    assert found["different"] == []
