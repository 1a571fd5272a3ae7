"""Sizes of synthetic checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

TEXT_LAYERS, TEXT_WIDTH = 50, 5120  # module constants of SGLang's H3 text encoder


@dataclass(frozen=True)
class DitSize:
    """Sizes of the DiT as its config.json names them."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    time_embed_hidden_size: int
    time_embed_dim: int
    token_refiner_num_layers: int = 2
    attention_head_dim: int = 128


@dataclass(frozen=True)
class Preset:
    """One size of synthetic checkpoint. VAE entries override the constructor arguments that SGLang hard-codes.

    text_vocabulary: rows of the embedding; 0 for as many as the tokenizer has, rounded up to 64.
    with_data: whether the files hold the numbers.
    """

    dit: DitSize
    text_layers: int
    text_heads: int
    text_kv_heads: int
    text_head_dim: int
    text_ffn: int
    text_vocabulary: int
    vision: Mapping[str, Any]
    video_vae: Mapping[str, Any]
    video_vae_decoder: Mapping[str, Any]
    audio_vae: Mapping[str, Any]
    with_data: bool = True


PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        dit=DitSize(
            num_layers=6,
            hidden_size=256,
            num_attention_heads=2,
            ffn_hidden_size=512,
            time_embed_hidden_size=256,
            time_embed_dim=128,
        ),
        text_layers=TEXT_LAYERS,
        text_heads=1,
        text_kv_heads=1,
        text_head_dim=32,
        text_ffn=16,
        text_vocabulary=0,
        vision={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        video_vae={"ch": 32, "ch_mult": [1] * 6, "num_res_blocks": 1},
        video_vae_decoder={"heads": 2, "num_layers": 1},
        audio_vae={"encoder_dim": 4, "latent_dim": 64, "decoder_dim": 256},
    ),
    # The published shapes: SGLang's defaults for the DiT (configs/models/dits/minimax_h3.py), Qwen3-VL-32B's text and
    # vision configuration, and the VAEs as SGLang hard-codes them.
    "full": Preset(
        dit=DitSize(
            num_layers=50,
            hidden_size=5376,
            num_attention_heads=56,
            ffn_hidden_size=14336,
            time_embed_hidden_size=5376,
            time_embed_dim=2688,
        ),
        text_layers=64,
        text_heads=64,
        text_kv_heads=8,
        text_head_dim=128,
        text_ffn=25600,
        text_vocabulary=151936,
        vision={
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        video_vae={},
        video_vae_decoder={},
        audio_vae={},
        with_data=False,
    ),
}
# The published shapes with four of fifty blocks: what is computed at full width, in a tenth of the time.
PRESETS["wide"] = replace(PRESETS["full"], dit=replace(PRESETS["full"].dit, num_layers=4))
