"""FLOPs of SGLang's own modules, counted by torch.utils.flop_counter on tensors without data; prints JSON.

A process of its own: SGLang wants a process group, and an environment variable that makes it take the CPU's branches.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": sys.argv[1],
}
os.environ["SGLANG_DIFFUSION_PLATFORM_OVERRIDE"] = "cpu"

import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.checkpoint import synthesise
from engine.h3.cpu import declare_torchvision_operators, shrunken_vaes

# preset: (live rows, rows, text, audio), frames, width, height: the documents of the targets h200 and cpu
DOCUMENTS = {
    "full": ((38247, 38272, 537, 414), 124, 1344, 768),
    "tiny": ((2011, 2048, 537, 130), 39, 448, 256),
}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def count(call: Callable[[], Any]) -> dict[str, int]:
    """FLOPs of a call, by operator and in all."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()} | {
        "all": counter.get_total_flops()
    }


def dit(preset: str) -> Iterator[tuple[str, Any]]:
    """Forwards with all blocks, with one and with none, and the refiner."""
    from sglang.multimodal_gen.configs.models.dits.minimax_h3 import MiniMaxH3DiTArchConfig, MiniMaxH3DiTConfig
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
    from sglang.multimodal_gen.runtime.models.dits.minimax_h3 import MiniMaxH3DiTModel

    size = synthesise.PRESETS["tiny"].dit
    small = MiniMaxH3DiTArchConfig(
        num_layers=size.num_layers,
        hidden_size=size.hidden_size,
        num_attention_heads=size.num_attention_heads,
        ffn_hidden_size=size.ffn_hidden_size,
        time_embed_hidden_size=size.time_embed_hidden_size,
        time_embed_dim=size.time_embed_dim,
        adaln_out_features=18 * size.hidden_size,
        final_adaln_out_features=2 * size.hidden_size,
    )
    arch = small if preset == "tiny" else MiniMaxH3DiTArchConfig()
    with torch.device("meta"):
        model = MiniMaxH3DiTModel(MiniMaxH3DiTConfig(arch_config=arch), {})
    yield "parameters", sum(parameter.numel() for parameter in model.parameters())
    yield "block parameters", sum(parameter.numel() for parameter in model.blocks[0].parameters())
    (live, rows, text, audio), *_ = DOCUMENTS[preset]
    video, long = live - text - audio, torch.long
    arguments = {
        "x": empty(1, rows, 96),
        "audio_x": empty(1, rows, 32),
        "img_position_ids": empty(1, rows, 3),
        "unique_timesteps": empty(2),
        "inverse_indices": empty(rows, dtype=long),
        "update_mask": empty(video, dtype=torch.bool),
        "block_token_tags": empty(rows, dtype=long),
        "block_combined_indices": empty(rows, dtype=long),
        "skip_mask_out_condition": True,
        "prompt_embeds": empty(text, arch.hidden_size, dtype=torch.bfloat16),
        "refined_prompt_embeds_length": text,
        "img_pos_info": {"position_ids": empty(video, dtype=long)},
        "audio_pos_info": {"position_ids": empty(audio, dtype=long)},
        "text_pos_info": {"position_ids": empty(text, dtype=long)},
        "img_pos_for_infer_output_info": {"position_ids": empty(video, dtype=long)},
        "local_embedding_layout": {
            "text_source_start": 0,
            "text_source_stop": text,
            "img_global_ids": empty(video, dtype=long),
            "img_row_ids": empty(video, dtype=long),
            "audio_global_ids": empty(audio, dtype=long),
            "audio_row_ids": empty(audio, dtype=long),
        },
        "packed_seq_params": {
            "cu_seqlens_q": empty(3, dtype=torch.int32),
            "cu_seqlens_q_host": (0, live, rows),
            "max_seqlen_q": live,
        },
        "refiner_packed_seq_params": {
            "cu_seqlens_q": empty(3, dtype=torch.int32),
            "cu_seqlens_q_host": (0, text, text),
            "max_seqlen_q": text,
        },
    }
    blocks = list(model.blocks)
    with set_forward_context(current_timestep=0, attn_metadata=None):
        for name, kept in (("forward", blocks), ("one block", blocks[:1]), ("no block", [])):
            model.blocks = torch.nn.ModuleList(kept)
            yield name, count(lambda: model(**arguments))
        prompt = empty(text, 5120, dtype=torch.bfloat16)
        segments = torch.tensor([0, text, text], dtype=torch.int32)
        yield (
            "refiner",
            count(lambda: model.refine_prompt_embeds(prompt, segments, device=torch.device("meta"))),
        )


