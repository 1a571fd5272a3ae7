"""The typed form of a target: every value of the published policies that a run can depend on.

A target file is TOML under `config/targets/`; `config.lock` resolves it to a lock. Unknown keys are refused. Every
model is frozen: a changed value is a new object, made by an override that the lock lists.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
GitSha = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
Span = Literal["prefix", "text", "none"]
ArmName = Literal["dense", "lossless", "cache", "fullopt", "sol", "native"]
ARMS: tuple[ArmName, ...] = ("dense", "lossless", "cache", "fullopt", "sol", "native")


class Model(BaseModel):
    """Base of all models here: unknown keys refused, no silent type conversion, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Setting(Model):
    """Base of what a lock holds: also refuses NaN and infinities, for which canonical JSON has no form."""

    model_config = ConfigDict(allow_inf_nan=False)


class Hardware(Setting):
    """The machine that a target names; anything else makes a run open.

    `gpu_name` is compared with the CUDA device name exactly: compute capability alone would let an L40S pass as an
    RTX 4090.
    """

    kind: Literal["cpu", "cuda"]
    gpu_name: str = ""
    gpu_count: int = Field(default=0, ge=0)
    compute_capability: Annotated[str, StringConstraints(pattern=r"^(|\d+\.\d)$")] = ""
    gpu_memory_mib: int = Field(default=0, ge=0, description="least NVML total memory of one GPU, MiB")
    driver_floor: Annotated[str, StringConstraints(pattern=r"^(|\d+(\.\d+)+)$")] = ""
    host_memory_gib: float = Field(ge=0, description="least host memory available to the run, GiB")
    disk_gib: float = Field(ge=0, description="least free disk for the checkpoint (when absent) and the record, GiB")

    @model_validator(mode="after")
    def _gpu_is_named(self) -> Hardware:
        named = [bool(self.gpu_name), bool(self.gpu_count), bool(self.compute_capability)]
        if named != [self.kind == "cuda"] * 3:
            raise ValueError("a cuda target names gpu_name, gpu_count and compute_capability; a cpu target names none")
        return self


class Checkpoint(Setting):
    """The weights: the published ones from the hub, or synthetic ones, which can verify no published claim."""

    kind: Literal["hub", "synthetic"]
    repo: str = ""
    revision: Annotated[str, StringConstraints(pattern=r"^(|[0-9a-f]{40})$")] = ""
    partition: str = "FL2VA"
    preset: Literal["", "tiny", "wide", "full"] = ""
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_source(self) -> Checkpoint:
        if self.kind == "hub" and not (self.repo and self.revision and not self.preset):
            raise ValueError("a hub checkpoint has repo and revision, and no preset")
        if self.kind == "synthetic" and not (self.preset and not self.repo and not self.revision):
            raise ValueError("a synthetic checkpoint has a preset, and no repo or revision")
        return self


class Request(Setting):
    """The measured request. `prompt` names a file of config/prompts; text and digest are filled in by the lock."""

    task: Literal["t2va"]
    prompt: str
    prompt_text: str = ""
    prompt_sha256: Annotated[str, StringConstraints(pattern=r"^(|[0-9a-f]{64})$")] = ""
    short_edge: int = Field(gt=0, description="pixels")
    aspect_ratio: Annotated[str, StringConstraints(pattern=r"^\d+:\d+$")]
    duration_seconds: float = Field(gt=0)
    width: int = Field(gt=0, description="pixels, as SGLang resolves short_edge and aspect_ratio")
    height: int = Field(gt=0, description="pixels")
    frames: int = Field(gt=0, description="video frames, as SGLang resolves duration_seconds")
    fps: int = Field(gt=0)
    num_inference_steps: int = Field(ge=2)
    forwards: int = Field(ge=1, description="DiT forwards: the sigma grid ends in 0, so one less than the steps")
    seed: int = Field(ge=0)
    flow_shift: float = Field(gt=0, description="video sigma shift")
    audio_flow_shift: float = Field(gt=0)

    @model_validator(mode="after")
    def _forwards_follow(self) -> Request:
        if self.forwards != self.num_inference_steps - 1:
            raise ValueError(
                f"forwards must be num_inference_steps - 1 = {self.num_inference_steps - 1}, found {self.forwards}"
            )
        return self


