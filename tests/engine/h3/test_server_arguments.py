"""Locks become SGLang's arguments, each explicitly."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.lock import load_target, read_prompt
from engine.h3.server_arguments import free_ports, request_arguments, server_arguments


def arguments(name: str, arm: str) -> dict[str, object]:
    target = load_target(name)
    return server_arguments(target, target.arms[arm], Path("/m/MiniMax-H3"), scheduler_port=1, master_port=2)  # type: ignore[index]


def test_the_4090_offloads_layer_by_layer_and_compiles_regions() -> None:
    found = arguments("rtx4090", "fullopt")
    assert found["layerwise_offload_components"] == ["dit", "text_encoder", "vae"]
    assert (found["dit_offload_prefetch_size"], found["dit_layerwise_resident_layers"]) == (1.0, 0.0)
    assert (found["enable_torch_compile"], found["regional_compile"]) == (True, True)
    assert (found["pin_cpu_memory"], found["num_gpus"], found["use_fsdp_inference"]) == (False, 1, False)
    assert arguments("rtx4090", "dense")["enable_torch_compile"] is False


@pytest.mark.parametrize("name", ["h100x4", "a100x4"])
def test_four_gpus_split_by_ulysses_without_offload(name: str) -> None:
    found = arguments(name, "fullopt")
    assert (found["num_gpus"], found["ulysses_degree"], found["tp_size"], found["ring_degree"]) == (4, 4, 1, 1)
    assert found["use_fsdp_inference"] is True
    assert "layerwise_offload_components" not in found
    assert found["enable_torch_compile"] is False


def test_a_dit_that_is_offloaded_layer_by_layer_is_loaded_in_host_memory() -> None:
    """SGLang's loader puts all of it onto the GPU otherwise, before the offload begins: 66 GB into 24 GB."""
    assert arguments("rtx4090", "dense")["dit_cpu_offload"] is True
    assert arguments("cpu", "dense")["dit_cpu_offload"] is True
    assert arguments("h100x4", "dense")["dit_cpu_offload"] is False
    assert arguments("cpu-fbc", "dense")["dit_cpu_offload"] is False


def test_nothing_is_left_to_sglangs_tuning() -> None:
    found = arguments("cpu", "dense")
    assert found["performance_mode"] == "manual"
    assert found["warmup_mode"] == "off"
    assert found["vae_cpu_offload"] is False


def test_the_request_is_the_published_one() -> None:
    target = load_target("rtx4090")
    resolved = target.model_copy(
        update={"request": target.request.model_copy(update={"prompt_text": read_prompt("starship")})}
    )
    found = request_arguments(resolved, seed=0, num_inference_steps=50, output=Path("/r/sample-1/out.mp4"))
    assert found["target"] == {"short_edge": 768, "aspect_ratio": "16:9", "duration_seconds": 5.0}
    assert (found["flow_shift"], found["audio_flow_shift"], found["num_inference_steps"]) == (12.0, 3.0, 50)
    assert (found["output_path"], found["output_file_name"]) == ("/r/sample-1", "out.mp4")
    assert str(found["prompt"]).startswith("integrated_multimodal_description: [Shot 1]")


def test_ports_are_distinct_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
