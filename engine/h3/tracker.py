"""Where a worker is: which request, which forward, which document. The seams ask it, and it writes the events."""

from __future__ import annotations

import resource
from typing import Any, NamedTuple

import torch

from config.record import Attention, Layout, Memory, OffloadLoads, Phase, RequestEnd, RequestStart, Stage, Step
from engine.cache.base import BlockStackCache
from engine.evidence import EventLog
from engine.h3.layout import PackedLayout, find_layout
from engine.h3.spec import ArmSpec

LAST_STAGE = "MiniMaxH3DecodingStage"


class RoutedCall(NamedTuple):
    """A sparse call of the running forward: its block's number, what computed it, query blocks, and the routed key
    blocks of each head, [H] int64, on the device."""

    layer: int
    backend: str
    blocks: int
    routed: torch.Tensor


class Tracker:
    """Where the worker is: which request, which forward, which layout. One per process; SGLang runs one request at a
    time."""

    def __init__(self, spec: ArmSpec, rank: int, log: EventLog) -> None:
        self.spec, self.rank, self.log = spec, rank, log
        self.target, self.policy = spec.lock.resolved, spec.policy
        self.layout: PackedLayout | None = None
        self.step = -1
        self.dense: dict[str, list[int]] = {}
        self.operators: dict[str, str] = {}  # class of SGLang -> what it runs
        self.routed: list[RoutedCall] = []
        self.gated = False
        self.loads: dict[str, int] = {}
        self.cache: BlockStackCache | None = None
        self._remaining = list(spec.requests)
        self._request = self._remaining[0]
        self._forwards = 0
        self._begun = False

    @property
    def sample(self) -> int:
        """The running request's sample number."""
        return self._request.sample

    @property
    def phase(self) -> Phase:
        """Whether the running request warms up or is measured."""
        return self._request.phase

    @property
    def forwards(self) -> int:
        """DiT forwards of the running request: the sigma grid ends in 0."""
        return self._request.num_inference_steps - 1

    @property
    def compute_last(self) -> bool:
        """Whether the running request's last forward computes whatever the cache says."""
        return self.phase == "warmup" and self.target.warmup.compute_last

    def begin_request(self) -> None:
        """The next request of the spec begins; nothing of the one before it stays."""
        self._request = self._remaining[0]
        self.layout, self.step, self._forwards = None, -1, 0
        self.loads.clear()
        self.log.write(RequestStart, **self._request.model_dump(exclude={"sample"}), sample=self.sample)
        if self.cache is not None:
            self.cache.begin_request(self.forwards, compute_last=self.compute_last)

    def end_request(self, seconds: float) -> None:
        """The denoising loop came back."""
        if self.cache is not None:
            self.cache.end_request()
        if self.loads:
            self.log.write(OffloadLoads, sample=self.sample, loads=dict(self.loads))
        self.log.write(RequestEnd, sample=self.sample, seconds=seconds, forwards=self._forwards)

    def begin_stage(self) -> None:
        """A pipeline stage begins. The allocator's peaks are those of a whole request: text encoding and decode may
        need more than the denoising loop, and SGLang's own figure holds them too."""
        if not self._begun and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._begun = True

    def end_stage(self, name: str, seconds: float) -> None:
        """A pipeline stage of the running request ended; the decoding stage is the last of a request."""
        sample = self._remaining[0].sample
        self.log.write(Stage, sample=sample, name=name, seconds=seconds)
        if name == LAST_STAGE:
            self.log.write(Memory, sample=sample, **peak_memory())
            self._remaining.pop(0)
            self._begun = False

    def begin_step(self, step: int, arguments: dict[str, Any]) -> None:
        """A DiT forward begins. The layout is read from the first one's own tensors."""
        self.step = step
        self.dense.clear()
        self.routed.clear()
        if self.layout is None:
            self.layout = layout_of(arguments)
            policy, layout = self.target.sol_attn, self.layout
            self.log.write(
                Layout,
                sample=self.sample,
                total_tokens=layout.total_tokens,
                live_tokens=layout.live_tokens,
                text=layout.text,
                condition=layout.condition,
                audio=layout.audio,
                video=layout.video,
                sink=layout.sink_range(policy.sink),
                dense_rows=layout.dense_rows_range(policy.dense_rows),
                cu_seqlens=layout.cu_seqlens,
            )

    def end_step(self, seconds: float, timestep: float) -> None:
        """A DiT forward ended."""
        for call, counts in zip(self.routed, self._route_counts(), strict=True):
            self.log.write(
                Attention,
                sample=self.sample,
                step=self.step,
                layers=(call.layer,),
                backend=call.backend,
                mode="sparse",
                blocks=call.blocks,
                routed=tuple(counts),
            )
        for backend, layers in self.dense.items():
            if backend in self.operators:
                backend = f"{backend}/{self.operators[backend]}"
            self.log.write(
                Attention, sample=self.sample, step=self.step, layers=tuple(layers), backend=backend, mode="dense"
            )
        self.log.write(Step, sample=self.sample, step=self.step, seconds=seconds, timestep=timestep)
        self._forwards += 1

    def _route_counts(self) -> list[list[int]]:
        """Routed blocks of each head, call by call: one copy to the host a forward."""
        counts: list[list[int]] = torch.stack([call.routed for call in self.routed]).tolist() if self.routed else []
        return counts

    def is_sparse(self, layer: int) -> bool:
        """Whether the policy wants Sol-Attn in this layer of the current forward."""
        policy = self.target.sol_attn
        return self.policy.sparse != "none" and self.step >= policy.dense_steps and layer >= policy.dense_layers


def peak_memory() -> dict[str, float]:
    """Peak resident set of the process, and the CUDA allocator's peaks, MiB."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if not torch.cuda.is_available():
        return {"rss_mib": rss, "allocated_mib": 0.0, "reserved_mib": 0.0}
    return {
        "rss_mib": rss,
        "allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
        "reserved_mib": torch.cuda.max_memory_reserved() / 2**20,
    }


def layout_of(arguments: dict[str, Any]) -> PackedLayout:
    """The packed document of one DiT forward, from its keyword arguments (MiniMaxH3DiTModel.forward)."""
    image = arguments["img_pos_info"]["position_ids"]
    return find_layout(
        text_positions=arguments["text_pos_info"]["position_ids"],
        image_positions=image,
        audio_positions=arguments["audio_pos_info"]["position_ids"],
        cu_seqlens_host=arguments["packed_seq_params"]["cu_seqlens_q_host"],
        condition_rows=int(image.numel()) - int(arguments["img_pos_for_infer_output_info"]["position_ids"].numel()),
    )
