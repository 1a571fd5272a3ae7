"""A target's stages, and what a request of each arm comes to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from config.architecture import PRESETS, PROMPT_TOKENS, Architecture
from config.ceilings import Ceilings, ceilings_of
from config.errors import UsageError
from config.lock import load_target
from config.published import published
from config.record import Layout
from config.schema import ARMS, Target
from verify.roofline.codec import audio_decode, text_encoding, video_decode
from verify.roofline.dit import Cache, Document, Machine, Model, audio_latents
from verify.roofline.work import Stage, floor
from verify.spread import possible

DENSITIES = ("density.mean", "density.first", "warmup.density.first")


@dataclass(frozen=True)
class Assumed:
    """A figure that the target does not fix, and who gave it; of computed forwards also which, where that is known."""

    value: float
    source: str
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A target's request on its machine. `ceilings` is None where none are known for the GPU."""

    target: Target
    architecture: Architecture
    document: Document
    gpu: str
    ceilings: Ceilings | None
    density: Assumed | None
    computed: Assumed | None

    @property
    def machine(self) -> Machine:
        """Who does what."""
        return Machine.of(self.target)

    @property
    def model(self) -> Model:
        """The DiT with this document on this machine."""
        return Model(self.architecture.dit, self.document, self.machine)

    @property
    def sparse_layers(self) -> int:
        """Layers that are sparse in a sparse forward."""
        return max(self.architecture.dit.layers - self.target.sol_attn.dense_layers, 0)

    def sparse(self, density: float, cache: Cache | None = None) -> Stage:
        """A sparse forward."""
        return self.model.forward(density, self.sparse_layers, cache)

    def before(self) -> list[Stage]:
        """What precedes the forwards: text encoding, and the part of denoising that is done once."""
        return [text_encoding(self.architecture.text, self.document.text, self.machine), self.model.refiner()]

    def after(self, *, resident: bool) -> list[Stage]:
        """What follows the forwards; `resident`: an offloaded video VAE is fetched once, not for every tile."""
        request = self.target.request
        return [
            video_decode(
                self.architecture.video,
                request.frames,
                request.width,
                request.height,
                self.machine,
                resident=resident,
            ),
            audio_decode(self.architecture.audio, audio_latents(request, self.architecture)),
        ]

    def stages(self) -> list[Stage]:
        """Every stage once, in the order of a request; each kind of forward, and each way to decode."""
        forwards = [self.model.forward()]
        if self.density is not None:
            forwards.append(self.sparse(self.density.value))
        forwards += [self.model.reused("teacache"), self.model.reused("firstblockcache")]
        streamed = [self.after(resident=False)[0]] if "vae" in self.machine.offloaded else []
        return [*self.before(), *forwards, *streamed, *self.after(resident=True)]


def plan_of(
    target: Target,
    *,
    gpu: str | None = None,
    layout: Layout | None = None,
    density: float | None = None,
    computed: int | None = None,
) -> Plan:
    """The plan of a target.

    Args:
        target: the resolved target.
        gpu: the CUDA device name that a run found; the target's own when None.
        layout: the document that a run found; computed from the request when None.
        density: of the sparse forwards; the published one of this policy when None.
        computed: forwards that the cache computes; the target's own list, or the published count, when None.

    Raises:
        UsageError: the prompt's tokens are not known, or a figure is out of its range.
    """
    architecture, forwards = PRESETS[target.checkpoint.preset], target.request.forwards
    if density is not None and not 0 <= density <= 1:
        raise UsageError(f"--density {density:g} is not a share", needed="0 to 1", remedy="--density 0.18")
    if computed is not None and not 1 <= computed <= forwards:
        raise UsageError(f"--computed {computed} of {forwards} forwards", needed=f"1 to {forwards}")
    if layout is None:
        text = PROMPT_TOKENS.get(target.request.prompt_sha256)
        if text is None:
            raise UsageError(
                f"how many tokens the prompt {target.request.prompt!r} has is not known without its tokenizer",
                remedy="--record RUN takes the document from a run of it",
            )
        document = Document.of(target.request, architecture, text, target.sol_attn.dense_rows)
    else:
        document = Document.found(layout)
    name = target.hardware.gpu_name if gpu is None else gpu
    given = "the command line"
    return Plan(
        target=target,
        architecture=architecture,
        document=document,
        gpu=name,
        ceilings=ceilings_of(name),
        density=Assumed(density, given) if density is not None else _published(target, DENSITIES),
        computed=Assumed(computed, given) if computed is not None else _counted(target),
    )


