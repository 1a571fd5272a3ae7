"""The run record: the door between what runs and what judges.

Both sides read these models; `python -m config.schemas` writes them as JSON Schema.

A record is a directory:

    lock.json, environment.json, signer.json, benchmark.json, attestation.json, status
    arms/<arm>/events-rank<N>.jsonl, gate-rank<N>.json, gate-rank<N>.safetensors
    arms/<arm>/telemetry-gpu<N>.jsonl, telemetry-host.jsonl
    arms/<arm>/sample-<n>/timing.json, out.mp4 (absent where the request was not muxed)

Times are seconds of a monotonic clock unless a name says otherwise; sample 0 is the warm-up. A later process that
adds samples to an arm begins with a warm-up of its own, whose number goes on, and keeps its gate files in that
sample's folder.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, TypeAdapter, model_validator

from config.schema import ArmName, Model, Sha256
from config.telemetry import AnyLine

SCHEMA_VERSION = 1
DETACHABLE_SUFFIXES = (".mp4", ".safetensors")
LOCK, ENVIRONMENT, SIGNER, BENCHMARK, ATTESTATION, STATUS = (
    "lock.json",
    "environment.json",
    "signer.json",
    "benchmark.json",
    "attestation.json",
    "status",
)
UtcTime = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
SAMPLED_ELEMENTS = 1024
"""How many elements of a latent a record holds. A norm estimated from m independent normal elements has a standard
deviation of 1 / sqrt(2 m) of itself: 2.2 %; elements that lie near each other are not independent."""
SAMPLE_STEP = 2654435761
"""A prime next to 2**32 over the golden ratio: how far the place of a sampled element moves from part to part."""
LATENTS_SEAM = "observe.latents"
"""Stands in `arm_start` of a worker that tells the latents of each of its requests; earlier releases did not."""
Phase = Literal["warmup", "measured"]
Outcome = Literal["complete", "gate_failed", "ungated", "aborted", "error"]


class Status(Model):
    """`status`: one line of JSON. Of a run that says running, `pid` tells a reader on the same machine that the process
    is gone. Records of earlier releases have no `pid_namespace` and `started`."""

    state: Literal["running", "complete", "aborted"]
    reason: str = ""
    pid: int = 0
    host_hash: str = Field(
        default="", description="SHA-256 prefix of the boot id: a pid means something on that boot only"
    )
    pid_namespace: int = Field(default=0, description="number of the PID namespace that `pid` is of; 0 if unknown")
    started: int = Field(
        default=0, description="when the process started, clock ticks since boot: a pid is used again; 0 if unknown"
    )


class Signer(Model):
    """`signer.json`: the public key that signs the record. It makes a record checkable; it does not make it trusted."""

    keyid: Sha256
    keytype: Literal["ed25519"]
    scheme: Literal["ed25519"]
    public: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


# --- environment.json -------------------------------------------------------------------------------------------------


class Package(Model):
    """An installed distribution. `record_sha256` is the digest of its RECORD file, which lists its files' hashes."""

    name: str
    version: str
    record_sha256: Sha256 | None


class CheckpointFile(Model):
    """One file that the run loaded, relative to the checkpoint's root."""

    path: str
    bytes: int = Field(ge=0)
    sha256: Sha256


class CheckpointFound(Model):
    """The weights that were there. `sha256` is the digest of the canonical list of files."""

    kind: Literal["hub", "synthetic"]
    revision: str
    sha256: Sha256
    files: tuple[CheckpointFile, ...] = Field(strict=False)


class Gpu(Model):
    """One visible GPU. The UUID is hashed: it tells two boards apart without naming one."""

    index: int
    name: str
    uuid_sha256: Sha256
    compute_capability: str
    memory_mib: int
    power_limit_w: float | None
    sm_clock_max_mhz: int | None
    ecc: bool | None
    mig: bool | None
    power_limit_default_w: float | None = None
    memory_clock_max_mhz: int | None = None
    persistence: bool | None = None
    virtualisation: str | None = Field(default=None, description="none, passthrough, vgpu, host-vgpu or host-vsga")
    pcie_width: int | None = Field(default=None, description="lanes now")
    pcie_generation_max: int | None = None
    nvlinks: int | None = Field(default=None, description="active NVLinks of the board")


