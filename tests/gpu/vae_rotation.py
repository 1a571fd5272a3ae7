"""The video VAE's decode with the Triton rotation in place of sgl_kernel's, against its plain PyTorch branch.

    python -m tests.gpu.vae_rotation [--json FILE] [--latents 7] [--full] [--layers 36]

SGLang's real decoder at its full width with random weights: LayerScale parameters are random, and not the zeros of a
fresh module, which would cancel every block and hide the rotation. Three decodes of the same latents are compared:
ours, the plain branch (SGLang's ``apply_rotary_pos_emb``), and one without any rotation, which must differ, or the
comparison would prove nothing. ``--full`` adds one decode each of a whole five-second request (37 latent frames).
Without a CUDA device or SGLang: exit code 10 (the environment's).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from config.errors import Exit
from engine.h3 import sgl_kernel_stand_in

VAES = "sglang.multimodal_gen.runtime.models.vaes."
LATENT = 24, 48, 84  # channels, rows and columns of the published size, 1344 x 768
FULL = 37  # latent frames of five seconds
DTYPE = torch.float16  # SGLang's autocast for this decoder on CUDA
NEEDED = "sglang", "xgrammar", "IPython"


def missing() -> str | None:
    """Why this cannot run here, or None when it can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device; this machine has none"
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(absent)}, which is not installed" if absent else None


def start_sglang(port: int = 29578) -> list[str]:
    """Stand-ins, then SGLang's process groups of one rank. Returns the stand-ins' names."""
    installed = sgl_kernel_stand_in.install()
    distributed = importlib.import_module("sglang.multimodal_gen.runtime.distributed")
    arguments = importlib.import_module("sglang.multimodal_gen.runtime.server_args")
    arguments.set_global_server_args(types.SimpleNamespace(attention_backend="torch_sdpa"))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    distributed.maybe_init_distributed_environment_and_model_parallel(
        tp_size=1, sp_size=1, cfg_degree=1, ulysses_degree=1, ring_degree=1, dp_size=1,
        distributed_init_method=f"tcp://127.0.0.1:{port}", dist_timeout=None,
    )  # fmt: skip
    return installed


def build(device: torch.device, decoder: dict[str, Any], vae: dict[str, Any] | None = None) -> Any:
    """SGLang's video VAE with random weights and random LayerScale. decoder, vae: sizes to override."""
    module = importlib.import_module(VAES + "minimax_h3")
    config = importlib.import_module("sglang.multimodal_gen.configs.models.vaes.minimax_h3_video")
    init = module.AutoencoderKLLegacy.__init__

    def sized(self: Any, **kwargs: Any) -> None:
        init(self, **{**kwargs, **(vae or {}), "vit_decoder_kwargs": {**kwargs["vit_decoder_kwargs"], **decoder}})

    module.AutoencoderKLLegacy.__init__ = sized
    try:
        torch.manual_seed(0)
        with torch.device(device):
            model = module.MiniMaxH3VideoVAE(config.MiniMaxH3VideoVAEConfig())
    finally:
        module.AutoencoderKLLegacy.__init__ = init
    model.to(device).eval()
    scales = [p for name, p in model.named_parameters() if name.endswith((".scale1", ".scale2"))]
    assert scales, "no LayerScale parameters: SGLang's decoder has changed"
    with torch.no_grad():
        for scale in scales:
            scale.uniform_(0.5, 1.5)
    if device.type == "cuda":
        model.prepare_decoder_autocast_weights(DTYPE)
    return model


class Rotation:
    """Sets how queries and keys are rotated: ``ours`` (SGLang's own code, so the stand-in), ``plain`` or ``none``."""

    def __init__(self) -> None:
        self.attention = importlib.import_module(VAES + "minimax_h3_video_vae.attention")
        utilities = importlib.import_module(VAES + "minimax_h3_video_vae.vit_utils")
        stock, one = utilities.apply_rotary_pos_emb_qk, utilities.apply_rotary_pos_emb
        self.ways: dict[str, Callable[..., Any]] = {
            "ours": stock,
            "plain": lambda query, key, cache: (one(query, cache), one(key, cache)),
            "none": lambda query, key, cache: (query, key),
        }

    def use(self, way: str) -> None:
        self.attention.apply_rotary_pos_emb_qk = self.ways[way]


