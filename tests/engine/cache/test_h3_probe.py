"""The H3 probe against SGLang's own block: what MiniMaxH3DiTBlock.forward hands to its attention, bit for bit."""

from __future__ import annotations

import contextlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.cache.h3_probe import first_block_probe, wait_for_first_block
from tests.engine import sglang_on_cpu

WIDTH, TIME, ROWS, TIMESTEPS, MODALITIES = 48, 12, 37, 2, 3


@pytest.fixture(scope="module")
def dit() -> ModuleType:
    """SGLang's H3 DiT module, imported for the CPU (about 15 s in a fresh process)."""
    return sglang_on_cpu.module("sglang.multimodal_gen.runtime.models.dits.minimax_h3")


class Pair(nn.Module):
    """SGLang's linear layers return (output, bias)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.linear(x), None


class Recorder(nn.Module):
    """In the place of the attention: keeps its input."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.seen = x.clone()
        return torch.zeros_like(x)


@pytest.fixture
def block(dit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A tiny random MiniMaxH3DiTBlock: SGLang's forward, norms, AdaLN split and modulation, without parallel groups."""
    monkeypatch.setattr(dit, "get_tp_world_size", lambda: 1)
    generator = torch.Generator().manual_seed(11)
    adaln = dit.MiniMaxH3AdalnProj.__new__(dit.MiniMaxH3AdalnProj)
    nn.Module.__init__(adaln)
    adaln.expand_ratio, adaln.modality_num, adaln.hidden_size = 6, MODALITIES, WIDTH
    adaln.linear = Pair(nn.Linear(TIME, 6 * MODALITIES * WIDTH, dtype=torch.bfloat16))
    made = dit.MiniMaxH3DiTBlock.__new__(dit.MiniMaxH3DiTBlock)
    nn.Module.__init__(made)
    made.norm1, made.norm2 = dit._norm(WIDTH, eps=1e-5), dit._norm(WIDTH, eps=1e-5)
    made.attn, made.mlp, made.adaln_proj = Recorder(), nn.Identity(), adaln
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def block_arguments(seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    hidden = (3 * torch.randn(ROWS, WIDTH, generator=generator)).bfloat16()
    hidden[-5:] = 0  # padding rows are zeros
    return hidden, {
        "adaln_input": torch.randn(TIMESTEPS, TIME, generator=generator).bfloat16(),
        "combined_indices": torch.randint(0, TIMESTEPS * MODALITIES, (ROWS,), generator=generator),
    }


REST = {"rope_cache": None, "cu_seqlens": None, "max_seqlen": ROWS}


@pytest.mark.parametrize("seed", range(4))
def test_probe_is_what_the_block_hands_to_its_attention(block: nn.Module, seed: int) -> None:
    hidden, arguments = block_arguments(seed)
    before = hidden.clone()
    probe = first_block_probe(block)(hidden, **arguments, **REST)
    assert torch.equal(hidden, before), "the probe changed the block's input"
    assert not probe.requires_grad
    block(hidden, **arguments, **REST)
    assert probe.dtype == torch.bfloat16
    assert torch.equal(probe, block.attn.seen)


def test_probe_uses_batched_adaln_parameters_where_sglang_passes_them(block: nn.Module) -> None:
    hidden, arguments = block_arguments(9)
    parameters = tuple(torch.randn(TIMESTEPS * MODALITIES, WIDTH).bfloat16() for _ in range(6))
    before = [parameter.clone() for parameter in parameters]
    probe = first_block_probe(block)(hidden, **arguments, **REST, adaln_params=parameters)
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True)), "the probe changed its parameters"
    block(hidden, **arguments, **REST, adaln_params=parameters)
    assert torch.equal(probe, block.attn.seen)


def test_probe_equals_sglangs_modulation_function(dit: ModuleType, block: nn.Module) -> None:
    hidden, arguments = block_arguments(10)
    shift, scale, *_ = block.adaln_proj(arguments["adaln_input"])
    expected = dit._modulate_scale_shift(
        block.norm1(hidden), shift, scale, arguments["combined_indices"], dtype=torch.bfloat16
    )
    assert torch.equal(first_block_probe(block)(hidden, **arguments), expected)


def test_probe_shares_no_memory_with_the_hidden_state(block: nn.Module) -> None:
    hidden, arguments = block_arguments(12)
    probe = first_block_probe(block)(hidden, **arguments)
    kept = probe.clone()
    hidden.zero_()
    assert torch.equal(probe, kept)


def test_without_offload_there_is_nothing_to_wait_for() -> None:
    wait_for_first_block(nn.Linear(1, 1))()
    wait_for_first_block(SimpleNamespace(layerwise_offload_managers=[]))()


def test_probe_reads_block_0_although_layerwise_offload_released_it(
    dit: ModuleType, block: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe never calls block 0, so SGLang's pre-hook, which brings the weights, does not run before it."""
    offload = sglang_on_cpu.module("sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload")
    # A CPU has neither streams nor events; SGLang's manager only needs the names.
    stream = SimpleNamespace(wait_stream=lambda other: None, wait_event=lambda event: None)
    for name, value in {
        "current_device": lambda: 0,
        "Stream": lambda *a, **k: stream,
        "Event": lambda *a, **k: SimpleNamespace(record=lambda stream=None: None),
        "current_stream": lambda *a: stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cpu, name, value)

    hidden, arguments = block_arguments(13)
    expected = first_block_probe(block)(hidden, **arguments)
    model = nn.Module()
    model.blocks = nn.ModuleList([block, nn.Linear(2, 2)])
    manager = offload.LayerwiseOffloadManager(
        model, layers_attr_str="blocks", num_layers=2, enabled=True, pin_cpu_memory=False
    )
    model.layerwise_offload_managers = [manager]
    manager.release_all()
    assert block.norm1.weight.shape == (1,), "the manager did not take the weights away"
    with pytest.raises(RuntimeError):
        first_block_probe(block)(hidden, **arguments)
    probe = first_block_probe(block, make_resident=wait_for_first_block(model))
    assert torch.equal(probe(hidden, **arguments), expected)
    assert manager._gpu_layers == {0}, "other blocks were transferred"