class Cpu(Model):
    """Processor model, logical cores that the process may use, and threads that torch was given."""

    model: str
    cores: int
    torch_threads: int


class Environment(Model):
    """`environment.json`: what a stranger needs to judge comparability. No serial number, host name, path or secret."""

    schema_version: Literal[1] = 1
    captured_at: UtcTime
    image_digest: str = Field(
        description="the container image: the digest it was started by, else its content digest; empty outside one"
    )
    image_labels: dict[str, str] = Field(
        default_factory=dict, description="source revision, recipe and pins that the image was built from"
    )
    recipe_sha256: Sha256
    source_revision: str = Field(
        description="git commit of the bundle, with + when the tree was changed; empty if unknown"
    )
    python: str
    os: str
    kernel: str
    packages: tuple[Package, ...] = Field(strict=False)
    sglang_sources: dict[str, Sha256] = Field(
        description="SHA-256 of the installed SGLang sources that the seams rely on"
    )
    torch: str
    cuda: str = Field(description="CUDA of the torch build; empty on a CPU build")
    driver: str
    cpu: Cpu
    memory_total_mib: int
    memory_available_mib: int
    gpus: tuple[Gpu, ...] = Field(strict=False)
    ffmpeg: str
    checkpoint: CheckpointFound
    env: dict[str, str] = Field(description="the locked environment variables as the run set them")
    cuda_driver: str = Field(default="", description="CUDA version that the driver supports; empty if unknown")
    topology: tuple[str, ...] = Field(
        default=(), strict=False, description="PCIe path of each pair of GPUs, such as `0-1 NODE` (nvidia-smi topo -m)"
    )
    in_container: bool | None = None
    memory_limit_mib: int | None = Field(default=None, description="what the control groups leave; null: no limit")
    swap_total_mib: int | None = None
    shared_memory_mib: int | None = Field(default=None, description="size of /dev/shm")
    memlock_kib: int | None = Field(default=None, description="limit of locked memory; null: none")
    compile_caches: dict[str, Literal["cold", "warm"]] = Field(
        default_factory=dict,
        description="by variable: whether Triton's, inductor's and CUDA's folders held anything before the run",
    )
    warnings: tuple[str, ...] = Field(
        default=(), strict=False, description="what the doctor warned of before the run, `check: found`"
    )
    differences: tuple[str, ...] = Field(
        default=(), strict=False, description="what makes the run open beside overrides, one sentence each"
    )


# --- events -----------------------------------------------------------------------------------------------------------


class Event(Model):
    """Base of one line of events-rank<N>.jsonl. `t`: seconds since the arm started; `seq` counts from 0 per writer."""

    t: float = Field(ge=0)
    seq: int = Field(ge=0)
    source: Literal["driver", "worker"]


class ArmStart(Event):
    """A process of the arm began. `seams`: the replacements installed, in order; a stock arm has observers only."""

    event: Literal["arm_start"] = "arm_start"
    arm: ArmName
    rank: int
    seams: tuple[str, ...] = Field(strict=False)
    notes: tuple[str, ...] = Field(default=(), strict=False)
    clock: float | None = Field(
        default=None, description="driver: the machine's monotonic clock at t = 0, seconds; ties telemetry to events"
    )


class LoadEnd(Event):
    """The pipeline is ready. Seconds from process start."""

    event: Literal["load_end"] = "load_end"
    seconds: float


class RequestStart(Event):
    """A request goes in. Driver and worker write one each."""

    event: Literal["request_start"] = "request_start"
    sample: int = Field(ge=0)
    phase: Phase
    seed: int
    num_inference_steps: int


