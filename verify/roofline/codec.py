"""FLOPs and bytes of the parts beside the DiT: text encoder, video decoder, audio decoder (SGLang 0.5.17)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from config.architecture import AudioDecoder, TextEncoder, VideoDecoder
from verify.roofline.dit import Machine, latents
from verify.roofline.work import HALF, SINGLE, Operation, Stage, Traffic, elementwise, linear


def text_encoding(text: TextEncoder, tokens: int, machine: Machine) -> Stage:
    """The language model over the prompt's tokens, causal; several GPUs hold its linear layers in parts, with two
    all-reduces a layer (`runtime/models/encoders/base.py`: wide encoders are folded over the DiT's GPUs)."""
    gpus, layers = machine.gpus, text.layers
    inner = text.heads * text.head_dim
    products = [linear(name, tokens, shape, count=layers) for name, shape in text.linears.items()]
    heads = 2 * (text.heads + text.kv_heads) * text.head_dim
    operations = [
        *(
            Operation(entry.name, "linear", entry.flops / gpus, entry.bytes / gpus, count=entry.count)
            for entry in products
        ),
        Operation(
            "attention",
            "attention",
            2 * tokens * (tokens + 1) * inner / gpus,
            heads * tokens * HALF / gpus,
            count=layers,
        ),
        elementwise("norms and residuals", 8 * tokens * text.hidden, count=layers),
        elementwise("query and key norms, rotary", heads * tokens / gpus, count=layers),
        elementwise("SiLU product", 3 * tokens * text.ffn / gpus, count=layers),
    ]
    streamed = layers * text.layer_parameters * HALF if "text_encoder" in machine.offloaded else 0
    reduced = 2 * machine.others(2 * layers * tokens * text.hidden * HALF)  # an all-reduce receives twice a share
    return Stage("text encoding", tuple(operations), Traffic(host=streamed, exchanged=reduced), gpus)


def tiles(pixels: int, video: VideoDecoder) -> int:
    """Tiles along one edge: the fewest of `tile` pixels that overlap by at least `tile_overlap`."""
    if pixels <= video.tile:
        return 1
    return math.ceil((pixels - video.tile_overlap) / (video.tile - video.tile_overlap))


def clips(frames: int, video: VideoDecoder) -> int:
    """Temporal clips: each has five latents and the two that overlap with the next."""
    return math.ceil((latents(frames) + video.dropped) / video.own_latents) - 1


def calls_of_decoder(frames: int, width: int, height: int, video: VideoDecoder) -> int:
    """Calls of the decoder: one for each tile of each clip."""
    return clips(frames, video) * tiles(width, video) * tiles(height, video)


def video_decode(
    video: VideoDecoder, frames: int, width: int, height: int, machine: Machine, *, resident: bool = True
) -> Stage:
    """The decoder over all tiles of all clips, FP16; tiles are spread over the GPUs. Where the weights are offloaded,
    `resident` fetches them once, and else every call fetches every layer, in FP32 as they are stored."""
    canvas = tiles(width, video) * tiles(height, video)
    local = math.ceil(canvas / machine.gpus) if machine.gpus <= canvas else canvas
    calls = clips(frames, video) * local
    tokens = video.tile_tokens(width, height)
    patches = tokens - video.registers
    each = calls * video.layers
    pixels = 3 * frames * width * height
    operations = [
        linear("post_quant_conv", patches, (video.channels, video.channels), bias=True, precision="tf32", count=calls),
        linear("x_embedder", patches, (video.channels, video.hidden), bias=True, precision="fp32", count=calls),
        *(linear(name, tokens, shape, bias=True, count=each) for name, shape in video.linears.items()),
        Operation("attention", "attention", 4 * tokens**2 * video.hidden, 4 * tokens * video.hidden * HALF, count=each),
        # the residual stream is FP32, what goes in and out of a product FP16
        elementwise("norms, scales, residuals (FP32)", 4 * tokens * video.hidden, SINGLE, count=each),
        elementwise("norms, scales, residuals (FP16)", 4 * tokens * video.hidden, count=each),
        elementwise("query and key norms, rotary", 4 * tokens * video.hidden, count=each),
        elementwise("SiLU product", 3 * tokens * video.ffn_factor * video.hidden, count=each),
        linear("proj_out", tokens, (video.hidden, video.pixels_of_token), bias=True, precision="fp32", count=calls),
        elementwise("assembly", calls * patches * video.pixels_of_token + pixels, SINGLE),
    ]
    weights = video.layers * video.layer_parameters * SINGLE if "vae" in machine.offloaded else 0
    name = "video decode" if resident or not weights else "video decode, weights streamed"
    exchanged = machine.others(pixels * SINGLE) if local < canvas else 0
    return Stage(
        name, tuple(operations), Traffic(host=weights * (1 if resident else calls), exchanged=exchanged), machine.gpus
    )


def audio_decode(audio: AudioDecoder, length: int) -> Stage:
    """BigVGAN over `length` latents of each channel, FP32, on one GPU."""
    return Stage("audio decode", tuple(_audio(audio, length)))


def _audio(audio: AudioDecoder, length: int) -> Iterator[Operation]:
    def convolution(inputs: int, outputs: int, size: int, kernel: int, result: int, count: int = 1) -> Operation:
        """`size` positions see the kernel, `result` positions come out."""
        flops = 2 * audio.outputs * size * inputs * outputs * kernel
        moved = audio.outputs * (size * inputs + result * outputs) + inputs * outputs * kernel
        return Operation("convolutions", "linear", flops, SINGLE * moved, "tf32", count)

    def activation(channels: int, size: int, count: int = 1) -> Operation:
        """Twice the rate, snake, and back: two filters a channel; the first sees five positions more at each end."""
        padding = audio.filter_taps - 2
        flops = 2 * audio.outputs * channels * audio.filter_taps * (2 * size + padding)
        return Operation(
            "alias-free activations", "rest", flops, SINGLE * 2 * audio.outputs * channels * size, "fp32", count
        )

    yield convolution(audio.channels, audio.latent, length, 1, length)
    yield convolution(audio.latent, audio.initial, length, audio.edge_kernel, length)
    channels = audio.initial
    for rate, kernel in zip(audio.rates, audio.kernels, strict=True):
        yield convolution(channels, channels // 2, length, kernel, length * rate)
        length, channels = length * rate, channels // 2
        for size in audio.residual_kernels:
            yield convolution(channels, channels, length, size, length, audio.residual_convolutions)
            yield activation(channels, length, audio.residual_convolutions)
            # a residual is read, added and written at each second convolution
            yield elementwise(
                "residuals", 2 * audio.outputs * channels * length, SINGLE, audio.residual_convolutions / 2
            )
    yield activation(channels, length)
    yield convolution(channels, 1, length, audio.edge_kernel, length)
