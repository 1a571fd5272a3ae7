"""From a lock to the arguments of SGLang's DiffGenerator and of one request. Everything explicit: SGLang's
auto-tuning is off."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from config.schema import Arm, Target

CUDNN = "torch_cudnn_sdpa"


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports that are free now. SGLang's fixed rendezvous port 30005 collides when two runs share a
    machine."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for handle in sockets:
            handle.bind(("127.0.0.1", 0))
        return [handle.getsockname()[1] for handle in sockets]
    finally:
        for handle in sockets:
            handle.close()


def server_arguments(
    target: Target, arm: Arm, checkpoint: Path, *, scheduler_port: int, master_port: int
) -> dict[str, Any]:
    """Keyword arguments of `DiffGenerator.from_pretrained`.

    Args:
        target, arm: what the lock says.
        checkpoint: the directory that holds the partition (SGLang appends the subfolder itself).
        scheduler_port, master_port: free ports of this machine.
    """
    offload, parallel = target.offload, target.parallel
    arguments: dict[str, Any] = {
        "model_path": str(checkpoint),
        "num_gpus": parallel.num_gpus,
        "tp_size": parallel.tensor_parallel,
        "ulysses_degree": parallel.ulysses,
        "ring_degree": 1,
        "attention_backend": target.attention,
        "performance_mode": "manual",
        "warmup_mode": "off",
        "use_fsdp_inference": parallel.fsdp,
        "enable_torch_compile": arm.compile,
        "regional_compile": arm.compile and target.compile.regional,
        # SGLang loads a DiT onto the device as a whole and offloads its layers afterwards, unless this is set: 66 GB do
        # not fit into 24. It says where the DiT is loaded; where it lives is then the layer-wise offload's.
        "dit_cpu_offload": "dit" in offload.components,
        "text_encoder_cpu_offload": False,
        "image_encoder_cpu_offload": False,
        "vae_cpu_offload": False,
        "pin_cpu_memory": offload.pin_cpu_memory,
        "scheduler_port": scheduler_port,
        "master_port": master_port,
    }
    if target.attention == CUDNN:
        # The text encoder's causal mask over grouped heads is not among what cuDNN's attention takes.
        arguments["component_attention_backends"] = {"text_encoder": "torch_sdpa"}
    if offload.components:
        arguments |= {
            "layerwise_offload_components": list(offload.components),
            "dit_offload_prefetch_size": float(offload.prefetch),
            "dit_layerwise_resident_layers": float(offload.resident_layers),
        }
    return arguments


def request_arguments(target: Target, *, seed: int, num_inference_steps: int, output: Path) -> dict[str, Any]:
    """`sampling_params_kwargs` of one request whose media goes to `output`."""
    request = target.request
    return {
        "prompt": request.prompt_text,
        "task": request.task,
        "conditions": [],
        "target": {
            "short_edge": request.short_edge,
            "aspect_ratio": request.aspect_ratio,
            "duration_seconds": request.duration_seconds,
        },
        "num_inference_steps": num_inference_steps,
        "flow_shift": request.flow_shift,
        "audio_flow_shift": request.audio_flow_shift,
        "seed": seed,
        "save_output": True,
        "output_path": str(output.parent),
        "output_file_name": output.name,
    }