class Layout(Event):
    """The packed document as the worker found it from the tokens. Ranges are half-open rows."""

    event: Literal["layout"] = "layout"
    sample: int
    total_tokens: int
    live_tokens: int
    text: tuple[int, int] = Field(strict=False)
    condition: tuple[int, int] | None = Field(strict=False)
    audio: tuple[int, int] = Field(strict=False)
    video: tuple[int, int] = Field(strict=False)
    sink: tuple[int, int] = Field(strict=False, description="after the target's policy; equal ends: none")
    dense_rows: tuple[int, int] = Field(strict=False)
    cu_seqlens: tuple[int, ...] = Field(strict=False)


class CacheDecision(Event):
    """One decision of TeaCache or FirstBlockCache with the signal it was taken from."""

    event: Literal["cache_decision"] = "cache_decision"
    sample: int
    step: int
    kind: Literal["teacache", "firstblockcache"]
    action: Literal["compute", "reuse"]
    reason: Literal[
        "warmup", "cooldown", "initialize", "threshold", "below_threshold", "shape_change", "replay", "warmup_last"
    ]
    signal: float | None = Field(description="relative L1")
    rescaled: float | None = Field(description="TeaCache: the polynomial of the signal")
    accumulator: float | None = Field(description="TeaCache: after the decision, hence 0 on compute")


class Attention(Event):
    """One attention call of a main block: what really ran. Dense calls of one forward make one event (`layers`)."""

    event: Literal["attention"] = "attention"
    sample: int
    step: int
    layers: tuple[int, ...] = Field(strict=False)
    backend: str = Field(
        description="what computed it: SGLang's class and, behind a slash, the PyTorch operator that it runs (dense); "
        "our backend and its kernel (sparse)"
    )
    mode: Literal["dense", "sparse"]
    blocks: int = Field(default=0, ge=0, description="query (= key) blocks of the live document; 0 for dense")
    routed: tuple[int, ...] = Field(
        default=(), strict=False, description="per head: exact key blocks summed over query blocks"
    )


class Step(Event):
    """One DiT forward. Seconds of the model call alone, device synchronised."""

    event: Literal["step"] = "step"
    sample: int
    step: int
    seconds: float
    timestep: float = Field(description="largest timestep of the forward")


class GateDone(Event):
    """The gate ran; the numbers are in gate-rank<N>.json."""

    event: Literal["gate"] = "gate"
    sample: int
    step: int
    layer: int
    passed: bool


class Memory(Event):
    """Peak memory of a request: the process's resident set, and the allocator's on a GPU (0 on a CPU)."""

    event: Literal["memory"] = "memory"
    sample: int
    rss_mib: float
    allocated_mib: float
    reserved_mib: float


class Stage(Event):
    """One pipeline stage of a request."""

    event: Literal["stage"] = "stage"
    sample: int
    name: str
    seconds: float


class OutputTensor(Model):
    """A tensor that left the pipeline.

    `sha256` is taken over the elements in row-major order, the last index fastest, each in the little-endian bytes of
    `dtype`; nothing is converted.
    """

    shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(strict=False, min_length=1, max_length=8)
    dtype: Literal["float32", "float16", "bfloat16"]
    sha256: Sha256


class Output(Event):
    """What left the pipeline of a request that is not muxed. Rank 0's worker digests it after it has answered.

    `video` is [1, 3, frames, height, width], RGB from 0 to 1; `audio` is [1, channels, samples].
    """

    event: Literal["output"] = "output"
    sample: int
    video: OutputTensor
    audio: OutputTensor
    audio_sample_rate: int = Field(ge=1, description="Hz")


class LatentTensor(OutputTensor):
    """A tensor as the denoising loop left it, before anything decodes it, with enough to compare two runs by.

    With n elements in row-major order, m = min(1,024, n) and s = floor(n / m), `values[i]` is the element of index
    floor(i * n / m) + floor(s * (2654435761 * i mod 2**32) / 2**32): one of each of m even parts. Its place in its part
    follows the golden ratio (Fibonacci hashing; Knuth, The Art of Computer Programming 3, 6.4), because a fixed stride
    falls on few columns of a picture. Float64 holds each element of `dtype` exactly; null where one is not finite.
    `sum_squares` is over all finite elements, in float64, whose last digits depend on the order of the additions.
    """

    not_finite: int = Field(ge=0, description="how many of all elements are not finite")
    sum_squares: float = Field(ge=0, allow_inf_nan=False)
    values: tuple[Annotated[float, Field(allow_inf_nan=False)] | None, ...] = Field(
        strict=False, min_length=1, max_length=SAMPLED_ELEMENTS
    )


