"""Which attention really ran in which layer and forward, and how much of it was exact?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from config.record import Attention, CacheDecision, Layout
from config.schema import SolAttn
from verify.derive import of_sample
from verify.findings import AS_WRITTEN, Scribe
from verify.reader import ArmEvidence, Record
from verify.solattn import BLOCK, band_floor

RERUN = "run the arm again; a replacement did not take hold"

# SGLang 0.5.17, runtime/layers/attention/backends: name of the setting to the class that then computes.
IMPLEMENTATIONS = {
    "torch_sdpa": "SDPAImpl",
    "torch_cudnn_sdpa": "CudnnSDPAImpl",
    "dynamic_cudnn_sdpa": "DynamicCudnnSDPAImpl",
    "fa": "FlashAttentionImpl",
    "fa2": "FlashAttention2Impl",
    "sage_attn": "SageAttentionImpl",
    "sage_attn_3": "SageAttention3Impl",
}
# What PyTorch runs on a GPU for a setting that leaves it no choice; the others name what they found, and no more.
OPERATORS = {"torch_cudnn_sdpa": "aten::_scaled_dot_product_cudnn_attention"}


def backends(record: Record, say: Scribe) -> None:
    """Dense calls ran on the lock's backend, sparse calls on the arm's, and nothing fell back to another."""
    asked, on_gpu = record.target.attention, record.target.hardware.kind != "cpu"
    dense = IMPLEMENTATIONS.get(asked)
    if dense is None:
        say.warn(f"no class of SGLang is known for backend {asked!r}", "dense calls cannot be compared with the lock")
    for arm in record.arms.values():
        sparse = record.lookup(arm).sparse
        for rank in arm.events:
            where = f"{arm.folder}events-rank{rank}.jsonl"
            for mode, name in {(event.mode, event.backend) for event in arm.of(rank, Attention)}:
                ran, _, operator = name.partition("/")
                if mode == "dense" and dense is not None and ran != dense:
                    say.fail(f"dense attention ran on {name}; asked: {asked} ({dense})", RERUN, where)
                elif mode == "dense" and operator == "unknown":
                    say.warn(f"what {ran} ran could not be told", "how strong the dense baseline is, is unknown", where)
                elif mode == "dense" and on_gpu and operator and operator != OPERATORS.get(asked, operator):
                    say.fail(f"{ran} ran {operator}; asked: {asked} ({OPERATORS[asked]})", RERUN, where)
                if mode == "sparse" and name.partition("/")[0] != sparse:
                    say.fail(f"sparse attention ran on {name}; asked: {sparse}", RERUN, where)
    say.conclude(f"dense calls on {asked}, sparse calls on the backend of their arm")


def policy(record: Record, say: Scribe) -> None:
    """Every layer of every computed forward ran once, sparse exactly where the policy says so; a reused forward ran
    none. Nothing is told of a forward that the request does not have: densities and counts are taken over all calls.
    """
    depths = {arm.name: _depth(arm) for arm in record.arms.values() if arm.timings}
    if 0 in depths.values() or len(set(depths.values())) > 1:
        say.invalid(f"layers seen by arm: {depths}; needed: one number, and not 0", AS_WRITTEN, "arms/")
    for arm in record.arms.values():
        layers = _depth(arm)
        for sample, timing in arm.timings.items():
            for rank in arm.events:
                decisions = {event.step: event.action for event in of_sample(arm, rank, sample, CacheDecision)}
                calls = _by_step(of_sample(arm, rank, sample, Attention))
                where, forwards = f"{arm.folder}events-rank{rank}.jsonl", range(timing.num_inference_steps - 1)
                strays = sorted({*decisions, *calls} - {*forwards})
                if strays:
                    text = f"sample {sample}: an event of forward {strays[0]}, and the request has {len(forwards)}"
                    say.invalid(text, AS_WRITTEN, where)
                for step in forwards:
                    reused = decisions.get(step) == "reuse"
                    expected = _expected(record, arm, step, layers, reused)
                    if calls.get(step, {}) != expected:
                        fault = _describe(calls.get(step, {}), expected)
                        say.fail(f"sample {sample}, forward {step}: {fault}", RERUN, where)
                        break
        say.conclude(f"{layers} layers a computed forward, sparse where the policy says so", arm.folder)


def _depth(arm: ArmEvidence) -> int:
    """Layers of the model, which the lock does not name: those that any forward of the arm ran."""
    return 1 + max(
        (layer for rank in arm.events for event in arm.of(rank, Attention) for layer in event.layers), default=-1
    )


def _by_step(events: Iterable[Any]) -> dict[int, dict[int, str]]:
    """Mode by layer by step; a layer that was called twice has mode `twice`."""
    steps: dict[int, dict[int, str]] = {}
    for event in events:
        modes = steps.setdefault(event.step, {})
        for layer in event.layers:
            modes[layer] = "twice" if layer in modes else event.mode
    return steps


def _expected(record: Record, arm: ArmEvidence, step: int, layers: int, reused: bool) -> dict[int, str]:
    sol = record.target.sol_attn
    sparse = record.lookup(arm).sparse != "none" and step >= sol.dense_steps
    if reused:
        # FirstBlockCache always runs block 0, which is where its signal comes from; TeaCache skips the whole stack.
        ran = range(1 if record.target.cache.kind == "firstblockcache" else 0)
    else:
        ran = range(layers)
    return {layer: "sparse" if sparse and layer >= sol.dense_layers else "dense" for layer in ran}


def _describe(found: dict[int, str], expected: dict[int, str]) -> str:
    wrong = sorted(layer for layer in {*found, *expected} if found.get(layer) != expected.get(layer))
    layer = wrong[0]
    shown = f"layer {layer} was {found.get(layer, 'not run')}; policy: {expected.get(layer, 'not run')}"
    return shown + (f" (and {len(wrong) - 1} more layers)" if len(wrong) > 1 else "")


def densities(record: Record, say: Scribe) -> None:
    """Each sparse call counts as many blocks as the document has, and no head routed fewer than the forced ones or
    more than all.
    """
    arms = record.sparse_arms()
    if not arms:
        say.skip("no arm has Sol-Attn")
        return
    calls = 0
    for arm in arms:
        for rank in arm.events:
            layouts = {event.sample: event for event in arm.of(rank, Layout)}
            for event in arm.of(rank, Attention):
                if event.mode == "sparse":
                    calls += 1
                    fault = _density_fault(event, layouts.get(event.sample), record.target.sol_attn)
                    if fault:
                        at = f"sample {event.sample}, forward {event.step}, layer {event.layers}"
                        say.invalid(f"{at}: {fault}", AS_WRITTEN, f"{arm.folder}events-rank{rank}.jsonl")
        _heads(say, arm)
    say.conclude(f"{calls} sparse calls, each between its forced blocks and all blocks")


def _density_fault(event: Attention, layout: Layout | None, sol: SolAttn) -> str:
    if layout is None:
        return "no layout precedes it"
    blocks = -(-layout.live_tokens // sol.block)
    if event.blocks != blocks or sol.block != BLOCK:
        return f"{event.blocks} blocks; {layout.live_tokens} rows are {blocks}"
    if not event.routed:
        return "no head is counted"
    least, most = band_floor(blocks, layout.sink), blocks * blocks
    outside = [count for count in event.routed if not least <= count <= most]
    return f"a head routed {outside[0]} blocks; possible: {least} to {most}" if outside else ""


def _heads(say: Scribe, arm: ArmEvidence) -> None:
    counts = {
        (rank, len(event.routed)) for rank in arm.events for event in arm.of(rank, Attention) if event.mode == "sparse"
    }
    if len({heads for _, heads in counts}) > 1:
        say.invalid("calls or ranks count different numbers of heads", AS_WRITTEN, arm.folder)