def _published(target: Target, metrics: tuple[str, ...]) -> Assumed | None:
    """A published figure of the target's own policy, from the target itself or from one of the same policy and
    request length."""
    claims = sorted(published().claims, key=lambda claim: claim.target != target.name)
    for claim in claims:
        if claim.metric in metrics and _same_policy(target, claim.target):
            return Assumed(claim.value, f"claim {claim.id}, {claim.origin}")
    return None


def _same_policy(target: Target, name: str) -> bool:
    ours, theirs = (
        (
            PRESETS[one.checkpoint.preset],
            one.sol_attn,
            (one.cache.kind, one.cache.threshold),
            (one.request.prompt_sha256, one.request.forwards, one.request.frames, one.request.width),
        )
        for one in (target, load_target(name))
    )
    return ours == theirs


def _counted(target: Target) -> Assumed | None:
    if listed := target.cache.replay:
        return Assumed(len(listed), "cache.replay of the target", listed)
    return _published(target, ("cache.compute",))


@dataclass(frozen=True)
class Total:
    """A request of the arms named: how many forwards of each kind, and what they come to.

    denoise, request: FLOPs of one GPU, and floors in seconds (None without ceilings), of the forwards with what is done
    once, and of everything from the prompt to the decoded tensors.
    """

    arms: tuple[str, ...]
    note: str
    dense: int
    sparse: int
    reused: int
    denoise_flops: float
    denoise_seconds: float | None
    request_flops: float
    request_seconds: float | None


def totals(plan: Plan) -> list[Total]:
    """One row for each different set of switches among the target's arms; two where only the number of computed
    forwards is known: for the earliest and the latest list of that many, of which fewer are dense."""
    groups: dict[tuple[bool, bool, bool], list[str]] = {}
    for name in ARMS:
        if (arm := plan.target.arms.get(name)) is None:
            continue
        resident = arm.vae_resident or "vae" not in plan.machine.offloaded
        groups.setdefault((arm.cache, arm.sparse != "none", resident), []).append(name)
    rows = []
    for (cached, sparse, resident), arms in groups.items():
        for note, dense, routed, reused in _counts(plan, cached, sparse):
            rows.append(_total(plan, tuple(arms), note, (dense, routed, reused), cached, resident))
    return rows


def _counts(plan: Plan, cached: bool, sparse: bool) -> Iterator[tuple[str, int, int, int]]:
    """(note, dense, sparse, reused) forwards; nothing where a figure that is needed is not known."""
    forwards = plan.target.request.forwards
    leading = min(plan.target.sol_attn.dense_steps, forwards)
    if sparse and plan.density is None or cached and plan.computed is None:
        return
    if not cached:
        yield ("", leading, forwards - leading, 0) if sparse else ("", forwards, 0, 0)
        return
    assert plan.computed is not None
    computed = int(plan.computed.value)
    reused = forwards - computed
    if not sparse:
        yield "", computed, 0, reused
        return
    lists = {"": plan.computed.steps}
    if not plan.computed.steps:
        earliest, latest = possible(plan.target.cache, forwards, computed)
        lists = {"earliest": earliest, "latest": latest} if earliest != latest else {"": earliest}
    for note, steps in lists.items():
        dense = sum(step < leading for step in steps)
        yield note, dense, computed - dense, reused


def _total(
    plan: Plan, arms: tuple[str, ...], note: str, counts: tuple[int, int, int], cached: bool, resident: bool
) -> Total:
    dense, sparse, reused = counts
    kind: Cache = plan.target.cache.kind
    cache = kind if cached else None
    text, refiner = plan.before()
    parts = [(refiner, 1), (plan.model.forward(cache=cache), dense), (plan.model.reused(kind), reused)]
    if sparse:
        assert plan.density is not None
        parts.append((plan.sparse(plan.density.value, cache), sparse))
    whole = [(text, 1), *parts, *((stage, 1) for stage in plan.after(resident=resident))]
    return Total(
        arms=arms,
        note=note,
        dense=dense,
        sparse=sparse,
        reused=reused,
        denoise_flops=math.fsum(stage.flops * times for stage, times in parts),
        denoise_seconds=_seconds(plan.ceilings, parts),
        request_flops=math.fsum(stage.flops * times for stage, times in whole),
        request_seconds=_seconds(plan.ceilings, whole),
    )


def _seconds(ceilings: Ceilings | None, parts: list[tuple[Stage, int]]) -> float | None:
    if ceilings is None:
        return None
    return math.fsum(floor(stage, ceilings).seconds * times for stage, times in parts)
