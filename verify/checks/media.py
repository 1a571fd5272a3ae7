"""Is the video what was asked for, and what the record says it is?"""

from __future__ import annotations

from collections.abc import Iterator

from config.record import Media
from verify.findings import Scribe
from verify.media import MediaUnavailable, probe
from verify.reader import Record

AS_WRITTEN = "take the record as it was written"
EXACT = (
    *("file_sha256", "frames_sha256", "width", "height", "frames", "fps", "video_codec"),
    *("audio_codec", "audio_sample_rate", "audio_channels"),
)
DURATIONS = ("duration_seconds", "audio_seconds")
PRIMING = 0.1  # seconds: decoders differ in how much of an AAC stream's first and last packets they drop


def _recorded(record: Record) -> Iterator[tuple[str, Media]]:
    for arm in record.arms.values():
        for sample, timing in arm.timings.items():
            yield f"{arm.folder}sample-{sample}/out.mp4", timing.media


def decoded(record: Record, say: Scribe) -> None:
    """Decode every video and its sound again: size, frames, rates, codecs and both digests are those of timing.json."""
    seen: dict[str, Media] = {}  # by digest: the same bytes are decoded once
    for name, media in _recorded(record):
        if name in record.withheld:
            say.skip("withheld: its digest is attested, its content was not seen", name)
        elif name in record.files:
            digest = record.files.sha256(name)
            try:
                found = seen.get(digest) or probe(record.files.read(name), name)
            except MediaUnavailable as error:
                say.skip(str(error), remedy="pip install 'sol-h3[media]'")
                return
            seen[digest] = found
            for key in EXACT:
                if getattr(found, key) != getattr(media, key):
                    say.invalid(
                        f"{key} is {getattr(found, key)}; timing.json says {getattr(media, key)}", AS_WRITTEN, name
                    )
            for key in DURATIONS:
                if abs(getattr(found, key) - getattr(media, key)) > PRIMING:
                    say.invalid(
                        f"{key} is {getattr(found, key)}; timing.json says {getattr(media, key)}", AS_WRITTEN, name
                    )
    say.conclude("every video decodes to what timing.json says")


def asked(record: Record, say: Scribe) -> None:
    """Frames, size, rate and length are the request's, and there is sound of that length."""
    request = record.target.request
    wanted = {"width": request.width, "height": request.height, "frames": request.frames, "fps": float(request.fps)}
    length = request.frames / request.fps
    for name, media in _recorded(record):
        for key, value in wanted.items():
            if getattr(media, key) != value:
                say.fail(f"{key} is {getattr(media, key)}; asked: {value}", "run the benchmark again", name)
        for key in DURATIONS:
            if abs(getattr(media, key) - length) > PRIMING + 1 / request.fps:
                say.fail(f"{key} is {getattr(media, key):.3f}; asked: {length:.3f}", "run the benchmark again", name)
        if media.audio_channels < 1 or media.audio_sample_rate < 1:
            say.fail("there is no sound", "run the benchmark again", name)
    say.conclude(f"{request.frames} frames of {request.width}x{request.height} at {request.fps}/s, with sound")


def repeatable(record: Record, say: Scribe) -> None:
    """On a CPU, the measured samples of one arm, which have one seed, have the same frames."""
    if record.target.hardware.kind != "cpu":
        say.skip("kernels of a GPU need not repeat bit by bit")
        return
    repeated = 0
    for arm in record.arms.values():
        frames = {timing.media.frames_sha256 for timing in arm.timings.values() if timing.phase == "measured"}
        repeated += sum(timing.phase == "measured" for timing in arm.timings.values()) > 1
        if len(frames) > 1:
            say.warn(f"{len(frames)} different videos of one seed", "a CPU run should repeat bit by bit", arm.folder)
    if not repeated:
        say.skip("no arm has two measured samples")
    say.conclude(f"{repeated} arms repeat bit by bit")
