"""Synthetic FL2VA checkpoints in the layout that SGLang's loader accepts.

They make speed, memory and numerics measurable without the published weights. They say nothing about quality, and no
published claim can be verified with them.

Each element is a pure function of (seed, tensor name, index), see `engine.checkpoint.draw`. A tiny checkpoint is
written out; a full-size one is headers alone, drawn on the device that it is loaded to (`engine.checkpoint.deferred`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from config.lock import read_prompt
from engine.checkpoint.deferred import write_header
from engine.checkpoint.draw import Draw
from engine.checkpoint.presets import PRESETS, TEXT_WIDTH, Preset
from engine.checkpoint.tokenizer import SPECIAL_TOKENS, build_tokenizer, learn_merges

PUBLISHED_TEXT_TOKENS = 537  # the public Qwen vocabulary on the published demo prompt; 38,247 = 37,296 + 414 + 537


class _Tensors:
    """Collects one safetensors file's tensors, each drawn from the hash of its own name."""

    def __init__(self, seed: int, component: str) -> None:
        self.seed, self.component = seed, component
        self.draws: dict[str, Draw] = {}

    def draw(
        self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16, std: float | None = None, mean: float = 0.0
    ) -> None:
        std = std if std is not None else (shape[-1] ** -0.5 if len(shape) > 1 else 0.02)
        self.draws[name] = Draw(self.seed, f"{self.component}/{name}", shape, dtype, std, mean)

    def norm(self, name: str, width: int) -> None:
        self.draw(name, width, std=0.02, mean=1.0)

    def constant(self, name: str, values: torch.Tensor) -> None:
        self.draws[name] = Draw(
            self.seed, f"{self.component}/{name}", tuple(values.shape), values.dtype, values=tuple(values.tolist())
        )

    def save(self, path: Path, *, with_data: bool) -> None:
        if not with_data:
            write_header(path, self.draws)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: draw.tensor() for name, draw in self.draws.items()}
        save_file(tensors, str(path), metadata={"format": "pt"})


def synthesise(root: Path, preset_name: str, seed: int, *, on_part: Callable[[str], None] = lambda part: None) -> None:
    """Write a synthetic checkpoint to `root`/MiniMax-H3/FL2VA; an existing one is replaced only when the new one is
    complete.

    Raises:
        KeyError: no such preset.
        OSError: the files cannot be written.
    """
    preset = PRESETS[preset_name]
    final = root / "MiniMax-H3"
    partial = root / "MiniMax-H3.partial"
    shutil.rmtree(partial, ignore_errors=True)
    folder = partial / "FL2VA"
    folder.mkdir(parents=True)
    for name, write in _parts(folder, preset, seed):
        on_part(name)
        write()
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def _parts(folder: Path, preset: Preset, seed: int) -> Iterator[tuple[str, Callable[[], None]]]:
    yield "index", lambda: _write_json(folder / "model_index.json", MODEL_INDEX)
    yield "transformer", lambda: _write_dit(folder / "transformer", preset, seed)
    yield "tokenizer", lambda: _write_tokenizer(folder)
    yield "text encoder", lambda: _write_text_encoder(folder / "text_encoder", preset, seed)
    yield "VAEs", lambda: _write_vaes(folder, preset, seed)


MODEL_INDEX = {
    "_class_name": "MiniMaxH3Pipeline",
    "_diffusers_version": "0.37.0",
    "_minimax_h3": {
        "schema_version": 1,
        "partition": "fl2va",
        "tasks": ["t2va", "fl2va"],
        "task_aliases": {},
        "sigma_shift_scales": {"video": 12.0, "audio": 3.0},
    },
    "scheduler": None,
    "processor": ["transformers", "Qwen3VLProcessor"],
    "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "video_vae": ["diffusers", "MiniMaxH3VideoVAE"],
    "audio_vae": ["diffusers", "MiniMaxH3AudioVAE"],
    "transformer": ["diffusers", "MiniMaxH3DiTModel"],
}


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", "utf-8")


