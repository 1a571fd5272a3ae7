"""What is really inside out.mp4: decoded, counted and digested."""

from __future__ import annotations

import hashlib
from pathlib import Path

from config.canonical import sha256_file
from config.record import Media


def observe_media(path: Path) -> Media:
    """Decode a video with its audio track.

    `frames_sha256` is the SHA-256 over the Y, U and V planes of each frame, rows without padding, as yuv420p: H.264
    decoding is bit-exact by its standard, so another decoder must find the same digest.

    Raises:
        ValueError: there is no video or no audio stream, or the pixels are not yuv420p.
        OSError, av.FFmpegError: the file cannot be read or decoded.
        ImportError: PyAV is not there.
    """
    import av  # not at the top: a target may do without a video, and its machine without PyAV

    digest, frames = hashlib.sha256(), 0
    with av.open(str(path)) as container:
        if not container.streams.video or not container.streams.audio:
            found = f"{len(container.streams.video)} video and {len(container.streams.audio)} audio streams"
            raise ValueError(f"{path.name} has {found}; one of each was expected")
        video, audio = container.streams.video[0], container.streams.audio[0]
        if video.codec_context.pix_fmt != "yuv420p":
            raise ValueError(f"{path.name} has pixel format {video.codec_context.pix_fmt}, expected yuv420p")
        for frame in container.decode(video):
            frames += 1
            for plane in frame.planes:
                rows = memoryview(plane).cast("B")
                for row in range(plane.height):
                    digest.update(rows[row * plane.line_size : row * plane.line_size + plane.width])
        fps = float(video.average_rate or 0)
        width, height, video_codec = video.codec_context.width, video.codec_context.height, video.codec_context.name
        rate, channels, audio_codec = (
            audio.codec_context.sample_rate,
            audio.codec_context.channels,
            audio.codec_context.name,
        )
    with av.open(str(path)) as container:  # a second pass: decoding one stream skips the packets of the other
        samples = sum(frame.samples for frame in container.decode(audio=0))
    return Media(
        file_sha256=sha256_file(path),
        frames_sha256=digest.hexdigest(),
        width=width,
        height=height,
        frames=frames,
        fps=fps,
        duration_seconds=frames / fps if fps else 0.0,
        video_codec=video_codec,
        audio_codec=audio_codec,
        audio_sample_rate=rate,
        audio_channels=channels,
        audio_seconds=samples / rate,
    )
