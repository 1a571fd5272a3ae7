"""MiniMax-H3's TeaCache probe: block 0's input after its first norm and its attention shift and scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.cache.teacache import Probe


def first_block_probe(block: Any, *, make_resident: Callable[[], None] | None = None) -> Probe:
    """The probe for `block`, SGLang's MiniMaxH3DiTBlock 0.

    probe = norm1(hidden) * (1 + scale[index]) + shift[index], rounded to BF16 after every operation like SGLang's own
    modulation, with one (shift, scale) row for each pair of timestep and modality. hidden and the result are BF16 [T,
    H]; the result shares no memory with hidden. Beside it, one more tensor of that size lives at a time.

    The probe reads the block's weights without calling the block, so its forward hooks do not fire. Under layer-wise
    offload they may still be in flight on the copy stream: pass `wait_for_first_block(model)`. FSDP shards a block's
    weights outside its own forward, and is not supported.

    Args:
        block: module with `norm1` and `adaln_proj`.
        make_resident: called before the block's weights are read.
    """

    @torch.no_grad()
    def probe(
        hidden: Tensor,
        *,
        adaln_input: Tensor,
        combined_indices: Tensor,
        adaln_params: tuple[Tensor, ...] | None = None,
        **_: Any,
    ) -> Tensor:
        if make_resident is not None:
            make_resident()
        shift, scale, *_others = block.adaln_proj(adaln_input) if adaln_params is None else adaln_params
        normed: Tensor = block.norm1(hidden)
        normed.mul_(scale.index_select(0, combined_indices).add_(1.0))
        return normed.add_(shift.index_select(0, combined_indices))

    return probe


def wait_for_first_block(model: object) -> Callable[[], None]:
    """A callable that makes block 0's weights present on the compute stream, as SGLang's own hook does before block 0.

    It loads what is not there and waits for the copy stream; where the block is present already it transfers nothing.
    Upstream reads the weights without waiting.

    Args:
        model: SGLang's MiniMaxH3DiTModel; without layer-wise offload the callable does nothing.
    """

    def wait() -> None:
        # Looked up at every call: SGLang replaces the managers when it configures offload, after the model is built.
        for manager in getattr(model, "layerwise_offload_managers", ()):
            if manager.enabled and manager.layers_attr_str == "blocks":
                manager.prepare_for_next_req(non_blocking=False)

    return wait
