"""Makes complete, consistent run records in a few seconds: the events that a run would leave, a gate slice with real
attention outputs by the reference beside this file, and real small videos. What a test breaks, it breaks in the files
that this wrote."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import av
import ml_dtypes
import numpy as np

from config.canonical import sha256_bytes, sha256_json
from config.checkpoint import manifest
from config.lock import Lock, lock_json, recipes_root, resolve
from config.schema import Target
from tests.verify import reference

LAYERS, HEADS, DIM = 4, 2, 32
TEXT, AUDIO, VIDEO = 70, 50, 399
TOKENS = TEXT + AUDIO + VIDEO  # 519: nine blocks, the last with seven tokens
PACKED = 576
GPU_SAMPLE = {
    "event": "gpu_sample",
    "memory_used_mib": 21000.0,
    "memory_peak_mib": 22000.0,
    "power_w": 430.0,
    "energy_j": None,
    "sm_clock_mhz": 2500,
    "memory_clock_mhz": 10501,
    "temperature_c": 66,
    "reasons": 4,
    "pcie_tx_mib_s": 10.0,
    "pcie_rx_mib_s": 20.0,
    "own_processes": 1,
    "foreign_processes": 0,
    "hidden_processes": 0,
}
HOST_SAMPLE = {
    "event": "host_sample",
    "processes": 3,
    "rss_mib": 5000.0,
    "pinned_mib": 0.0,
    "available_mib": 100000.0,
    "page_cache_mib": 50000.0,
    "pressure": 0.0,
    "refaults": 0,
    "arm_cores": 1.5,
    "busy_cores": 2.0,
}
CLASSES = {"torch_sdpa": "SDPAImpl", "torch_cudnn_sdpa": "CudnnSDPAImpl"}


def dump(value: Any) -> bytes:
    """JSON as the run writes it: indented, keys sorted."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


@cache
def video(width: int, height: int, frames: int, fps: int, seed: int, audio: bool = True) -> bytes:
    """An H.264 and AAC mp4 whose picture depends on the seed."""
    import io

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"preset": "ultrafast", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        sound = container.add_stream("aac", rate=32000, layout="stereo") if audio else None
        columns = np.arange(width)[None, :, None]
        for index in range(frames):
            picture = np.broadcast_to((columns + 5 * index + 31 * seed) % 256, (height, width, 3)).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")))
        container.mux(stream.encode(None))
        if sound is not None:
            total = round(frames / fps * 32000)
            wave = np.sin(np.arange(total) * 0.05).astype(np.float32)
            for first in range(0, total, 1024):
                part = np.ascontiguousarray(np.stack([wave[first : first + 1024]] * 2))
                frame = av.AudioFrame.from_ndarray(part, "fltp", layout="stereo")
                frame.sample_rate, frame.pts = 32000, first
                container.mux(sound.encode(frame))
            container.mux(sound.encode(None))
    return buffer.getvalue()


@cache
def media_of(data: bytes) -> dict[str, Any]:
    """The `media` of timing.json, by another way of decoding than the one under test."""
    import hashlib
    import io

    planes, frames, samples = hashlib.sha256(), 0, 0
    with av.open(io.BytesIO(data)) as container:
        stream, rate = container.streams.video[0], float(container.streams.video[0].average_rate)
        for frame in container.decode(video=0):
            planes.update(frame.to_ndarray(format="yuv420p").tobytes())  # three planes without padding
            frames += 1
        size = (stream.codec_context.width, stream.codec_context.height)
    with av.open(io.BytesIO(data)) as container:
        channels = container.streams.audio[0].codec_context.channels
        samples = sum(frame.samples for frame in container.decode(audio=0))
    return {
        "file_sha256": sha256_bytes(data),
        "frames_sha256": planes.hexdigest(),
        "width": size[0],
        "height": size[1],
        "frames": frames,
        "fps": rate,
        "duration_seconds": frames / rate,
        "video_codec": "h264",
        "audio_codec": "aac",
        "audio_sample_rate": 32000,
        "audio_channels": channels,
        "audio_seconds": samples / 32000,
    }