class WarmUp(Setting):
    """The request before the measured ones, in the same process. The gate runs inside it.

    A short warm-up may hold no computed forward after the dense ones, above all under FirstBlockCache, which has no
    rule for the last forward; `compute_last` (ours) gives it one, and with it the gate.
    """

    num_inference_steps: int = Field(ge=2)
    seed: int = Field(ge=0)
    compute_last: bool = Field(default=False, description="its last forward is computed whatever the cache says")

    @property
    def forwards(self) -> int:
        """Forwards of the DiT: the sigma grid ends in 0, as in `Request`."""
        return self.num_inference_steps - 1


class SolAttn(Setting):
    """The sparse-attention policy (arXiv 2607.24027 and the published runtimes)."""

    block: Literal[64] = 64
    tau: float
    thresh_type: Literal["diag", "exact"]
    dense_steps: int = Field(ge=0, description="leading forwards of a request that stay dense")
    dense_layers: int = Field(ge=0, description="leading blocks of the stack that stay dense")
    sink: Span = Field(description="keys that every query block computes exactly")
    dense_rows: Span = Field(description="query rows that attend densely")
    kv_splits: Literal[1, 2, 4] = 1


Replay = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    Field(
        strict=False,
        description="forwards that are computed, all others reused, whatever the signal says; empty: it decides",
    ),
]
"""Open runs only. The signals are measured all the same, so that a reused forward costs what it costs otherwise."""


class TeaCache(Setting):
    """TeaCache: skip the whole block stack while the accumulated change of the probe stays below the threshold."""

    kind: Literal["teacache"]
    replay: Replay = ()
    threshold: float = Field(gt=0)
    retain_steps: int = Field(ge=0)
    cooldown_steps: int = Field(ge=0)
    coefficients: tuple[float, ...] = Field(min_length=1, description="polynomial, highest power first", strict=False)


class FirstBlockCache(Setting):
    """FirstBlockCache: run block 0, skip the others while its residual changed by at most the threshold."""

    kind: Literal["firstblockcache"]
    replay: Replay = ()
    threshold: float = Field(gt=0)


class Offload(Setting):
    """SGLang's layer-wise offload of weights to host memory; no components means everything stays on the device."""

    components: tuple[Literal["dit", "text_encoder", "vae"], ...] = Field(strict=False)
    prefetch: float = Field(default=1, ge=0, description="layers fetched ahead; SGLang's dit_offload_prefetch_size")
    resident_layers: int = Field(default=0, ge=0)
    pin_cpu_memory: bool = False
    mapped: bool = Field(default=False, description="host weights stay in their files on disk instead of in memory")

    @model_validator(mode="after")
    def _mapped_is_of_something(self) -> Offload:
        if self.mapped and (self.pin_cpu_memory or not self.components):
            raise ValueError("offload.mapped needs offload.components, and pages of a file cannot be pinned")
        return self


class Compile(Setting):
    """torch.compile of repeated blocks, with the attention core outside the graph."""

    enabled: bool
    regional: bool = True


class Vae(Setting):
    """Where the video VAE lives and how it decodes in the arms that ask for residency."""

    resident_after_denoise: bool
    dtype: Literal["unchanged", "bfloat16", "float16", "float32"]
    tile_batch_size: int = Field(default=0, ge=0, description="0: all stacked tiles in one batch")


class Parallel(Setting):
    """How the model is spread over GPUs."""

    num_gpus: int = Field(ge=1)
    tensor_parallel: Literal[1] = 1
    ulysses: int = Field(ge=1)
    fsdp: bool = False

    @model_validator(mode="after")
    def _ulysses_spans_all(self) -> Parallel:
        if self.ulysses != self.num_gpus:
            raise ValueError(
                f"ulysses ({self.ulysses}) must equal num_gpus ({self.num_gpus}): no other split is published"
            )
        return self


class Gate(Setting):
    """Limits of the Real-QKV gate: the kernel with everything routed against BF16 SDPA on the run's own Q, K, V."""

    tau: float = Field(description="low enough that every block is computed exactly")
    max_abs: float = Field(gt=0)
    mean_abs: float = Field(gt=0)
    rel_l2: float = Field(gt=0)
    heads: Literal["all"] = "all"