class Latents(Event):
    """What the denoising loop of a request left. Rank 0's worker alone tells it, after it has answered: where there
    are several ranks, all hold the same.

    `video` is [1, channels, frames, height, width], `audio` [channels, features, time].
    """

    event: Literal["latents"] = "latents"
    sample: int
    video: LatentTensor
    audio: LatentTensor


class OffloadLoads(Event):
    """Layer loads of the layer-wise offload during a request, per component."""

    event: Literal["offload"] = "offload"
    sample: int
    loads: dict[str, int]


class RequestEnd(Event):
    """The request came back. `seconds`: the driver's stopwatch around the whole call (worker: the denoising loop)."""

    event: Literal["request_end"] = "request_end"
    sample: int
    seconds: float
    forwards: int | None = None


class ArmEnd(Event):
    """The last line of a process of the arm, written by its driver into rank 0's file. Events without it were cut.

    `ungated`: the arm is sparse and its warm-up held no sparse call, so no gate ran and nothing was measured.
    """

    event: Literal["arm_end"] = "arm_end"
    outcome: Outcome
    reason: str = ""


AnyEvent = Annotated[
    ArmStart
    | LoadEnd
    | RequestStart
    | Layout
    | CacheDecision
    | Attention
    | Step
    | GateDone
    | Memory
    | Stage
    | Output
    | Latents
    | OffloadLoads
    | RequestEnd
    | ArmEnd,
    Field(discriminator="event"),
]
EVENT: TypeAdapter[Any] = TypeAdapter(AnyEvent)


# --- gate-rank<N>.json ------------------------------------------------------------------------------------------------


class ErrorStats(Model):
    """max|d|, mean|d| and ||d|| / max(||reference||, 1e-12) of d = output - reference.

    Elements that are not finite are left out; `GateReport.finite` says that there were some.
    """

    max_abs: float
    mean_abs: float
    rel_l2: float


class GateLimits(Model):
    """Limits as the lock gives them; a gate passes when every statistic is at most its limit."""

    max_abs: float
    mean_abs: float
    rel_l2: float


class GateSlice(Model):
    """Which part of the call is stored in gate-rank<N>.safetensors, and with what options it was computed.

    Tensors: `k`, `v` [T, D] and `q`, `all_exact`, `sdpa`, `real_tau` [rows, D] of head `head`, BF16; `rows` int64
    [rows], the token of each stored row; `route_counts` int32 [N, H].
    """

    head: int
    blocks: tuple[int, ...] = Field(strict=False, description="query blocks whose rows are stored")


class GateReport(Model):
    """The Real-QKV gate of one rank, at the first sparse call of the warm-up.

    It has passed when every output was finite, `against_sdpa` is within the limits on mean_abs and rel_l2, and of the
    rows beyond the limit on max_abs, judged again by FP32, none failed.
    """

    schema_version: Literal[1] = 1
    rank: int
    sample: int
    step: int
    layer: int
    backend: str
    shape: tuple[int, int, int, int] = Field(strict=False, description="[1, T, H, D] of the live document")
    scale: float
    gate_tau: float
    tau: float
    thresh_type: Literal["diag", "exact"]
    sink: tuple[int, int] = Field(strict=False)
    dense_rows: tuple[int, int] = Field(strict=False)
    limits: GateLimits
    against_sdpa: ErrorStats = Field(
        description="everything routed, against BF16 SDPA: the published definition, and what gates"
    )
    against_fp32: ErrorStats = Field(description="the same output against an FP32 softmax; reported")
    sdpa_against_fp32: ErrorStats = Field(
        description="BF16 SDPA against the FP32 softmax: how much of the error is the reference's own"
    )
    rejudged_rows: int = Field(description="(row, head) pairs beyond max_abs that were judged again by FP32")
    rejudged_failed: int
    finite: bool
    real_tau: ErrorStats = Field(description="the arm's own options against BF16 SDPA; reported, not gating")
    passed: bool
    slice: GateSlice