def text_encoder(preset: str) -> Iterator[tuple[str, Any]]:
    """Fifty layers of the text encoder on the prompt's 537 tokens."""
    from sglang.multimodal_gen.configs.models.encoders.minimax_h3_qwen3vl import MiniMaxH3Qwen3VLConfig
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
    from sglang.multimodal_gen.runtime.models.encoders.minimax_h3_qwen3vl import MiniMaxH3Qwen3VLEncoder
    from transformers import Qwen3VLConfig

    config, sizes = MiniMaxH3Qwen3VLConfig(), synthesise.PRESETS["tiny"]
    arch = config.arch_config
    if preset == "tiny":
        arch.num_attention_heads = arch.num_key_value_heads = sizes.text_heads
        arch.head_dim, arch.intermediate_size = sizes.text_head_dim, sizes.text_ffn
    half = arch.head_dim // 2
    hf = Qwen3VLConfig(
        text_config={
            "vocab_size": 1024,
            "hidden_size": 5120,
            "intermediate_size": arch.intermediate_size,
            "num_hidden_layers": 50,
            "num_attention_heads": arch.num_attention_heads,
            "num_key_value_heads": arch.num_key_value_heads,
            "head_dim": arch.head_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [half - 2 * (half * 5 // 16), half * 5 // 16, half * 5 // 16],
                "mrope_interleaved": True,
            },
        },
        vision_config={"depth": 1, "hidden_size": 64, "num_heads": 2, "deepstack_visual_indexes": [0]},
    )
    for name in ("text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id"):
        setattr(arch, name, getattr(hf, name))
    with torch.device("meta"):
        encoder = MiniMaxH3Qwen3VLEncoder(config)
    layer = encoder.model.language_model.layers[0]
    yield "text layer parameters", sum(parameter.numel() for parameter in layer.parameters())
    tokens = DOCUMENTS[preset][0][2]
    ids = empty(1, tokens, dtype=torch.long)
    positions = empty(3, 1, tokens, dtype=torch.long)
    with set_forward_context(current_timestep=0, attn_metadata=None):
        asked = {"output_attentions": False, "output_hidden_states": False, "return_dict": True, "use_cache": False}
        yield "text", count(lambda: encoder.model(input_ids=ids, position_ids=positions, attention_mask=None, **asked))


def decoders(preset: str) -> Iterator[tuple[str, Any]]:
    """The audio decoder; the video decoder with its tiles and clips, but one layer: all are alike."""
    from sglang.multimodal_gen.configs.models.vaes.minimax_h3_audio import MiniMaxH3AudioVAEConfig
    from sglang.multimodal_gen.configs.models.vaes.minimax_h3_video import MiniMaxH3VideoVAEConfig
    from sglang.multimodal_gen.runtime.models.vaes.minimax_h3 import MiniMaxH3AudioVAE, MiniMaxH3VideoVAE

    (_, _, _, audio_rows), frames, width, height = DOCUMENTS[preset]
    small = shrunken_vaes(synthesise.PRESETS["tiny"]) if preset == "tiny" else contextlib.nullcontext()
    with torch.device("meta"), small:
        video, audio = MiniMaxH3VideoVAE(MiniMaxH3VideoVAEConfig()), MiniMaxH3AudioVAE(MiniMaxH3AudioVAEConfig())
    yield "video layers", len(video.decoder.transformer_blocks)
    yield "video layer parameters", sum(p.numel() for p in video.decoder.transformer_blocks[0].parameters())
    video.decoder.transformer_blocks = video.decoder.transformer_blocks[:1]
    calls = 0
    decode = video.decode

    def counted(z: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return decode(z)

    video.decode = counted
    latents = (frames - 5) // 17 * 5 + 2
    yield "video", count(lambda: video.decode_base(empty(1, 24, latents, height // 16, width // 16)))
    yield "video calls", calls
    yield "audio", count(lambda: audio.decode(empty(2, 32, audio_rows // 2)))


def main() -> None:
    """Print every count of both presets."""
    declare_torchvision_operators()
    from sglang.multimodal_gen.runtime.distributed import maybe_init_distributed_environment_and_model_parallel
    from sglang.multimodal_gen.runtime.server_args import set_global_server_args

    set_global_server_args(SimpleNamespace(attention_backend="torch_sdpa"))
    maybe_init_distributed_environment_and_model_parallel(
        tp_size=1,
        sp_size=1,
        cfg_degree=1,
        ulysses_degree=1,
        ring_degree=1,
        dp_size=1,
        distributed_init_method=f"tcp://127.0.0.1:{sys.argv[1]}",
        dist_timeout=None,
    )
    with contextlib.redirect_stdout(sys.stderr):
        counts = {preset: dict([*dit(preset), *text_encoder(preset), *decoders(preset)]) for preset in DOCUMENTS}
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