def _write_dit(folder: Path, preset: Preset, seed: int) -> None:
    size = preset.dit
    hidden, heads, width = size.hidden_size, size.num_attention_heads, size.attention_head_dim
    config = {
        "_class_name": "MiniMaxH3DiTModel",
        "num_layers": size.num_layers,
        "token_refiner_num_layers": size.token_refiner_num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "attention_head_dim": width,
        "ffn_hidden_size": size.ffn_hidden_size,
        "latents_dim": 24,
        "audio_latents_dim": 32,
        "patch_size": [1, 2, 2],
        "text_dim": TEXT_WIDTH,
        "timestep_input_dim": 256,
        "time_embed_hidden_size": size.time_embed_hidden_size,
        "time_embed_dim": size.time_embed_dim,
        "adaln_out_features": 18 * hidden,
        "final_adaln_out_features": 2 * hidden,
        "rope_inv_freq_len": 16,
        "norm_eps": 1e-5,
        "qk_norm_eps": 1e-5,
        "final_norm_eps": 1e-5,
    }
    _write_json(folder / "config.json", config)
    out = _Tensors(seed, "transformer")
    fp32 = torch.float32
    for name, rows, columns in (
        ("video_patch_proj", hidden, 96),
        ("audio_patch_proj", hidden, 32),
        ("time_embedder.proj_in", size.time_embed_hidden_size, 256),
        ("time_embedder.proj_out", size.time_embed_dim, size.time_embed_hidden_size),
        ("final_layer.video_out", 96, hidden),
        ("final_layer.audio_out", 32, hidden),
    ):
        out.draw(f"{name}.weight", rows, columns, dtype=fp32)
        out.draw(f"{name}.bias", rows, dtype=fp32)
    out.draw("condition_proj.weight", hidden, TEXT_WIDTH)
    out.draw("condition_proj.bias", hidden)
    out.constant("rope.inv_freq", 10000.0 ** -(torch.arange(0, 32, 2, dtype=fp32) / 32))

    def block(prefix: str, *, modulated: bool) -> None:
        out.norm(f"{prefix}.norm1.weight", hidden)
        out.norm(f"{prefix}.norm2.weight", hidden)
        out.draw(f"{prefix}.attn.qkv_proj.weight", 3 * heads * width, hidden)
        out.norm(f"{prefix}.attn.q_norm.weight", width)
        out.norm(f"{prefix}.attn.k_norm.weight", width)
        out.draw(f"{prefix}.attn.out_proj.weight", hidden, heads * width)
        out.draw(f"{prefix}.mlp.fc1.weight", 2 * size.ffn_hidden_size, hidden)
        out.draw(f"{prefix}.mlp.fc2.weight", hidden, size.ffn_hidden_size)
        if modulated:
            out.draw(f"{prefix}.adaln_proj.linear.weight", 18 * hidden, size.time_embed_dim)
            out.draw(f"{prefix}.adaln_proj.linear.bias", 18 * hidden)

    for index in range(size.token_refiner_num_layers):
        block(f"token_refiner.blocks.{index}", modulated=False)
    out.norm("token_refiner.final_norm.weight", hidden)
    for index in range(size.num_layers):
        block(f"blocks.{index}", modulated=True)
    out.norm("final_layer.norm.weight", hidden)
    out.draw("final_layer.adaln_proj.linear.weight", 2 * hidden, size.time_embed_dim)
    out.draw("final_layer.adaln_proj.linear.bias", 2 * hidden)
    out.save(folder / "diffusion_pytorch_model.safetensors", with_data=preset.with_data)


