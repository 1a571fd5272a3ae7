"""A program of its own: reads an mp4 from standard input, decodes all of it with PyAV, prints what it found as JSON.

It is a process and not a function because a damaged file can crash FFmpeg's C code, and with it the process that it
runs in.
Standard output is one object: the fields of `config.record.Media`, or {"fault": sentence}.
"""

from __future__ import annotations

import hashlib
import io
import json
import resource
import sys
from typing import Any

MAX_FRAMES = 10_000
MAX_PIXELS = 8192 * 8192
CPU_SECONDS = 900
MEMORY_BYTES = 8 << 30


class Fault(Exception):
    """What is wrong with the file, one sentence."""


def decode(data: bytes) -> dict[str, Any]:
    """Decode every frame and every audio sample.

    Raises:
        Fault: the bytes cannot be decoded, or are not one yuv420p video and one audio stream of a sane size.
    """
    import av

    av.logging.set_level(None)
    try:
        with av.open(io.BytesIO(data), format="mp4") as container:
            return _decode(container, data)
    except (av.FFmpegError, ValueError, OSError, ArithmeticError, AttributeError) as error:
        raise Fault(f"cannot be decoded: {error}") from None


def _decode(container: Any, data: bytes) -> dict[str, Any]:
    kinds = sorted(stream.type for stream in container.streams)
    if kinds != ["audio", "video"]:
        raise Fault(f"has streams {', '.join(kinds) or 'none'}; needed: one of video and one of audio")
    video, audio = container.streams.video[0], container.streams.audio[0]
    size = (video.codec_context.width, video.codec_context.height)
    if not 0 < size[0] * size[1] <= MAX_PIXELS:
        raise Fault(f"has frames of {size[0]}x{size[1]}")
    digest, frames, samples = hashlib.sha256(), 0, 0
    for frame in container.decode(video, audio):
        if hasattr(frame, "samples"):
            samples += frame.samples
            continue
        frames += 1
        if frames > MAX_FRAMES:
            raise Fault(f"has more than {MAX_FRAMES} frames")
        if frame.format.name != "yuv420p" or (frame.width, frame.height) != size:
            raise Fault(f"has a frame {frames} that is {frame.format.name} {frame.width}x{frame.height}")
        for plane in frame.planes:
            _hash_plane(digest, plane)
    fps, rate = float(video.average_rate or 0), audio.codec_context.sample_rate
    if not (fps > 0 and rate > 0):
        raise Fault("has no frame rate or no sample rate")
    return {
        "file_sha256": hashlib.sha256(data).hexdigest(),
        "frames_sha256": digest.hexdigest(),
        "width": size[0],
        "height": size[1],
        "frames": frames,
        "fps": fps,
        "duration_seconds": frames / fps,
        "video_codec": video.codec_context.name,
        "audio_codec": audio.codec_context.name,
        "audio_sample_rate": rate,
        "audio_channels": audio.codec_context.channels,
        "audio_seconds": samples / rate,
    }


def _hash_plane(digest: Any, plane: Any) -> None:
    data = memoryview(plane).cast("B")
    for row in range(plane.height):
        digest.update(data[row * plane.line_size : row * plane.line_size + plane.width])


def main() -> None:
    """Decode standard input under limits of processor time and memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        print(json.dumps(decode(sys.stdin.buffer.read())))
    except Fault as fault:
        print(json.dumps({"fault": str(fault)}))