def tensors_of(width: int, height: int, frames: int, fps: int, seed: int) -> dict[str, Any]:
    """What a worker tells of tensors that depend on the seed."""
    shapes = {"video": [1, 3, frames, height, width], "audio": [1, 2, round(frames / fps * 32000)]}
    digests = {
        name: {"shape": shape, "dtype": "float32", "sha256": sha256_bytes(b"%s %d" % (name.encode(), seed))}
        for name, shape in shapes.items()
    }
    return {**digests, "audio_sample_rate": 32000}


@cache
def latent_arrays(arm: str, seed: int, steps: int) -> dict[str, np.ndarray[Any, Any]]:
    """What an arm's loop leaves, float32: `lossless` as `dense`; every other arm is off by an error of its own size."""
    noise = np.random.default_rng([seed, steps])
    clean = {"video": noise.normal(size=(1, 24, 3, 14, 38)), "audio": noise.normal(size=(2, 8, AUDIO // 2))}
    size = {"dense": 0.0, "lossless": 0.0, "cache": 0.25}.get(arm, 0.5)
    return {name: (x + size * noise.normal(size=x.shape)).astype(np.float32) for name, x in clean.items()}


def latent_of(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """A tensor of a `latents` event, all of its elements finite; the index rule in integers, one by one."""
    flat, count = array.ravel(), min(1024, array.size)
    part = array.size // count
    chosen = [index * array.size // count + part * (2654435761 * index % 2**32) // 2**32 for index in range(count)]
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "sha256": sha256_bytes(array.tobytes()),
        "not_finite": 0,
        "sum_squares": float((flat.astype(np.float64) ** 2).sum()),
        "values": [float(flat[index]) for index in chosen],
    }


@cache
def latents_of(arm: str, seed: int, steps: int) -> dict[str, Any]:
    """The tensors of an arm's `latents` event."""
    return {name: latent_of(array) for name, array in latent_arrays(arm, seed, steps).items()}


def save_safetensors(tensors: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """The bytes of a safetensors file."""
    names = {"bfloat16": "BF16", "int64": "I64", "int32": "I32", "float32": "F32"}
    header, buffer = {}, b""
    for name, array in tensors.items():
        data = array.tobytes()
        offsets = [len(buffer), len(buffer) + len(data)]
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        buffer += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + buffer


@cache
def attention_call(
    thresh_type: str, tau: float, sink: tuple[int, int], dense_rows: tuple[int, int], seed: int, ranks: int
) -> tuple[dict[str, Any], ...]:
    """One gated call a rank: tensors of the slice, and the statistics of the report."""
    calls = []
    for rank in range(ranks):
        noise = np.random.default_rng(1000 * seed + rank)
        drift = np.sin(np.arange(TOKENS) / 40)[:, None, None]
        q, k, v = (reference.bf16(noise.normal(size=(TOKENS, HEADS, DIM)) + drift) for _ in range(3))
        scale = DIM**-0.5
        outputs, counts, softmax = [], [], []
        for head in range(HEADS):
            out, count = reference.sol_attn(
                *(x[:, head] for x in (q, k, v)),
                scale=scale,
                tau=tau,
                thresh_type=thresh_type,
                sink=sink,
                dense_rows=dense_rows,
            )
            outputs.append(reference.bf16(out))
            counts.append(count)
            softmax.append(reference.dense(q[:, head], k[:, head], v[:, head], scale))
        sdpa = np.stack([reference.bf16(out) for out in softmax], axis=1)
        kernel = sdpa.copy()
        kernel[::7] = reference.bf16(kernel[::7] * (1 + 2**-8))  # a kernel that rounds some rows otherwise
        exact = np.stack(softmax, axis=1)
        blocks = [0, 1, 4, 8]
        rows = np.concatenate([np.arange(64 * b, min(64 * b + 64, TOKENS)) for b in blocks])
        half = {
            "q": q[rows, 0],
            "k": k[:, 0],
            "v": v[:, 0],
            "all_exact": kernel[rows, 0],
            "sdpa": sdpa[rows, 0],
            "real_tau": outputs[0][rows],
        }
        tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in half.items()}
        tensors["rows"] = rows.astype(np.int64)
        tensors["route_counts"] = np.array(counts, np.int32).T.copy()
        stats = {"sdpa": statistics(kernel, sdpa), "fp32": statistics(kernel, exact), "own": statistics(sdpa, exact)}
        real = statistics(np.stack(outputs, axis=1), sdpa)
        calls.append({"tensors": tensors, "stats": stats, "real": real, "blocks": blocks})
    return tuple(calls)


def statistics(output: reference.F64, against: reference.F64) -> dict[str, float]:
    """The three statistics of the gate."""
    error = np.abs(output - against)
    return {
        "max_abs": float(error.max()),
        "mean_abs": float(error.mean()),
        "rel_l2": float(np.linalg.norm(error) / np.linalg.norm(against)),
    }


@dataclass
class Log:
    """One process's writer of an events file."""

    lines: list[dict[str, Any]]
    source: str
    seq: dict[str, int]
    now: float = 0.0

    def write(self, event: str, /, **fields: Any) -> None:
        """Append an event a millisecond later than the last."""
        self.now = round(self.now + 0.001, 6)
        self.lines.append(
            {"event": event, "t": self.now, "seq": self.seq.get(self.source, 0), "source": self.source, **fields}
        )
        self.seq[self.source] = self.seq.get(self.source, 0) + 1


@dataclass
class Builder:
    """A record of a target.

    samples: measured samples an arm. overrides: as of --set. seconds: seconds a forward by arm. red: arms whose gate
    is red. ungated: arms that end after a warm-up without a sparse call. resumed: arms that a second process added a
    sample to.
    """

    target: str = "cpu"
    arms: tuple[str, ...] = ("dense", "fullopt")
    samples: int = 1
    overrides: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    red: tuple[str, ...] = ()
    ungated: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    weights: str = ""
    unmuxed: str = ""
    latents: bool = True

    def build(self, root: Path) -> Path:
        """Write the record, unsigned, with its benchmark.json."""
        root.mkdir(parents=True)
        self.lock: Lock = resolve(self.target, self.overrides)
        self.t: Target = self.lock.resolved
        self.put(root / "lock.json", lock_json(self.lock))
        self.put(root / "environment.json", dump(self.environment()))
        for arm in self.arms:
            self.arm(root / "arms" / arm, arm)
        status = json.dumps({"state": "complete", "reason": "", "pid": 1, "host_hash": "0" * 16})
        self.put(root / "status", status.ljust(1023).encode() + b"\n")
        summarise(root)
        return root

    @staticmethod
    def put(path: Path, data: bytes) -> None:
        """Write a file and its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def environment(self) -> dict[str, Any]:
        """environment.json of a run that is what its target asks for."""
        hardware, recipe = self.t.hardware, recipes_root() / self.t.recipe
        requirements = recipe / "requirements.lock"
        pins = re.findall(r"^([\w.-]+)==([^\s\\]+)", requirements.read_text() if requirements.exists() else "", re.M)
        sums = (recipes_root() / "sglang-0.5.17.sha256sums").read_text().splitlines()
        files = [{"path": "FL2VA/model_index.json", "bytes": 3, "sha256": sha256_bytes(b"abc")}]
        if self.t.checkpoint.kind == "hub":
            files = [{"path": e.path, "bytes": e.bytes, "sha256": e.sha256 or "4" * 64} for e in manifest()]
        return {
            "schema_version": 1,
            "captured_at": "2026-09-01T12:00:00Z",
            "image_digest": "sha256:" + "1" * 64,
            "recipe_sha256": self.lock.recipe.sha256,
            "source_revision": "2" * 40,
            "python": "3.11.7",
            "os": "Debian GNU/Linux 12 (bookworm)",
            "kernel": "6.1.0",
            "packages": [{"name": name, "version": version, "record_sha256": "3" * 64} for name, version in pins],
            "sglang_sources": dict(reversed(line.split()) for line in sums if not line.startswith("#")),
            "torch": "2.11.0+cu128" if hardware.kind == "cuda" else "2.13.0+cpu",
            "cuda": "12.8" if hardware.kind == "cuda" else "",
            "driver": "580.65.06" if hardware.kind == "cuda" else "",
            "cpu": {"model": "A processor", "cores": 2, "torch_threads": 2},
            "memory_total_mib": 200000,
            "memory_available_mib": 190000,
            "gpus": [
                {
                    "index": index,
                    "name": hardware.gpu_name,
                    "uuid_sha256": sha256_bytes(b"gpu %d" % index),
                    "compute_capability": hardware.compute_capability,
                    "memory_mib": hardware.gpu_memory_mib + 100,
                    "power_limit_w": 450.0,
                    "sm_clock_max_mhz": 2520,
                    "ecc": False,
                    "mig": False,
                }
                for index in range(hardware.gpu_count)
            ],
            "ffmpeg": "ffmpeg version 5.1",
            "checkpoint": {
                "kind": self.weights or self.t.checkpoint.kind,
                "revision": self.t.checkpoint.revision,
                "sha256": sha256_json(files),
                "files": files,
            },
            "env": self.t.env,
            "differences": list(self.differences),
        }

    def arm(self, folder: Path, arm: str) -> None:
        """One arm: a process with its warm-up and samples, and a second one where it was resumed."""
        ranks = self.t.parallel.num_gpus
        self.lines: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(ranks)}
        self.seqs: dict[int, dict[str, int]] = {rank: {} for rank in range(ranks)}
        self.sessions: list[tuple[float, float]] = []
        self.process(folder, arm, 0)
        if arm in self.resumed:
            self.process(folder, arm, 1 + self.samples)
        for rank, lines in self.lines.items():
            self.put(folder / f"events-rank{rank}.jsonl", b"".join(json.dumps(e).encode() + b"\n" for e in lines))
        if self.t.hardware.kind == "cuda":
            for gpu in range(self.t.hardware.gpu_count):
                self.telemetry(folder / f"telemetry-gpu{gpu}.jsonl", gpu)
        self.telemetry(folder / "telemetry-host.jsonl", None)

    def telemetry(self, path: Path, gpu: int | None) -> None:
        """A session of telemetry for each process of the arm, a sample a second, begun 0.25 s after the driver."""
        lines: list[dict[str, Any]] = []
        for clock, seconds in self.sessions:
            uuid = None if gpu is None else sha256_bytes(b"gpu %d" % gpu)
            start = {"clock": clock + 0.25, "interval": 1.0, "gpu": gpu, "uuid_sha256": uuid, "xid_watched": True}
            lines.append({"event": "telemetry_start", "t": 0.0, **start})
            sample = HOST_SAMPLE if gpu is None else GPU_SAMPLE
            lines += [{"t": float(second), **sample} for second in range(1, int(seconds))]
            end = {"samples": int(seconds) - 1, "oom_kills": 0 if gpu is None else None}
            lines.append({"event": "telemetry_end", "t": seconds, **end})
        self.put(path, b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def process(self, folder: Path, arm: str, first: int) -> None:
        """A process of the arm: the driver's events, and those of its workers between them."""
        driver = Log(self.lines[0], "driver", self.seqs[0])
        clock = 5000.0 + 10_000 * first
        driver.write("arm_start", arm=arm, rank=0, seams=[], notes=[], clock=clock)
        workers = {rank: Log(lines, "worker", self.seqs[rank]) for rank, lines in self.lines.items()}
        for rank, worker in workers.items():
            seams = ["observe.denoising", *(["observe.latents"] if rank == 0 and self.latents else [])]
            worker.write("arm_start", arm=arm, rank=rank, seams=seams, notes=[])
        driver.now = 40.0
        driver.write("load_end", seconds=40.0)
        red = arm in self.red
        ungated = arm in self.ungated
        for index in range(1 if red or ungated else 1 + self.samples):
            self.request(folder, arm, first, first + index, driver, workers)
        outcome = "gate_failed" if red else "ungated" if ungated else "complete"
        reason = "the gate is red" if red else "no sparse call" if ungated else ""
        driver.write("arm_end", outcome=outcome, reason=reason)
        self.sessions.append((clock, driver.now))

    def request(self, folder: Path, arm: str, first: int, sample: int, driver: Log, workers: dict[int, Log]) -> None:
        """One request: its events, its gate in the warm-up, its timing and its video."""
        warmup = sample == first
        asked = self.t.warmup if warmup else self.t.request
        steps = asked.num_inference_steps
        facts = {
            "sample": sample,
            "phase": "warmup" if warmup else "measured",
            "seed": asked.seed,
            "num_inference_steps": steps,
        }
        driver.write("request_start", **facts)
        began, denoise = driver.now, 0.0
        for rank, worker in workers.items():
            denoise = self.denoise(folder, arm, first, sample, rank, worker, facts, steps - 1)
            if arm in self.red:
                continue
        if arm in self.red:
            return
        seconds = denoise + 1.25 + 0.01 * sample
        driver.now = began + seconds
        driver.write("request_end", sample=sample, seconds=seconds, forwards=None)
        if self.latents:
            workers[0].write("latents", sample=sample, **latents_of(arm, asked.seed, steps))
        timing = {
            **facts,
            "schema_version": 1,
            "seconds": seconds,
            "sglang_total_ms": 1000 * seconds,
            "sglang_stages_ms": {"denoising": 1000 * denoise},
            "sglang_steps_ms": [],
            **self.left(folder / f"sample-{sample}", sample, asked.seed, workers[0]),
        }
        self.put(folder / f"sample-{sample}" / "timing.json", dump(timing))

    def left(self, folder: Path, sample: int, seed: int, worker: Log) -> dict[str, Any]:
        """What a request leaves: the video, and its entry of timing.json; or the digests that its worker tells."""
        request = self.t.request
        if not self.unmuxed:
            data = video(request.width, request.height, request.frames, request.fps, seed)
            self.put(folder / "out.mp4", data)
            return {"media": media_of(data), "output": None}
        tensors = tensors_of(request.width, request.height, request.frames, request.fps, seed)
        worker.write("output", sample=sample, **tensors)
        size = {"width": request.width, "height": request.height, "frames": request.frames}
        return {"media": None, "output": {"reason": self.unmuxed, **size, **tensors}}

    def denoise(
        self, folder: Path, arm: str, first: int, sample: int, rank: int, log: Log, facts: dict[str, Any], forwards: int
    ) -> float:
        """A worker's events of one request; returns the seconds of its loop."""
        policy, sol = self.t.arms[arm], self.t.sol_attn  # type: ignore[index]
        spans = {"text": (0, TEXT), "prefix": (0, TEXT + AUDIO), "none": (0, 0)}
        log.write("request_start", **facts)
        began = log.now
        noise = np.random.default_rng(sample + 17)
        accumulator, computed_before, gated = 0.0, False, False
        for step in range(forwards):
            if step == 0:
                log.write(
                    "layout",
                    sample=sample,
                    total_tokens=PACKED,
                    live_tokens=TOKENS,
                    text=[0, TEXT],
                    condition=None,
                    audio=[TEXT, TEXT + AUDIO],
                    video=[TEXT + AUDIO, TOKENS],
                    sink=list(spans[sol.sink]),
                    dense_rows=list(spans[sol.dense_rows]),
                    cu_seqlens=[0, TOKENS, PACKED],
                )
            computes = True
            if policy.cache:
                before = accumulator
                signal = 0.031 + 0.001 * (step % 3) if self.t.cache.kind == "teacache" else 0.05 + 0.06 * (step % 2)
                decision, accumulator = self.decide(step, forwards, signal, accumulator, computed_before)
                decision, accumulator = self.by_our_rules(
                    decision, accumulator, before, step, forwards, signal, sample == first
                )
                log.write("cache_decision", sample=sample, step=step, **decision)
                computes = decision["action"] == "compute"
                computed_before = True
            sparse = policy.sparse != "none" and step >= sol.dense_steps
            reused = [0] if self.t.cache.kind == "firstblockcache" else []
            layers = list(range(LAYERS)) if computes else reused
            for layer in layers:
                if sparse and layer >= sol.dense_layers:
                    if sample == first and not gated:
                        gated = True
                        self.gate(folder, arm, first, sample, step, layer, rank, log, spans)
                        if arm in self.red:
                            return 0.0
                        routed = self.gate_routed
                    else:
                        routed = [int(x) for x in noise.integers(50, 70, HEADS)]
                    name = f"{policy.sparse}/cute" if policy.sparse == "sana" else policy.sparse
                    call = {"layers": [layer], "backend": name, "mode": "sparse", "blocks": 9, "routed": routed}
                    log.write("attention", sample=sample, step=step, **call)
            dense = [layer for layer in layers if not (sparse and layer >= sol.dense_layers)]
            if dense:
                call = {
                    "layers": dense,
                    "backend": CLASSES[self.t.attention],
                    "mode": "dense",
                    "blocks": 0,
                    "routed": [],
                }
                log.write("attention", sample=sample, step=step, **call)
            seconds = self.seconds.get(arm, 0.5) * (1.0 if computes else 0.1) + 0.001 * sample
            log.now += seconds
            log.write("step", sample=sample, step=step, seconds=seconds, timestep=(step + 1) / forwards)
        loop = log.now - began
        peak = {"rss_mib": 900.0 + sample, "allocated_mib": 10.0, "reserved_mib": 20.0 + rank}
        log.write("memory", sample=sample, **peak)
        log.write("request_end", sample=sample, seconds=loop, forwards=forwards)
        return loop

    def decide(
        self, step: int, forwards: int, signal: float, accumulator: float, history: bool
    ) -> tuple[dict[str, Any], float]:
        """A decision event's fields by the published rules, written out once more."""
        cache_policy = self.t.cache
        if cache_policy.kind == "firstblockcache":
            above = not history or signal > cache_policy.threshold
            reason = "initialize" if not history else "threshold" if above else "below_threshold"
            fields = {"signal": signal if history else None, "rescaled": None, "accumulator": None}
            return {
                "kind": cache_policy.kind,
                "action": "compute" if above else "reuse",
                "reason": reason,
                **fields,
            }, 0.0
        forced = "warmup" if step < cache_policy.retain_steps else ""
        forced = forced or ("cooldown" if step >= forwards - cache_policy.cooldown_steps else "")
        if forced:
            fields = {"signal": None, "rescaled": None, "accumulator": 0.0}
            return {"kind": "teacache", "action": "compute", "reason": forced, **fields}, 0.0
        total = accumulator + signal  # the polynomial of the targets is the identity
        over = total >= cache_policy.threshold
        left = 0.0 if over else total
        fields = {"signal": signal, "rescaled": signal, "accumulator": left}
        reason = "threshold" if over else "below_threshold"
        return {"kind": "teacache", "action": "compute" if over else "reuse", "reason": reason, **fields}, left

    def by_our_rules(
        self,
        decision: dict[str, Any],
        accumulator: float,
        before: float,
        step: int,
        forwards: int,
        signal: float,
        warmup: bool,
    ) -> tuple[dict[str, Any], float]:
        """A decision as a replayed list and a computed last forward change it."""
        tea = self.t.cache.kind == "teacache"
        if self.t.cache.replay:
            listed = step in self.t.cache.replay
            measured = decision["signal"] is not None or not listed
            accumulator = before + signal if tea and not listed else 0.0
            decision = {
                "kind": self.t.cache.kind,
                "action": "compute" if listed else "reuse",
                "reason": "replay",
                "signal": signal if measured else None,
                "rescaled": signal if tea and measured else None,
                "accumulator": accumulator if tea else None,
            }
        if warmup and self.t.warmup.compute_last and step == forwards - 1 and decision["action"] == "reuse":
            accumulator = 0.0
            last = {"action": "compute", "reason": "warmup_last", "accumulator": 0.0 if tea else None}
            decision = {**decision, **last}
        return decision, accumulator

    def gate(
        self,
        folder: Path,
        arm: str,
        first: int,
        sample: int,
        step: int,
        layer: int,
        rank: int,
        log: Log,
        spans: dict[str, tuple[int, int]],
    ) -> None:
        """The gate's report and slice, and its event."""
        sol, limits = self.t.sol_attn, self.t.gate
        sink, rows = spans[sol.sink], spans[sol.dense_rows]
        call = attention_call(sol.thresh_type, sol.tau, sink, rows, 0, self.t.parallel.num_gpus)[rank]
        stats = {**call["stats"]["sdpa"]}
        red = arm in self.red
        if red:
            stats["rel_l2"] = 0.02
        policy = self.t.arms[arm]  # type: ignore[index]
        report = {
            "schema_version": 1,
            "rank": rank,
            "sample": sample,
            "step": step,
            "layer": layer,
            "backend": f"{policy.sparse}/cute" if policy.sparse == "sana" else policy.sparse,
            "shape": [1, TOKENS, HEADS, DIM],
            "scale": DIM**-0.5,
            "gate_tau": limits.tau,
            "tau": sol.tau,
            "thresh_type": sol.thresh_type,
            "sink": list(sink),
            "dense_rows": list(rows),
            "limits": {"max_abs": limits.max_abs, "mean_abs": limits.mean_abs, "rel_l2": limits.rel_l2},
            "against_sdpa": stats,
            "against_fp32": call["stats"]["fp32"],
            "sdpa_against_fp32": call["stats"]["own"],
            "rejudged_rows": 0,
            "rejudged_failed": 0,
            "finite": True,
            "real_tau": call["real"],
            "passed": not red,
            "slice": {"head": 0, "blocks": call["blocks"]},
        }
        where = folder if first == 0 else folder / f"sample-{sample}"
        self.put(where / f"gate-rank{rank}.json", dump(report))
        self.put(where / f"gate-rank{rank}.safetensors", save_safetensors(call["tensors"]))
        self.gate_routed = [int(x) for x in call["tensors"]["route_counts"].sum(axis=0)]
        log.write("gate", sample=sample, step=step, layer=layer, passed=not red)


def summarise(root: Path) -> None:
    """Write benchmark.json; like a run that derives it, and like a forger who does so after a change."""
    from verify.derive import derive
    from verify.reader import read_record

    (root / "benchmark.json").unlink(missing_ok=True)
    (root / "benchmark.json").write_bytes(dump(derive(read_record(root)).model_dump(mode="json")))


def edit(path: Path, change: Any) -> None:
    """Load a JSON file, let `change` alter it in place, write it back."""
    value = json.loads(path.read_bytes())
    change(value)
    path.write_bytes(dump(value))


def edit_events(path: Path, change: Any) -> None:
    """Load the events, let `change` alter the list in place (or return another), write it back."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    lines = change(lines) or lines
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
