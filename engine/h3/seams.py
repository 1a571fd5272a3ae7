"""The seams into SGLang's MiniMax-H3: observers for every arm, replacements for the arms that ask for them.

Three places are enough, and no model code is copied:

* the name `_minimax_h3_attention_core_bcg`, which the main blocks' attention looks up at every call (the token
  refiner does not);
* iteration over `model.blocks`, whose class becomes a ModuleList that yields what the cache says;
* `_run_full_loop` and `_forward_dit` of the denoising stage, which tell where a request and a forward begin.

A stock arm gets the observers alone: its attention, its blocks and its decode are SGLang's own.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from config.record import CacheDecision
from config.schema import TeaCache as TeaCacheConfig
from engine.cache import decision
from engine.cache.base import BlockStackCache
from engine.cache.first_block_cache import FirstBlockCache
from engine.cache.h3_probe import first_block_probe, wait_for_first_block
from engine.cache.teacache import TeaCache
from engine.h3.latents import observe_latents
from engine.h3.operators import name_operators
from engine.h3.sparse import sparse_attention
from engine.h3.tracker import Tracker

DIT = "sglang.multimodal_gen.runtime.models.dits.minimax_h3"
STAGE_BASE = "sglang.multimodal_gen.runtime.pipelines_core.stages.base"
STAGES = "sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.stages."
OFFLOAD = "sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload"


def synchronise() -> None:
    """Wait for the device, so that a stopwatch measures work and not its submission."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def install_observers(tracker: Tracker) -> str:
    """Tell the tracker where requests and forwards begin and end. Changes no result; synchronises at each forward's
    ends."""
    stage = importlib.import_module(STAGES + "denoising").MiniMaxH3DenoisingStage
    run_full_loop, forward_dit = stage._run_full_loop, stage._forward_dit

    def observed_loop(self: Any, batch: Any, server_args: Any) -> None:
        tracker.begin_request()
        synchronise()
        began = time.perf_counter()
        run_full_loop(self, batch, server_args)
        synchronise()
        tracker.end_request(time.perf_counter() - began)

    def observed_forward(self: Any, model: Any, call_kwargs: dict[str, Any], step_index: int, *, batch: Any) -> Any:
        tracker.begin_step(step_index, call_kwargs)
        timestep = float(call_kwargs["unique_timesteps"].max())
        synchronise()
        began = time.perf_counter()
        out = forward_dit(self, model, call_kwargs, step_index, batch=batch)
        synchronise()
        seconds = time.perf_counter() - began
        if tracker.policy.stock:
            observe_stock_attention(tracker, model)
        name_operators(tracker.operators, model, out[0].device)
        tracker.end_step(seconds, timestep)
        return out

    stage._run_full_loop, stage._forward_dit = observed_loop, observed_forward
    return "observe.denoising"


def install_stage_observer(tracker: Tracker) -> str:
    """Time each pipeline stage of a request, device synchronised at its end."""
    base = importlib.import_module(STAGE_BASE).PipelineStage
    call = base.__call__

    def observed(self: Any, batch: Any, server_args: Any) -> Any:
        tracker.begin_stage()
        began = time.perf_counter()
        out = call(self, batch, server_args)
        synchronise()
        tracker.end_stage(type(self).__name__, time.perf_counter() - began)
        return out

    base.__call__ = observed
    return "observe.stages"


def observe_stock_attention(tracker: Tracker, model: Any) -> None:
    """Which attention implementation each block of a stock model has just used: SGLang keeps it on the module."""
    for layer, block in enumerate(model.blocks):
        tracker.dense.setdefault(type(block.attn._attention_impl).__name__, []).append(layer)


