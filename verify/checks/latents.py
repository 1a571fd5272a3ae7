"""What the denoising loops left: is it told, possible, and the same each time?"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

from config.record import LATENTS_SEAM, SAMPLED_ELEMENTS, ArmStart, Latents, LatentTensor, Layout, Timing
from verify.derive import of_sample
from verify.findings import AS_WRITTEN, Scribe
from verify.reader import ArmEvidence, Record

AGAIN = "run the benchmark again"
ROUNDING = 1e-9  # of a sum of squares in float64, whatever the order of its additions


def told(record: Record, say: Scribe) -> None:
    """Every finished request of a worker that observes its latents has told them, once; they are finite, and their
    sampled elements are ones that such a tensor can hold. Equal digests go with equal elements.
    """
    silent = 0
    seen: dict[tuple[str, str, tuple[int, ...]], LatentTensor] = {}
    for arm in record.arms.values():
        where = f"{arm.folder}events-rank0.jsonl"
        if any(arm.of(rank, Latents) for rank in arm.events if rank):
            say.invalid("a rank other than 0 tells latents", AS_WRITTEN, arm.folder)
        for sample, timing, observed in _finished(arm):
            events = of_sample(arm, 0, sample, Latents)
            silent += not observed and not events
            if len(events) != observed:
                say.invalid(f"sample {sample} tells its latents {len(events)} times", AS_WRITTEN, where)
            for event in events:
                for name, tensor in (("video", event.video), ("audio", event.audio)):
                    what = f"sample {sample}, {name}"
                    for fault in _faults(tensor, _rows(arm, timing, name)):
                        say.invalid(f"{what}: {fault}", AS_WRITTEN, where)
                    if tensor.not_finite:
                        say.fail(f"{what}: {tensor.not_finite} latent elements are not finite", AGAIN, where)
                    first = seen.setdefault((tensor.sha256, tensor.dtype, tensor.shape), tensor)
                    if not _alike(first, tensor):
                        say.invalid(f"{what}: another tensor of this digest has other elements", AS_WRITTEN, where)
    if silent:
        say.skip(f"{silent} samples are of a release that did not tell its latents")
    say.conclude("latents are finite and told once a request")


def repeatable(record: Record, say: Scribe) -> None:
    """On a CPU, the requests of one arm with the same phase, seed and steps leave the same latents.

    On a GPU they need not; what is seen there is said all the same.
    """
    repeated = alike = 0
    cpu = record.target.hardware.kind == "cpu"
    for arm in record.arms.values():
        groups: dict[tuple[str, int, int], list[tuple[str, str]]] = {}
        for sample, timing in arm.timings.items():
            for event in of_sample(arm, 0, sample, Latents)[:1]:
                key = (timing.phase, timing.seed, timing.num_inference_steps)
                groups.setdefault(key, []).append((event.video.sha256, event.audio.sha256))
        for (phase, seed, _), digests in groups.items():
            repeated += len(digests) > 1
            alike += len(digests) > 1 and len(set(digests)) == 1
            if cpu and len(set(digests)) > 1:
                text = f"{len(set(digests))} different latents of {len(digests)} {phase} requests with seed {seed}"
                say.warn(text, "a CPU run should repeat bit by bit", arm.folder)
    if not repeated:
        say.skip("no arm has two requests with latents, one seed and as many steps")
    elif not cpu:
        say.skip(f"kernels of a GPU need not repeat bit by bit; {alike} of {repeated} repeated requests do")
    say.conclude(f"{repeated} repeated requests leave the same latents, bit by bit")


def _finished(arm: ArmEvidence) -> Iterator[tuple[int, Timing, bool]]:
    """Samples with a timing, and whether the worker that served them observes latents."""
    for session in arm.sessions:
        starts = [event for event in session if isinstance(event, ArmStart) and event.source == "worker"]
        observed = any(LATENTS_SEAM in event.seams for event in starts)
        for sample in sorted({event.sample for event in session if hasattr(event, "sample")}):
            if sample in arm.timings:
                yield sample, arm.timings[sample], observed


def _rows(arm: ArmEvidence, timing: Timing, name: str) -> int:
    """Rows of the packed document that hold the tensor; 0 where the layout is not known."""
    layouts = of_sample(arm, 0, timing.sample, Layout)
    first, last = getattr(layouts[0], name) if layouts else (0, 0)
    return int(last - first)


def _faults(tensor: LatentTensor, rows: int) -> Iterator[str]:
    """What is impossible about a tensor: one sentence each."""
    elements, known = math.prod(tensor.shape), [value for value in tensor.values if value is not None]
    if len(tensor.values) != min(SAMPLED_ELEMENTS, elements):
        yield f"{len(tensor.values)} sampled of {elements} elements"
    if rows < 1 or elements % rows:
        yield f"{elements} elements do not lie in {rows} rows"
    if len(tensor.values) - len(known) > tensor.not_finite or tensor.not_finite > elements:
        yield f"{tensor.not_finite} of its elements are said not to be finite"
    if not all(_holds(tensor.dtype, value) for value in known):
        yield f"a sampled element is no {tensor.dtype}"
    if math.hypot(*known) > math.sqrt(tensor.sum_squares) * (1 + ROUNDING):
        yield "the sampled elements' squares alone sum to more than all"


def _holds(dtype: str, value: float) -> bool:
    """Whether a dtype holds a float64 exactly."""
    form = "<e" if dtype == "float16" else "<f"
    try:
        data = struct.pack(form, value)
    except OverflowError:
        return False
    return struct.unpack(form, data)[0] == value and (dtype != "bfloat16" or data[:2] == b"\0\0")


def _alike(one: LatentTensor, other: LatentTensor) -> bool:
    close = math.isclose(one.sum_squares, other.sum_squares, rel_tol=ROUNDING)
    return close and one.values == other.values and one.not_finite == other.not_finite