# --- sample-<n>/timing.json -------------------------------------------------------------------------------------------


class Media(Model):
    """What was decoded from out.mp4.

    `frames_sha256` is SHA-256 over the Y, U and V planes of every decoded yuv420p frame in order, rows without padding.
    `duration_seconds` is frames / fps, `audio_seconds` decoded samples / sample rate.
    """

    file_sha256: Sha256
    frames_sha256: Sha256
    width: int
    height: int
    frames: int
    fps: float
    duration_seconds: float
    video_codec: str
    audio_codec: str
    audio_sample_rate: int
    audio_channels: int
    audio_seconds: float


class TensorOutput(Model):
    """What a request left on a machine that cannot mux a video: the worker's `output` event, and what follows from it.

    frames, height, width: the last three of `video.shape`. reason: what the machine lacks.
    """

    reason: str = Field(min_length=1)
    video: OutputTensor
    audio: OutputTensor
    frames: int
    width: int
    height: int
    audio_sample_rate: int = Field(ge=1, description="Hz")


class Timing(Model):
    """One request as the driver timed it, beside what SGLang's own metrics say (in milliseconds, as they came).

    Exactly one of `media` and `output` is there. With `output`, `seconds` ends when the tensors are on the device: they
    were neither copied to the host nor encoded.
    """

    schema_version: Literal[1] = 1
    sample: int
    phase: Phase
    seed: int
    num_inference_steps: int
    seconds: float = Field(description="own monotonic stopwatch around the whole request")
    sglang_total_ms: float | None
    sglang_stages_ms: dict[str, float]
    sglang_steps_ms: tuple[float, ...] = Field(strict=False)
    media: Media | None = None
    output: TensorOutput | None = None

    @model_validator(mode="after")
    def _muxed_or_not(self) -> Timing:
        if (self.media is None) == (self.output is None):
            raise ValueError("a timing has media or output, one of the two")
        return self


# --- benchmark.json ---------------------------------------------------------------------------------------------------


class Series(Model):
    """All values of a figure, and what follows from them.

    The standard deviation is taken with n - 1; 0 for n = 1 would claim too much, so it is null.
    """

    values: tuple[float, ...] = Field(strict=False, min_length=1)
    n: int
    median: float
    mean: float
    minimum: float
    maximum: float
    stdev: float | None


class CacheCounts(Model):
    """Decisions of one sample. `pattern` has a C or R a step."""

    calls: int
    compute: int
    reuse: int
    reuse_rate: float
    pattern: str


class Density(Model):
    """Share of (query block, key block, head) triples that a sparse call computed exactly.

    Of a call: the routed blocks of all heads of all ranks, over heads * blocks**2. Calls are ordered by (step, layer).
    `first`: the first sparse call of the request. `mean`: over all its sparse calls, each with equal weight.
    """

    calls: int
    first: float
    mean: float
    minimum: float
    maximum: float


