"""Is the video what was asked for, and what the record says it is? The same of the tensors, where nothing was muxed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from config.record import Media, Output, TensorOutput, Timing
from verify.derive import of_sample
from verify.findings import AS_WRITTEN, Scribe
from verify.media import MediaUnavailable, probe
from verify.reader import ArmEvidence, Record

AGAIN = "run the benchmark again"
ARMS = "arms/"
EXACT = (
    *("file_sha256", "frames_sha256", "width", "height", "frames", "fps", "video_codec"),
    *("audio_codec", "audio_sample_rate", "audio_channels"),
)
DURATIONS = ("duration_seconds", "audio_seconds")
PRIMING = 0.1  # seconds: decoders differ in how much of an AAC stream's first and last packets they drop


def _recorded(record: Record) -> Iterator[tuple[ArmEvidence, int, Timing]]:
    for arm in record.arms.values():
        for sample, timing in arm.timings.items():
            yield arm, sample, timing


def decoded(record: Record, say: Scribe) -> None:
    """Decode every video and its sound again: size, frames, rates, codecs and both digests are those of timing.json.

    What was not muxed cannot be decoded, and says so; that timing.json holds what the worker told is still checked.
    """
    reasons: Counter[str] = Counter()
    for arm, sample, timing in _recorded(record):
        _told(arm, sample, timing, say)
        if timing.output is not None:
            reasons[timing.output.reason] += 1
    for reason, count in reasons.items():
        say.skip(
            f"{count} samples not muxed ({reason}): their tensors' digests are attested, no content was seen", ARMS
        )
    seen: dict[str, Media] = {}  # by digest: the same bytes are decoded once
    for arm, sample, timing in _recorded(record):
        name, media = f"{arm.folder}sample-{sample}/out.mp4", timing.media
        if media is None:
            continue
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


def _told(arm: ArmEvidence, sample: int, timing: Timing, say: Scribe) -> None:
    """A sample without a video has the digests that its worker told, once, and is described by its tensors' shapes."""
    where, events = f"{arm.folder}sample-{sample}/timing.json", of_sample(arm, 0, sample, Output)
    output = timing.output
    if len(events) != (0 if output is None else 1):
        kind = "a video" if output is None else "tensors"
        say.invalid(f"a sample with {kind}, and its worker told of {len(events)} outputs", AS_WRITTEN, where)
    if output is None:
        return
    for event in events:
        for key in ("video", "audio", "audio_sample_rate"):
            if getattr(event, key) != getattr(output, key):
                say.invalid(f"{key} is not what the worker told", AS_WRITTEN, where)
    video, audio = output.video.shape, output.audio.shape
    if video != (1, 3, output.frames, output.height, output.width):
        size = f"{output.frames} frames of {output.width}x{output.height}"
        say.invalid(f"the video tensor is {list(video)}, which is not {size} in RGB", AS_WRITTEN, where)
    if len(audio) != 3 or audio[0] != 1:
        say.invalid(f"the audio tensor is {list(audio)}; needed: [1, channels, samples]", AS_WRITTEN, where)


def asked(record: Record, say: Scribe) -> None:
    """Frames, size, rate and length are the request's, and there is sound of that length.

    A sample without a video has no frame rate to compare. It is one that the lock allows, and all samples are alike:
    its seconds hold no encoding.
    """
    request = record.target.request
    kinds = {timing.media is None for _, _, timing in _recorded(record)}
    for arm, sample, timing in _recorded(record):
        if timing.media is not None:
            _video_asked(record, timing.media, f"{arm.folder}sample-{sample}/out.mp4", say)
        elif timing.output is not None:
            _tensors_asked(record, timing.output, f"{arm.folder}sample-{sample}/timing.json", say)
    if len(kinds) > 1:
        say.fail("some samples were muxed and some not: their seconds do not compare", AGAIN, ARMS)
    rate = "" if kinds == {True} else f" at {request.fps}/s"
    say.conclude(f"{request.frames} frames of {request.width}x{request.height}{rate}, with sound")


def _video_asked(record: Record, media: Media, name: str, say: Scribe) -> None:
    request = record.target.request
    wanted = {"width": request.width, "height": request.height, "frames": request.frames, "fps": float(request.fps)}
    length = request.frames / request.fps
    for key, value in wanted.items():
        if getattr(media, key) != value:
            say.fail(f"{key} is {getattr(media, key)}; asked: {value}", AGAIN, name)
    for key in DURATIONS:
        if abs(getattr(media, key) - length) > PRIMING + 1 / request.fps:
            say.fail(f"{key} is {getattr(media, key):.3f}; asked: {length:.3f}", AGAIN, name)
    if media.audio_channels < 1 or media.audio_sample_rate < 1:
        say.fail("there is no sound", AGAIN, name)


def _tensors_asked(record: Record, output: TensorOutput, name: str, say: Scribe) -> None:
    request = record.target.request
    if record.target.output == "mp4":
        say.fail(f"the lock asks for a video; it was not muxed: {output.reason}", AGAIN, name)
    for key in ("width", "height", "frames"):
        if getattr(output, key) != getattr(request, key):
            say.fail(f"{key} is {getattr(output, key)}; asked: {getattr(request, key)}", AGAIN, name)
    sound, length = output.audio.shape[-1] / output.audio_sample_rate, request.frames / request.fps
    if abs(sound - length) > PRIMING + 1 / request.fps:
        say.fail(f"the sound lasts {sound:.3f} s; asked: {length:.3f}", AGAIN, name)


def repeatable(record: Record, say: Scribe) -> None:
    """On a CPU, the measured samples of one arm, which have one seed, have the same frames, or the same tensors.

    On a GPU they need not; what is seen there is said all the same.
    """
    repeated = alike = 0
    cpu = record.target.hardware.kind == "cpu"
    for arm in record.arms.values():
        measured = [timing for timing in arm.timings.values() if timing.phase == "measured"]
        results = {_identity(timing) for timing in measured}
        repeated += len(measured) > 1
        alike += len(measured) > 1 and len(results) == 1
        if cpu and len(results) > 1:
            say.warn(f"{len(results)} different results of one seed", "a CPU run should repeat bit by bit", arm.folder)
    if not repeated:
        say.skip("no arm has two measured samples")
    elif not cpu:
        say.skip(f"kernels of a GPU need not repeat bit by bit; {alike} of {repeated} arms do")
    say.conclude(f"{repeated} arms repeat bit by bit")


def _identity(timing: Timing) -> tuple[str, ...]:
    if timing.output is not None:
        return (timing.output.video.sha256, timing.output.audio.sha256)
    return (timing.media.frames_sha256,) if timing.media is not None else ()
