"""FLOPs and bytes of one forward of the DiT: dense, sparse at a density, or reused from a cache.

As SGLang 0.5.17 computes it (`runtime/models/dits/minimax_h3.py`): linear layers over all rows of the packed document,
padding included; attention over the live ones; with Ulysses, rows spread over the GPUs outside attention and heads
inside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from config.architecture import Architecture, Dit
from config.record import Layout
from config.schema import Request, Span, Target
from verify.roofline.work import HALF, SINGLE, Operation, Stage, Traffic, elementwise, linear
from verify.solattn import BLOCK

Cache = Literal["teacache", "firstblockcache"]
ROUTED, MEANS, DENSE = "attention, routed blocks", "attention, block means", "attention"
PRODUCTS = ("qkv_proj", "out_proj", "fc1", "fc2")


@dataclass(frozen=True)
class Document:
    """Rows of a packed document: `total` with padding, of them `live`; of these text, audio and generated video.

    dense_rows: query rows that a sparse call attends densely.
    """

    total: int
    live: int
    text: int
    audio: int
    video: int
    dense_rows: int

    @classmethod
    def of(cls, request: Request, architecture: Architecture, text: int, dense_rows: Span) -> Document:
        """The document of a request with `text` tokens (SGLang: `minimax_h3/time_request.py`, `packed_sequence.py`)."""
        video, dit = architecture.video, architecture.dit
        patch = 2 * video.patch  # pixels of a row's edge: two latents
        rows = latents(request.frames) * (request.height // patch) * (request.width // patch)
        audio = architecture.audio.outputs * audio_latents(request, architecture)
        live = text + audio + rows
        return cls(
            total=-(-live // dit.alignment) * dit.alignment,
            live=live,
            text=text,
            audio=audio,
            video=rows,
            dense_rows={"prefix": text + audio, "text": text, "none": 0}[dense_rows],
        )

    @classmethod
    def found(cls, layout: Layout) -> Document:
        """The document that a run found."""
        condition = _length(layout.condition) if layout.condition else 0
        return cls(
            total=layout.total_tokens,
            live=layout.live_tokens,
            text=_length(layout.text),
            audio=_length(layout.audio),
            video=_length(layout.video) + condition,
            dense_rows=_length(layout.dense_rows),
        )


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def latents(frames: int) -> int:
    """Temporal latents of a video: 17 frames to five, and two for the first five."""
    return 2 if frames <= 5 else (frames - 5) // 17 * 5 + 2


def audio_latents(request: Request, architecture: Architecture) -> int:
    """Latents of one audio channel."""
    return round(request.frames / request.fps * architecture.audio.latents_per_second)


@dataclass(frozen=True)
class Machine:
    """What of a target decides which GPU does what, and what is fetched."""

    gpus: int = 1
    sharded: bool = False
    offloaded: tuple[str, ...] = ()
    resident_layers: float = 0

    @classmethod
    def of(cls, target: Target) -> Machine:
        """The machine of a target."""
        return cls(
            gpus=target.parallel.num_gpus,
            sharded=target.parallel.fsdp and target.parallel.num_gpus > 1,
            offloaded=target.offload.components,
            resident_layers=target.offload.resident_layers,
        )

    def others(self, size: float) -> float:
        """What comes from the other GPUs when each holds an equal part of `size`."""
        return size * (self.gpus - 1) / self.gpus


@dataclass(frozen=True)
class Model:
    """The DiT with one document on one machine; its methods are the kinds of forward."""

    dit: Dit
    document: Document
    machine: Machine

    @property
    def rows(self) -> float:
        """Rows of one GPU outside attention."""
        return self.document.total / self.machine.gpus

    @property
    def width(self) -> float:
        """Width of one GPU's heads inside attention."""
        return self.dit.inner / self.machine.gpus

    @property
    def hidden(self) -> float:
        """Elements of one GPU's hidden state."""
        return self.rows * self.dit.hidden

    def refiner(self) -> Stage:
        """Once a request: the prompt's projection and the token refiner, on every GPU the same."""
        dit, text = self.dit, self.document.text
        each = dit.refiner_layers
        operations = [
            linear("condition_proj", text, (dit.text, dit.hidden), bias=True),
            *(linear(name, text, shape, count=each) for name, shape in dit.linears.items()),
            Operation(DENSE, "attention", 4 * text**2 * dit.inner, 4 * text * dit.inner * HALF, count=each),
            elementwise("norms and residuals", 8 * text * dit.hidden, count=each),
            elementwise("query and key norms", 4 * text * dit.inner, count=each),
            elementwise("SiLU product", 3 * text * dit.ffn, count=each),
        ]
        return Stage("token refiner", tuple(operations), gpus=self.machine.gpus)

    def forward(self, density: float | None = None, sparse_layers: int = 0, cache: Cache | None = None) -> Stage:
        """A computed forward: all blocks, of them `sparse_layers` sparse at `density`; `cache` decides and records."""
        name = "forward, dense" if density is None or not sparse_layers else f"forward, sparse at {density:.2%}"
        operations = [
            *self._embedding(),
            *self._blocks(self.dit.layers - (sparse_layers if density is not None else 0), attention=True),
            *(self._sparse_blocks(density, sparse_layers) if density is not None and sparse_layers else ()),
            *self._bookkeeping(cache, reuse=False),
            *self._head(),
        ]
        return Stage(name, tuple(operations), self._traffic(self.dit.layers), self.machine.gpus)

    def reused(self, cache: Cache, density: float | None = None) -> Stage:
        """A forward whose stack the cache replaces: TeaCache runs no block, FirstBlockCache the first, which is sparse
        at `density` where no layer stays dense."""
        blocks = 1 if cache == "firstblockcache" else 0
        inputs, outputs = self.dit.adaln
        probe = [linear("adaln_proj", self.dit.timesteps, (inputs, outputs), bias=True)] if not blocks else []
        operations = [
            *self._embedding(),
            *(self._blocks(blocks, attention=True) if density is None else self._sparse_blocks(density, blocks)),
            *probe,
            *self._bookkeeping(cache, reuse=True),
            *self._head(),
        ]
        name = {"teacache": "forward, reused by TeaCache", "firstblockcache": "forward, reused by FirstBlockCache"}
        return Stage(name[cache], tuple(operations), self._traffic(blocks), self.machine.gpus)

    def _embedding(self) -> list[Operation]:
        dit, document, gpus = self.dit, self.document, self.machine.gpus
        return [
            linear(
                "patch projections",
                rows / gpus,
                (inputs, dit.hidden),
                bias=True,
                precision="fp32",
                output=HALF,
                kind="rest",
            )
            for rows, inputs in ((document.video, dit.video_row), (document.audio, dit.audio_row))
        ] + [
            elementwise("text rows", 2 * document.text / gpus * dit.hidden),
            *(
                linear("time embedder", dit.timesteps, shape, bias=True, precision="fp32", kind="rest")
                for shape in ((dit.time_input, dit.time_hidden), (dit.time_hidden, dit.time))
            ),
        ]

    def _blocks(self, count: int, *, attention: bool) -> list[Operation]:
        if not count:
            return []
        dit, live = self.dit, self.document.live
        dense = Operation(DENSE, "attention", 4 * live**2 * self.width, 4 * live * self.width * HALF, count=count)
        return [
            *([dense] if attention else []),
            *(linear(name, self.rows, shape, count=count) for name, shape in dit.linears.items()),
            linear("adaln_proj", dit.timesteps, dit.adaln, bias=True, count=count),
            # two chains of four tensors: what was before and the residual in; their sum and its modulated norm out
            elementwise("norms, modulation, residuals", 8 * self.hidden, count=count),
            elementwise("query and key norms, rotary", 4 * self.rows * dit.inner, count=count),
            elementwise("SiLU product", 3 * self.rows * dit.ffn, count=count),
        ]

    def _sparse_blocks(self, density: float, count: int) -> list[Operation]:
        """Sol-Attn (arXiv 2607.24027): routed blocks exactly, and every row against the means of all key blocks, whose
        scores both route and stand for the blocks that were not routed."""
        live, dense_rows = self.document.live, self.document.dense_rows
        pairs = live * ((live - dense_rows) * density + dense_rows)
        blocks = math.ceil(live / BLOCK)
        return [
            Operation(ROUTED, "attention", 4 * pairs * self.width, 4 * live * self.width * HALF, count=count),
            # the means need a pass over queries, keys and values of their own
            Operation(MEANS, "attention", 4 * live * blocks * self.width, 3 * live * self.width * HALF, count=count),
            *self._blocks(count, attention=False),
        ]

    def _bookkeeping(self, cache: Cache | None, *, reuse: bool) -> list[Operation]:
        """What a cache reads and writes, in hidden states: its check, then what it keeps or adds."""
        if cache is None:
            return []
        # TeaCache: hidden and last probe in, probe out. FirstBlockCache: block 0's input kept, read, last head in, out
        check = 3 if cache == "teacache" else 4
        # a stack's input or block 0's output kept, read at the end, the residual out; or hidden and residual in
        return [elementwise("cache", (check + (2 if reuse else 3)) * self.hidden)]

    def _head(self) -> list[Operation]:
        dit = self.dit
        return [
            linear("final adaln_proj", dit.timesteps, (dit.time, 2 * dit.hidden), bias=True, kind="rest"),
            elementwise("final norm", self.hidden, SINGLE),  # out, in FP32; in: the last block's chain or the cache
            *(
                linear("output projections", self.rows, (dit.hidden, outputs), bias=True, precision="fp32", kind="rest")
                for outputs in (dit.video_row, dit.audio_row)
            ),
        ]

    def _traffic(self, blocks: int) -> Traffic:
        dit, machine = self.dit, self.machine
        streamed = max(blocks - machine.resident_layers, 0) if "dit" in machine.offloaded else 0
        # queries, keys and values to where their heads are, the output back to where its rows are
        heads = 4 * self.rows * dit.inner * HALF
        logits = self.document.total * (dit.video_row + dit.audio_row) * SINGLE
        return Traffic(
            host=streamed * dit.block_parameters * HALF,
            gathered=machine.others(blocks * dit.block_parameters * HALF) if machine.sharded else 0,
            exchanged=machine.others(blocks * heads + logits) if machine.gpus > 1 else 0,
        )