def _write_tokenizer(folder: Path) -> None:
    merges = learn_merges(read_prompt("starship"), PUBLISHED_TEXT_TOKENS)
    tokenizer = build_tokenizer(merges)
    vocabulary = {token: index for token, index in tokenizer.get_vocab().items() if token not in SPECIAL_TOKENS}
    for name in ("tokenizer", "processor"):
        tokenizer.save_pretrained(folder / name)
        _write_json(folder / name / "vocab.json", vocabulary)
        lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
        (folder / name / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")
    image = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    _write_json(
        folder / "processor" / "preprocessor_config.json",
        {
            **image,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        },
    )
    _write_json(
        folder / "processor" / "video_preprocessor_config.json",
        {
            **image,
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        },
    )
    _write_json(folder / "processor" / "processor_config.json", {"processor_class": "Qwen3VLProcessor"})


def _write_text_encoder(folder: Path, preset: Preset, seed: int) -> None:
    from tokenizers import Tokenizer
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = Tokenizer.from_file(str(folder.parent / "tokenizer" / "tokenizer.json"))
    half = preset.text_head_dim // 2
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": preset.text_vocabulary or -(-tokenizer.get_vocab_size() // 64) * 64,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": preset.text_ffn,
            "num_hidden_layers": preset.text_layers,
            "num_attention_heads": preset.text_heads,
            "num_key_value_heads": preset.text_kv_heads,
            "head_dim": preset.text_head_dim,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [half - 2 * (half * 5 // 16), half * 5 // 16, half * 5 // 16],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            **preset.vision,
            "out_hidden_size": TEXT_WIDTH,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
        },
        image_token_id=tokenizer.token_to_id("<|image_pad|>"),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
        vision_start_token_id=tokenizer.token_to_id("<|vision_start|>"),
        vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in Qwen3VLForConditionalGeneration(config).state_dict().items()}
    out = _Tensors(seed, "text_encoder")
    for name, shape in shapes.items():
        if "norm" in name and name.endswith("weight"):
            out.norm(name, shape[0])
        else:
            out.draw(name, *shape, std=None if len(shape) > 1 else 0.01)
    out.save(folder / "model.safetensors", with_data=preset.with_data)
    config.dtype = "bfloat16"
    config.save_pretrained(folder)


def _write_vaes(folder: Path, preset: Preset, seed: int) -> None:
    from sglang.multimodal_gen.configs.models.vaes.minimax_h3_audio import MiniMaxH3AudioVAEConfig
    from sglang.multimodal_gen.configs.models.vaes.minimax_h3_video import MiniMaxH3VideoVAEConfig
    from sglang.multimodal_gen.runtime.models.vaes.minimax_h3 import MiniMaxH3AudioVAE, MiniMaxH3VideoVAE

    from engine.h3.cpu import shrunken_vaes

    with torch.device("meta"), shrunken_vaes(preset):
        video = MiniMaxH3VideoVAE(MiniMaxH3VideoVAEConfig())
        audio = MiniMaxH3AudioVAE(MiniMaxH3AudioVAEConfig())
    for out, path in (
        (_draw_like(video, seed, "video_vae"), folder / "video_vae" / "source" / "model.safetensors"),
        (_draw_like(audio, seed, "audio_vae"), folder / "audio_vae" / "model.safetensors"),
    ):
        out.save(path, with_data=preset.with_data)
    _write_json(
        folder / "video_vae" / "config.json",
        {
            "_class_name": "MiniMaxH3VideoVAE",
            "latent_channels": 24,
            "latents_mean": [0.0] * 24,
            "latents_std": [1.0] * 24,
            "temporal_compression_ratio": 4,
            "spatial_compression_ratio": 16,
            "vae_clip_length": 17,
            "vae_token_drop": 3,
            "vae_encoder_tiling": 1,
            "vae_decoder_tiling": 1,
            "vae_parallel_tiling": 1,
            "vae_tile_size": 256,
            "vae_tile_overlap_min": 64,
            "vae_chunk_dim": -1,
        },
    )
    _write_json(
        folder / "audio_vae" / "config.json",
        {
            "_class_name": "MiniMaxH3AudioVAE",
            "sample_rate": 32000,
            "latent_channels": 32,
            "latents_mean": [0.0] * 32,
            "latents_std": [1.0] * 32,
            "output_channel": 2,
        },
    )


def _draw_like(module: torch.nn.Module, seed: int, component: str) -> _Tensors:
    """Draw every tensor of a module's state. LayerScale and other one-dimensional gains are not zero: zeros would
    cancel the blocks."""
    out = _Tensors(seed, component)
    for name, tensor in module.state_dict().items():
        shape, leaf = tuple(tensor.shape), name.rsplit(".", 1)[-1]
        if not tensor.is_floating_point():
            raise ValueError(f"{component} tensor {name} has dtype {tensor.dtype}, floating point expected")
        if leaf in ("original0", "alpha") or ("norm" in name and leaf == "weight" and len(shape) == 1):
            out.draw(name, *shape, dtype=tensor.dtype, std=0.02, mean=1.0)
        elif len(shape) > 1:
            fan_in = int(np.prod(shape[1:]))
            out.draw(name, *shape, dtype=tensor.dtype, std=fan_in**-0.5)
        else:
            out.draw(name, *shape, dtype=tensor.dtype, std=0.5 if "scale" in name else 0.02)
    return out