class Arm(Setting):
    """What one arm switches on. `sparse` names the Sol-Attn back-end, or none."""

    cache: bool
    sparse: Literal["none", "sana", "native", "reference"]
    compile: bool
    vae_resident: bool
    stock: bool = Field(default=False, description="untouched SGLang: only observed, nothing replaced")

    @model_validator(mode="after")
    def _stock_is_stock(self) -> Arm:
        if self.stock and (self.cache or self.sparse != "none" or self.compile or self.vae_resident):
            raise ValueError("a stock arm switches nothing on")
        return self


class Measure(Setting):
    """What a result needs before it is compared with a published claim."""

    min_samples: int = Field(ge=1)


class Expected(Setting):
    """About how long the parts of an arm take, seconds: what the time left is guessed from until parts were timed."""

    load: float = Field(default=60, gt=0, description="from the arm's start to a ready pipeline")
    forward: float = Field(default=1, gt=0, description="one DiT forward")
    request: float = Field(default=10, gt=0, description="the rest of a request: text encoding, decoding, mux")


class Defaults(Setting):
    """What `sol benchmark` does when the command line is silent. Not part of the lock: it changes no sample."""

    arms: tuple[ArmName, ...] = Field(min_length=1, strict=False)
    samples: int = Field(ge=1)
    expected: Expected = Expected()


class Target(Setting):
    """One hardware target with its whole policy."""

    schema_version: Literal[1]
    name: Name
    title: str
    recipe: Name = Field(description="folder of images/ whose image.toml and requirements.lock the target runs in")
    notes: tuple[str, ...] = Field(default=(), strict=False)
    bare_is_locked: bool = Field(description="whether a run outside an image may count as locked")
    hardware: Hardware
    checkpoint: Checkpoint
    request: Request
    warmup: WarmUp
    measure: Measure
    sol_attn: SolAttn
    cache: Annotated[TeaCache | FirstBlockCache, Field(discriminator="kind")]
    offload: Offload
    compile: Compile
    vae: Vae
    parallel: Parallel
    attention: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$")] = Field(
        description="SGLang's attention_backend for every dense call"
    )
    gate: Gate
    arms: dict[ArmName, Arm] = Field(min_length=1)
    env: dict[str, str] = Field(default_factory=dict)
    output: Literal["mp4", "mp4_or_tensors"] = Field(
        default="mp4",
        description="what a request leaves: a muxed video; or, on a machine that cannot mux one, its tensors' digests",
    )
    defaults: Defaults

    def never_gated(self, arm: ArmName) -> bool:
        """Whether the values alone tell that a sparse arm's warm-up holds no sparse forward, so that no gate can run.

        False where the signals of a cache decide.
        """
        policy, forwards = self.arms[arm], self.warmup.forwards
        late = range(self.sol_attn.dense_steps, forwards)
        if policy.sparse == "none":
            return False
        if policy.cache and self.cache.replay and late:
            return not self.warmup.compute_last and not any(step in late for step in self.cache.replay)
        return not late

    @model_validator(mode="after")
    def _arms_fit(self) -> Target:
        missing = [arm for arm in self.defaults.arms if arm not in self.arms]
        if missing:
            raise ValueError(f"defaults.arms names arms that the target lacks: {', '.join(missing)}")
        if any(arm.compile for arm in self.arms.values()) and not self.compile.enabled:
            raise ValueError("an arm compiles but compile.enabled is false")
        if any(arm.vae_resident for arm in self.arms.values()) and not self.vae.resident_after_denoise:
            raise ValueError("an arm asks for a resident VAE but vae.resident_after_denoise is false")
        return self

    @model_validator(mode="after")
    def _replay_fits(self) -> Target:
        steps, forwards = self.cache.replay, self.request.forwards
        if not steps:
            return self
        if steps[0] != 0:
            raise ValueError(f"cache.replay begins with forward {steps[0]}; forward 0 has nothing to reuse, so list it")
        if any(later <= earlier for earlier, later in zip(steps, steps[1:], strict=False)):
            raise ValueError("cache.replay must rise from forward to forward, each listed once")
        if steps[-1] >= forwards:
            raise ValueError(f"cache.replay lists forward {steps[-1]}; the request's last is {forwards - 1}")
        return self

    @model_validator(mode="after")
    def _gpus_agree(self) -> Target:
        if self.hardware.kind == "cuda" and self.hardware.gpu_count != self.parallel.num_gpus:
            raise ValueError(
                f"hardware.gpu_count ({self.hardware.gpu_count}) must equal "
                f"parallel.num_gpus ({self.parallel.num_gpus})"
            )
        return self