def install_offload_observer(tracker: Tracker) -> str:
    """Count the layer loads of SGLang's layer-wise offload: a skipped block must load nothing."""
    manager = importlib.import_module(OFFLOAD).LayerwiseOffloadManager
    prefetch = manager.prefetch_layer

    def counted(self: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        before = layer in self._gpu_layers
        out = prefetch(self, layer, *args, **kwargs)
        if not before and layer in self._gpu_layers:
            name = self.layers_attr_str
            tracker.loads[name] = tracker.loads.get(name, 0) + 1
        return out

    manager.prefetch_layer = counted
    return "observe.layerwise_offload"


def install_block_stack(tracker: Tracker, make_cache: Callable[[Any], BlockStackCache | None]) -> str:
    """Number the blocks' attentions, and let `make_cache(model)` decide which blocks of the stack run."""
    dit = importlib.import_module(DIT)

    class BlockStack(torch.nn.ModuleList):
        """SGLang's blocks; while a forward runs, iteration yields what the cache says. Skipped blocks are never
        called."""

        running = False

        def __iter__(self) -> Iterator[Any]:
            blocks = list(super().__iter__())
            if not self.running or tracker.cache is None:
                return iter(blocks)
            return tracker.cache.forward_blocks(tracker.step, blocks)

    init, forward = dit.MiniMaxH3DiTModel.__init__, dit.MiniMaxH3DiTModel.forward

    def numbered(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for layer, block in enumerate(self.blocks):
            block.attn.sol_layer = layer
        self.blocks.__class__ = BlockStack

    def running(self: Any, **kwargs: Any) -> Any:
        if tracker.cache is None and (cache := make_cache(self)) is not None:
            tracker.cache = cache
            cache.begin_request(tracker.forwards, compute_last=tracker.compute_last)
        self.blocks.running = True
        try:
            return forward(self, **kwargs)
        finally:
            self.blocks.running = False

    dit.MiniMaxH3DiTModel.__init__, dit.MiniMaxH3DiTModel.forward = numbered, running
    return "replace.block_stack"


def cache_factory(tracker: Tracker) -> Callable[[Any], BlockStackCache | None]:
    """Makes the target's cache for a model, or none where the arm has none."""
    config = tracker.target.cache

    def report(taken: decision.Decision) -> None:
        tracker.log.write(
            CacheDecision,
            sample=tracker.sample,
            step=taken.step,
            kind=config.kind,
            action=taken.action,
            reason=taken.reason,
            signal=taken.signal,
            rescaled=taken.rescaled,
            accumulator=taken.accumulator,
        )

    def make(model: Any) -> BlockStackCache | None:
        if not tracker.policy.cache:
            return None
        if isinstance(config, TeaCacheConfig):
            policy = decision.TeaCachePolicy(
                config.threshold, config.retain_steps, config.cooldown_steps, config.coefficients, config.replay
            )
            block = next(iter(model.blocks))
            probe = first_block_probe(block, make_resident=wait_for_first_block(model))
            return TeaCache(policy, probe, all_reduce=sum_over_ranks, on_decision=report)
        return FirstBlockCache(
            decision.FirstBlockCachePolicy(config.threshold, config.replay),
            all_reduce=sum_over_ranks,
            on_decision=report,
        )

    return make


def sum_over_ranks(sums: torch.Tensor) -> torch.Tensor:
    """Sum over the default process group, so that all ranks take the same branch; one rank keeps its own."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    return sums


def install_attention(tracker: Tracker) -> str:
    """Replace the main blocks' attention core: Sol-Attn where the policy wants it, SGLang's own core everywhere
    else."""
    dit = importlib.import_module(DIT)
    stock = dit._minimax_h3_attention_core_bcg

    def core(
        attention: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor,
        cu_seqlens_host: tuple[int, ...] | None,
        max_seqlen: int,
        ulysses_active: bool,
    ) -> torch.Tensor:
        layer: int = attention.sol_layer
        if not tracker.is_sparse(layer):
            out: torch.Tensor = stock(
                attention,
                q,
                k,
                v,
                cu_seqlens=cu_seqlens,
                cu_seqlens_host=cu_seqlens_host,
                max_seqlen=max_seqlen,
                ulysses_active=ulysses_active,
            )
            tracker.dense.setdefault(type(attention._attention_impl).__name__, []).append(layer)
            return out
        if ulysses_active:
            usp = importlib.import_module("sglang.multimodal_gen.runtime.layers.usp")
            q, k, v = usp._usp_input_all_to_all_packed_qkv(q, k, v)
        out = sparse_attention(tracker, layer, attention.softmax_scale, q, k, v)
        if ulysses_active:
            out = usp._usp_output_all_to_all(out[None], head_dim=2)[0]
        return out

    # Outside the graph, as published; traced, it would be compiled anew for every block's number.
    dit._minimax_h3_attention_core_bcg = torch.compiler.disable(core)  # type: ignore[attr-defined]
    return f"replace.attention_core({tracker.policy.sparse})"


def uncompiled_decode(vae: Any, server_args: Any, *, decode_fn: Any = None, compiled_callable: Any = None) -> Any:
    """In the place of DecodingStage._get_vae_decode_fn: the decode as it is. SGLang compiles it where the DiT is
    compiled; the published runs did not (H3_FULL_VAE_TORCH_COMPILE = 0)."""
    return decode_fn or vae.decode


def install_decode_residency(tracker: Tracker) -> str:
    """Keep the video VAE on the device, in the target's dtype and uncompiled, for the length of a decode; offload it
    again afterwards."""
    stage = importlib.import_module(STAGES + "decoding").MiniMaxH3DecodingStage
    forward = stage.forward
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "unchanged": None}
    dtype = dtypes[tracker.target.vae.dtype]

    def resident(self: Any, *args: Any, **kwargs: Any) -> Any:
        vae = self.video_vae
        self._get_vae_decode_fn = uncompiled_decode
        synchronise()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if hasattr(vae, "disable_offload"):
            vae.disable_offload()
        if dtype is not None:
            vae.to(dtype)
        try:
            return forward(self, *args, **kwargs)
        finally:
            if hasattr(vae, "enable_offload"):
                vae.enable_offload()

    stage.forward = resident
    return f"replace.decode_residency({tracker.target.vae.dtype})"


def install(tracker: Tracker) -> list[str]:
    """Install what the arm asks for, in this process, before the pipeline is built. Returns the names for the
    record."""
    installed = [install_observers(tracker)]
    if tracker.rank == 0:
        stage = importlib.import_module(STAGES + "denoising").MiniMaxH3DenoisingStage
        installed.append(observe_latents(tracker, stage))  # around the stopwatch of the loop
    installed.append(install_stage_observer(tracker))
    if "dit" in tracker.target.offload.components:
        installed.append(install_offload_observer(tracker))
    if not tracker.policy.stock:
        installed.append(install_block_stack(tracker, cache_factory(tracker)))
        installed.append(install_attention(tracker))
    if tracker.policy.vae_resident and tracker.target.vae.resident_after_denoise:
        installed.append(install_decode_residency(tracker))
    return installed