def decode(model: Any, latents: torch.Tensor) -> torch.Tensor:
    """The request's own decode: autocast, then the pixel transform. [1, 3, frames, rows, columns]."""
    device = latents.device.type
    with torch.inference_mode(), torch.autocast(device, dtype=DTYPE, enabled=device == "cuda"):
        return model.processor.revert_tensor(model.decode_base(latents))


def timed(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """The result and its wall-clock seconds: the decode is bound by the host, so events would show less than all."""
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronise()
    began = time.perf_counter()
    out = call()
    synchronise()
    return out, time.perf_counter() - began


def count_stand_in() -> list[int]:
    """A list that grows by the token count of every call of ``sgl_kernel.rotary_embedding`` from now on."""
    calls: list[int] = []

    def counted(positions: torch.Tensor, *arguments: Any, **options: Any) -> None:
        calls.append(positions.shape[0])
        sgl_kernel_stand_in.rotary_embedding(positions, *arguments, **options)

    sys.modules[sgl_kernel_stand_in.SGL_KERNEL].rotary_embedding = counted  # type: ignore[attr-defined]
    return calls


def uncount_stand_in() -> None:
    sys.modules[sgl_kernel_stand_in.SGL_KERNEL].rotary_embedding = (  # type: ignore[attr-defined]
        sgl_kernel_stand_in.rotary_embedding
    )


def compare(model: Any, latents: torch.Tensor, repeats: int, ways: tuple[str, ...] = ("ours", "plain", "none")) -> dict:
    """Decode with every way, ``repeats`` times in turns; differences are to ``plain``."""
    rotation = Rotation()
    calls = count_stand_in()
    kept: dict[str, torch.Tensor] = {}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    same = True
    for turn in range(repeats):
        for way in ways if turn == 0 else [way for way in ways if way != "none"]:
            rotation.use(way)
            out, took = timed(lambda: decode(model, latents))
            seconds[way].append(round(took, 4))
            same &= turn == 0 or torch.equal(out, kept[way])
            kept.setdefault(way, out)
    rotation.use("ours")
    uncount_stand_in()
    plain = kept["plain"].double()
    report: dict[str, Any] = {"latents": list(latents.shape), "output": list(plain.shape), "seconds": seconds}
    report["kernel_calls"] = len(calls)
    report["finite"] = bool(plain.isfinite().all())
    report["repeats_bitwise_equal"] = same
    report["ours_bitwise_equal_to_plain"] = torch.equal(kept["ours"], kept["plain"])
    for way in set(ways) - {"plain"}:
        report[f"relative_l2_{way}_to_plain"] = float((kept[way].double() - plain).norm() / plain.norm())
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.vae_rotation", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--latents", type=int, default=7, help="latent frames of the compared decodes")
    parser.add_argument("--full", action="store_true", help=f"and {FULL} latent frames, once each")
    parser.add_argument("--layers", type=int, default=36)
    arguments = parser.parse_args()
    if (reason := missing()) is not None:
        print(reason, file=sys.stderr)
        return Exit.ENVIRONMENT
    device = torch.device("cuda")
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report["stand_ins"] = start_sglang()
    model = build(device, {"num_layers": arguments.layers})
    report["parameters"] = sum(p.numel() for p in model.parameters())
    channels, rows, columns = LATENT
    generator = torch.Generator(device).manual_seed(1)
    latents = torch.randn(1, channels, FULL, rows, columns, device=device, generator=generator)
    compare(model, latents[:, :, : arguments.latents].contiguous(), 1, ("ours", "plain"))  # compiles and warms up
    report["decodes"] = [compare(model, latents[:, :, : arguments.latents].contiguous(), 3)]
    if arguments.full:
        report["decodes"].append(compare(model, latents, 1, ("ours", "plain")))
    report["passed"] = all(x["finite"] and x["ours_bitwise_equal_to_plain"] for x in report["decodes"])
    report["passed"] &= report["decodes"][0]["relative_l2_none_to_plain"] > 1e-3
    report["passed"] &= all(x["kernel_calls"] > 0 for x in report["decodes"])
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return Exit.PASSED if report["passed"] else Exit.FAILED


if __name__ == "__main__":
    raise SystemExit(main())
