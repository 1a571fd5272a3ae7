"""What is really inside an mp4, decoded with PyAV. PyAV is imported here and nowhere else, when the first file is
looked at.
"""

from __future__ import annotations

import hashlib
import io
from typing import Any

from config.canonical import sha256_bytes
from config.errors import InvalidRecord
from config.record import Media

MAX_FRAMES = 10_000
MAX_PIXELS = 8192 * 8192


class MediaUnavailable(Exception):
    """PyAV is not installed; the message says how to get it."""


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise MediaUnavailable("PyAV is not installed: pip install 'sol-h3[media]'") from None
    av.logging.set_level(None)
    return av


def probe(data: bytes, where: str) -> Media:
    """Decode every frame and every audio sample of an mp4.

    `frames_sha256` is over the Y, U and V planes of each frame in order, rows without padding. `duration_seconds` is
    frames over frame rate, `audio_seconds` decoded samples over sample rate.

    Raises:
        MediaUnavailable: PyAV is not installed.
        InvalidRecord: the bytes cannot be decoded, or are not one yuv420p video and one audio stream of a sane size.
    """
    av = _av()
    try:
        with av.open(io.BytesIO(data), format="mp4") as container:
            return _decode(container, data, where)
    except (av.FFmpegError, ValueError, OSError, ArithmeticError, AttributeError) as error:
        raise InvalidRecord(f"{where} cannot be decoded: {error}", remedy="take the file as it was written") from None


def _decode(container: Any, data: bytes, where: str) -> Media:
    kinds = sorted(stream.type for stream in container.streams)
    if kinds != ["audio", "video"]:
        raise InvalidRecord(f"{where} has streams {kinds}", needed="one video and one audio stream")
    video, audio = container.streams.video[0], container.streams.audio[0]
    size = (video.codec_context.width, video.codec_context.height)
    if not 0 < size[0] * size[1] <= MAX_PIXELS:
        raise InvalidRecord(f"{where} has frames of {size[0]}x{size[1]}")
    digest, frames, samples = hashlib.sha256(), 0, 0
    for frame in container.decode(video, audio):
        if hasattr(frame, "samples"):
            samples += frame.samples
            continue
        frames += 1
        if frames > MAX_FRAMES:
            raise InvalidRecord(f"{where} has more than {MAX_FRAMES} frames")
        if frame.format.name != "yuv420p" or (frame.width, frame.height) != size:
            raise InvalidRecord(f"{where}: frame {frames} is {frame.format.name} {frame.width}x{frame.height}")
        for plane in frame.planes:
            _hash_plane(digest, plane)
    fps, rate = float(video.average_rate or 0), audio.codec_context.sample_rate
    if not (fps and rate):
        raise InvalidRecord(f"{where} has no frame rate or no sample rate")
    return Media(
        file_sha256=sha256_bytes(data),
        frames_sha256=digest.hexdigest(),
        width=size[0],
        height=size[1],
        frames=frames,
        fps=fps,
        duration_seconds=frames / fps,
        video_codec=video.codec_context.name,
        audio_codec=audio.codec_context.name,
        audio_sample_rate=rate,
        audio_channels=audio.codec_context.channels,
        audio_seconds=samples / rate,
    )


def _hash_plane(digest: Any, plane: Any) -> None:
    data = memoryview(plane).cast("B")
    if plane.line_size == plane.width:
        digest.update(data[: plane.width * plane.height])
        return
    for row in range(plane.height):
        digest.update(data[row * plane.line_size : row * plane.line_size + plane.width])