class SampleResult(Model):
    """One request of an arm that has a timing.json.

    seconds: of timing.json. denoise_seconds: what rank 0's worker says at request_end. forwards, step_seconds: rank 0's
    steps, in order. sparse_forwards: steps with a sparse call. Backends: sorted, each once, over all ranks. cache: rank
    0's decisions. peak_rss_mib, peak_reserved_mib: the largest memory event over all ranks; the allocator's own count.

    file_sha256, frames_sha256: of the video, null where the request was not muxed; then unmuxed is the reason, and
    video_sha256 and audio_sha256 are those of the tensors.

    peak_nvml_mib: the largest memory_peak_mib over all GPUs, from the telemetry of the request: every gpu_sample after
    its beginning up to the first one of the session at or after its end, both by the driver's events. It holds what
    the allocator does not know of: the CUDA context, NCCL's buffers, compiled kernels. Null where no GPU was sampled.
    """

    sample: int
    phase: Phase
    seed: int
    seconds: float
    denoise_seconds: float
    forwards: int
    step_seconds: tuple[float, ...] = Field(strict=False)
    sparse_forwards: int
    dense_backends: tuple[str, ...] = Field(strict=False)
    sparse_backends: tuple[str, ...] = Field(strict=False)
    cache: CacheCounts | None
    density: Density | None
    file_sha256: Sha256 | None
    frames_sha256: Sha256 | None
    peak_rss_mib: float
    peak_reserved_mib: float
    peak_nvml_mib: float | None = None
    video_sha256: Sha256 | None = None
    audio_sha256: Sha256 | None = None
    unmuxed: str = ""


class GateSummary(Model):
    """The gates of an arm, of all ranks and all its processes: the worst of each statistic against SDPA."""

    passed: bool
    ranks: int
    max_abs: float
    mean_abs: float
    rel_l2: float


class ArmResult(Model):
    """One arm. Figures of measured samples only; the warm-up stands apart. A gated-out arm has no timing.

    outcome, reason: the last arm_end of rank 0. live_tokens, prefix_tokens (where the video starts): rank 0's first
    layout. load_seconds: rank 0's first load_end. warmup: the first one. An arm that ended early keeps what
    it finished.
    """

    outcome: Outcome
    reason: str
    live_tokens: int | None
    prefix_tokens: int | None
    load_seconds: float | None
    gate: GateSummary | None
    warmup: SampleResult | None
    samples: tuple[SampleResult, ...] = Field(strict=False)
    seconds: Series | None
    denoise_seconds: Series | None


class Ratio(Model):
    """How many times as fast `arm` was as `baseline`: medians of measured seconds, divided; both arms are complete.

    Every arm over `dense` in the order of ARMS, then cache over lossless, fullopt over lossless, fullopt over cache.
    """

    arm: ArmName
    baseline: ArmName
    seconds: float
    denoise_seconds: float


class TensorDistance(Model):
    """How far a tensor x is from a baseline's y.

    equal: shape, dtype and SHA-256 are the same. rel_l2: ||x - y|| / ||y|| over the `sampled` elements that both events
    hold, an estimate of the same over all `elements`; null where shapes differ, an element is not finite or ||y|| is 0.
    norm_ratio: ||x|| / ||y|| over all elements; |norm_ratio - 1| is at most the relative L2 error over all elements.
    Null where an element is not finite, or a norm is 0.
    """

    equal: bool
    rel_l2: float | None
    norm_ratio: float | None
    sampled: int
    elements: int


class LatentDistance(Model):
    """How far the latents of a measured sample are from those of another arm's: what an arm changes numerically.

    For the arms and baselines of Ratio, in its order, and each sample of `arm` in order: against the first sample of
    `baseline` with the same seed and number of steps. Only samples that told their latents, of any outcome.
    """

    arm: ArmName
    sample: int
    baseline: ArmName
    baseline_sample: int
    video: TensorDistance
    audio: TensorDistance


class Benchmark(Model):
    """`benchmark.json`: derived from the raw files of the record, and from nothing else."""

    schema_version: Literal[1] = 1
    target: str
    lock_digest: Sha256
    locked: bool = Field(description="no override and no difference of environment")
    weights: Literal["hub", "synthetic"]
    arms: dict[ArmName, ArmResult]
    ratios: tuple[Ratio, ...] = Field(strict=False)
    latents: tuple[LatentDistance, ...] = Field(default=(), strict=False)


# --- attestation.json -------------------------------------------------------------------------------------------------

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"

MODELS: dict[str, Any] = {
    "status": Status,
    "signer": Signer,
    "environment": Environment,
    "event": AnyEvent,
    "telemetry": AnyLine,
    "gate": GateReport,
    "timing": Timing,
    "benchmark": Benchmark,
}
