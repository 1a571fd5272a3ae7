"""Sizes against the checkpoints that are made with them; ceilings against the targets that need them."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from config.architecture import PRESETS, PROMPT_TOKENS, PUBLISHED
from config.ceilings import Ceilings, ceilings_of, known_gpus
from config.lock import load_target, resolve, target_names
from config.schema import Checkpoint


def test_presets_are_those_of_the_synthetic_checkpoints() -> None:
    synthesise = pytest.importorskip("engine.checkpoint.synthesise", reason="torch is not installed")
    assert {*PRESETS} >= {"", *synthesise.PRESETS}
    for name, preset in synthesise.PRESETS.items():
        ours, theirs = PRESETS[name], preset.dit
        assert (ours.dit.layers, ours.dit.hidden, ours.dit.heads, ours.dit.ffn) == (
            theirs.num_layers,
            theirs.hidden_size,
            theirs.num_attention_heads,
            theirs.ffn_hidden_size,
        )
        assert (ours.dit.time_hidden, ours.dit.time) == (theirs.time_embed_hidden_size, theirs.time_embed_dim)
        assert (ours.dit.refiner_layers, ours.dit.head_dim) == (
            theirs.token_refiner_num_layers,
            theirs.attention_head_dim,
        )
        assert (ours.text.heads, ours.text.kv_heads, ours.text.head_dim, ours.text.ffn) == (
            preset.text_heads,
            preset.text_kv_heads,
            preset.text_head_dim,
            preset.text_ffn,
        )
        decoder, audio = preset.video_vae_decoder, preset.audio_vae
        assert ours.video.heads == decoder.get("heads", PUBLISHED.video.heads)
        assert ours.video.layers == decoder.get("num_layers", PUBLISHED.video.layers)
        assert ours.audio.latent == audio.get("latent_dim", PUBLISHED.audio.latent)
        assert ours.audio.initial == audio.get("decoder_dim", PUBLISHED.audio.initial)
    assert set(PROMPT_TOKENS.values()) == {synthesise.PUBLISHED_TEXT_TOKENS}


def test_every_preset_that_a_target_may_name_has_an_architecture() -> None:
    assert set(get_args(Checkpoint.model_fields["preset"].annotation)) <= {*PRESETS}


def test_the_published_model_has_its_published_size() -> None:
    """NVlabs/Sana: 33B, 50 blocks, 56 heads x 128; a block with its modulation is 1.291 GB in BF16."""
    dit = PUBLISHED.dit
    assert (dit.layers, dit.inner) == (50, 7168)
    assert dit.block_parameters * 2 / 1e9 == pytest.approx(1.291, abs=5e-4)
    assert PUBLISHED.text.layers * PUBLISHED.text.layer_parameters / 1e9 == pytest.approx(24.38, abs=5e-3)


@pytest.mark.parametrize("name", [name for name in target_names() if load_target(name).hardware.kind == "cuda"])
def test_every_gpu_target_has_ceilings_and_several_gpus_a_link(name: str) -> None:
    target = load_target(name)
    ceilings = ceilings_of(target.hardware.gpu_name)
    assert ceilings is not None
    assert ceilings.gb_s.link is not None or target.parallel.num_gpus == 1


def test_figures_of_data_sheets_say_so_and_those_of_the_h200_were_measured() -> None:
    for name in known_gpus():
        ceilings = ceilings_of(name)
        assert ceilings is not None
        for figure in ceilings.all.values():
            if figure.origin == "data sheet":
                assert figure.source.startswith(("NVIDIA ", "https://www.nvidia.com/")), figure
        measured = {key for key, figure in ceilings.all.items() if figure.origin == "measured"}
        everything = {"tflops.half", "tflops.attention", "gb_s.memory", "gb_s.host", "gb_s.link"}
        assert measured == (everything if name == "NVIDIA H200" else set())
    assert ceilings_of("NVIDIA L40S") is None and ceilings_of("") is None


def test_a_measured_figure_without_its_machine_is_refused() -> None:
    whole = ceilings_of("NVIDIA H200")
    assert whole is not None
    with pytest.raises(ValidationError, match="measured figures have a machine"):
        Ceilings.model_validate({**whole.model_dump(), "machine": None})


def test_ceilings_are_in_no_lock() -> None:
    assert all("ceilings" not in resolve(name).values for name in target_names())
