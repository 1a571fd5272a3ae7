"""The published model's sizes, and those of the synthetic checkpoints: what FLOPs and bytes are computed from.

Every size is SGLang's own: `sglang==0.5.17`, `multimodal_gen`, the file named beside it. The published checkpoint's
config.json was never read here: that it has these sizes is what SGLang's defaults and the published 33 B say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Dit:
    """The diffusion transformer (`configs/models/dits/minimax_h3.py`)."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    time_hidden: int
    time: int
    head_dim: int = 128
    refiner_layers: int = 2
    text: int = 5120
    time_input: int = 256
    modalities: int = 3  # of a block's AdaLN: video, text, audio
    video_row: int = 96  # 24 latent channels x a patch of 1 x 2 x 2
    audio_row: int = 32
    alignment: int = 64  # rows of a packed document are padded to a multiple of it
    timesteps: int = 2  # distinct ones of a forward: video's and audio's (`denoise_loop.py`; equal in the first)

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The four linear layers of a block, (inputs, outputs) by name, without bias."""
        return {
            "qkv_proj": (self.hidden, 3 * self.inner),
            "out_proj": (self.inner, self.hidden),
            "fc1": (self.hidden, 2 * self.ffn),
            "fc2": (self.ffn, self.hidden),
        }

    @property
    def adaln(self) -> tuple[int, int]:
        """A block's modulation, (inputs, outputs), with bias: six vectors a modality."""
        return self.time, 6 * self.modalities * self.hidden

    @property
    def refiner_block_parameters(self) -> int:
        """Parameters of a block of the token refiner: the linear layers, two norms, two norms of a head."""
        return sum(inputs * outputs for inputs, outputs in self.linears.values()) + 2 * self.hidden + 2 * self.head_dim

    @property
    def block_parameters(self) -> int:
        """Parameters of a block of the stack: those of a refiner block and the modulation."""
        inputs, outputs = self.adaln
        return self.refiner_block_parameters + (inputs + 1) * outputs


@dataclass(frozen=True)
class TextEncoder:
    """Qwen3-VL's language model as far as it is used (`configs/models/encoders/minimax_h3_qwen3vl.py`)."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int = 50
    hidden: int = 5120

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one layer, (inputs, outputs) by name, without bias."""
        inner, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, inner),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (inner, self.hidden),
            "gate_proj": (self.hidden, self.ffn),
            "up_proj": (self.hidden, self.ffn),
            "down_proj": (self.ffn, self.hidden),
        }

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: linear layers, two norms, two norms of a head."""
        return sum(inputs * outputs for inputs, outputs in self.linears.values()) + 2 * (self.hidden + self.head_dim)


@dataclass(frozen=True)
class VideoDecoder:
    """The video VAE's decoder, a vision transformer over tiles (`runtime/models/vaes/minimax_h3.py`, `.../vae_vit.py`,
    `.../klvae.py`)."""

    heads: int
    layers: int
    head_dim: int = 64
    ffn_factor: int = 4
    channels: int = 24
    registers: int = 5  # four register tokens and an empty class token follow the patches
    patch: int = 16  # pixels of a latent's edge
    patch_frames: int = 4  # frames of a latent
    clip_frames: int = 17
    dropped: int = 3  # latents by which clips overlap, of those of a clip
    tile: int = 256  # pixels
    tile_overlap: int = 64  # pixels, at least

    @property
    def hidden(self) -> int:
        """Width of a token."""
        return self.heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one layer, (inputs, outputs) by name, with bias."""
        width, ffn = self.hidden, self.ffn_factor * self.hidden
        return {
            "to_qkv": (width, 3 * width),
            "to_out": (width, width),
            "w1": (width, 2 * ffn),
            "w2": (ffn, width),
        }

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: linear layers with bias, two norms, two scales."""
        return sum((inputs + 1) * outputs for inputs, outputs in self.linears.values()) + 4 * self.hidden

    @property
    def own_latents(self) -> int:
        """Latent frames of a clip that no other clip has."""
        return math.ceil(self.clip_frames / self.patch_frames)

    @property
    def clip_latents(self) -> int:
        """Latent frames of a clip, with those that it shares with the next."""
        return self.own_latents + (-self.dropped) % self.own_latents

    def tile_tokens(self, width: int, height: int) -> int:
        """Tokens of one call, which decodes a tile of a clip; width, height: of the whole video, pixels."""
        rows, columns = (min(self.tile, edge) // self.patch for edge in (height, width))
        return self.clip_latents * rows * columns + self.registers

    @property
    def pixels_of_token(self) -> int:
        """Values that a token decodes to: RGB."""
        return 3 * self.patch_frames * self.patch**2


@dataclass(frozen=True)
class AudioDecoder:
    """The audio VAE's decoder, BigVGAN (`runtime/models/vaes/minimax_h3_audio_vae/`)."""

    latent: int
    initial: int
    channels: int = 32
    outputs: int = 2  # stereo: decoded as a batch
    latents_per_second: int = 40
    rates: tuple[int, ...] = (5, 5, 2, 2, 2, 2, 2)
    kernels: tuple[int, ...] = (9, 9, 4, 4, 4, 4, 4)
    residual_kernels: tuple[int, ...] = (3, 7, 11)
    residual_convolutions: int = 6  # three dilations, each with a second convolution
    edge_kernel: int = 7  # first and last convolution
    filter_taps: int = 12  # of the alias-free activation's two filters, which work at twice the rate

    @property
    def sample_rate(self) -> int:
        """Samples a second."""
        return self.latents_per_second * math.prod(self.rates)


@dataclass(frozen=True)
class Architecture:
    """All parts of the model that take time."""

    name: str
    dit: Dit
    text: TextEncoder
    video: VideoDecoder
    audio: AudioDecoder


PUBLISHED = Architecture(
    name="MiniMax-H3 FL2VA",
    dit=Dit(layers=50, hidden=5376, heads=56, ffn=14336, time_hidden=5376, time=2688),
    text=TextEncoder(heads=64, kv_heads=8, head_dim=128, ffn=25600),
    video=VideoDecoder(heads=32, layers=36),
    audio=AudioDecoder(latent=2048, initial=1024),
)
# The presets of engine/checkpoint/presets.py; a test compares the two.
WIDE = replace(PUBLISHED, name="synthetic, preset wide", dit=replace(PUBLISHED.dit, layers=4))
TINY = Architecture(
    name="synthetic, preset tiny",
    dit=Dit(layers=6, hidden=256, heads=2, ffn=512, time_hidden=256, time=128),
    text=TextEncoder(heads=1, kv_heads=1, head_dim=32, ffn=16),
    video=VideoDecoder(heads=2, layers=1),
    audio=AudioDecoder(latent=64, initial=256),
)
PRESETS = {"": PUBLISHED, "full": PUBLISHED, "wide": WIDE, "tiny": TINY}
"""By `checkpoint.preset`; the hub's checkpoint has none."""

PROMPT_TOKENS = {"98f36b879692095e099ae824c18d9e93e7006a490e082fd474a5f531769dcf06": 537}
"""Text tokens by the prompt's SHA-256. 537: the public Qwen vocabulary's own count, which is also what the published
38,247 tokens leave beside 37,296 of video and 414 of audio; a synthetic tokenizer is made to give the same."""
