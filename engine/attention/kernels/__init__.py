"""Backend ``native``: Sol-Attn in Triton and Gluon, three steps without a synchronisation between them.

1. ``summaries``: query means, key means and value sums of every 64-token block, and the statistics of the key means;
2. ``lists``: thresholds, routes, and the compact lists that the attention step walks;
3. ``attend_sm90`` (compute capability 9.0, tensor memory accelerator) or ``attend_pointer`` (8.0 and above).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.call import SolAttentionOptions, SolAttentionResult
from engine.attention.kernels import attend_pointer, attend_sm90
from engine.attention.kernels.lists import route
from engine.attention.kernels.summaries import HEAD_DIM, UNPIPELINED, summarise
from engine.attention.routing import BLOCK

MAX_TOKENS = BLOCK << 23  # block numbers and row numbers are 32-bit in the kernels


@dataclass(frozen=True)
class Plan:
    """How one capability is served. variant names the attention kernel in ``result.backend``.

    group: query blocks that share K/V tiles; stages: K/V tiles in flight; rows: query blocks of a routing program;
    registers: a consumer thread's, SM90 only.
    """

    variant: str
    group: int
    stages: int
    rows: int = 16
    registers: int = 0


SM90 = Plan("sm90", group=3, stages=7, rows=64, registers=160)
# A stage holds 32 KiB of K and V, a query block 16 KiB: within SM80's 163 KiB of shared memory, and SM89's 99 KiB.
POINTER = {(8, 0): Plan("pointer-sm80", group=1, stages=3), (8, 9): Plan("pointer-sm89", group=1, stages=2)}
POINTER_OTHER = Plan("pointer", group=1, stages=UNPIPELINED)


def plan_for(capability: tuple[int, int]) -> Plan:
    """The plan for a device of this compute capability."""
    return SM90 if capability == (9, 0) else POINTER.get(capability, POINTER_OTHER)


def readable(plan: Plan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors [1, T, H, 128] as the plan's kernels read them: themselves, or on SM90 a packed copy of one whose
    strides or address the memory accelerator cannot take. SGLang's views of a fused tensor need none."""
    if plan.variant != SM90.variant:
        return tensors
    odd = (attend_sm90.unsupported_strides(x[0]) is not None for x in tensors)
    return tuple(x.clone(memory_format=torch.contiguous_format) if y else x for x, y in zip(tensors, odd, strict=True))


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, which is how they run on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions) -> str | None:
    """Why the kernels cannot do the call, or None when they can."""
    if q.shape[-1] != HEAD_DIM or q.dtype != torch.bfloat16:
        return f"q is {tuple(q.shape)} {q.dtype}; needed: bfloat16 with {HEAD_DIM} channels a head"
    if q.shape[1] >= MAX_TOKENS:
        return f"{q.shape[1]} tokens; needed: fewer than {MAX_TOKENS}"
    if q.device.type == "cpu" and interpreted():
        return None
    if q.device.type != "cuda":
        return f"q is on {q.device}; needed: a CUDA device (or TRITON_INTERPRET=1 for tiny shapes on the CPU)"
    capability = torch.cuda.get_device_capability(q.device)
    return None if capability >= (8, 0) else f"compute capability {capability}; needed: 8.0 or higher"


@torch.no_grad()
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: SolAttentionOptions,
    out: torch.Tensor | None = None,
    *,
    plan: Plan | None = None,
) -> SolAttentionResult:
    """Sol-Attn of q, k, v [1, T, H, 128] bfloat16; see ``engine.attention.sol_attention`` for the rest.

    plan: overrides the choice by capability (tests and the bench driver).
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    with _on(q.device):
        return _attend(q, k, v, options, out, plan or _plan_of(q.device))


@torch.no_grad()
def count_routes(q: torch.Tensor, k: torch.Tensor, options: SolAttentionOptions) -> torch.Tensor:
    """[N, H] int32: ``route_counts`` of a call whose attention another backend computes. q, k [1, T, H, 128] bfloat16.

    Reads q once and k twice (as the values, whose sums enter no route), and waits for nothing: 0.66 ms for the
    published shape on an H200, the summaries and routing of `engine.attention.bench`.
    """
    plan = _plan_of(q.device)
    with _on(q.device):
        return route(summarise(q, k, k, options.thresh_type), options, q.shape[1], plan.group, plan.rows).counts


def _plan_of(device: torch.device) -> Plan:
    return plan_for(torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0))


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions, out: torch.Tensor, plan: Plan
) -> SolAttentionResult:
    tokens, heads = q.shape[1:3]
    lse = torch.empty((1, tokens, heads), dtype=torch.float32, device=q.device) if options.return_lse else None
    given = q, k, v
    q, k, v = readable(plan, q, k, v)
    copied = "-copied" if any(x is not y for x, y in zip(given, (q, k, v), strict=True)) else ""
    summaries = summarise(q, k, v, options.thresh_type)
    lists = route(summaries, options, tokens, plan.group, plan.rows)
    step = (q[0], k[0], v[0], out[0], None if lse is None else lse[0], summaries, lists, options)
    if plan.variant == SM90.variant:
        attend_sm90.attend(*step, stages=plan.stages, registers=plan.registers)
        attend_pointer.repair(*step)
    else:
        attend_pointer.attend(*step, stages=plan.stages)
    return SolAttentionResult(out, lists.counts, lse, f"native/{plan.variant}{copied}")
