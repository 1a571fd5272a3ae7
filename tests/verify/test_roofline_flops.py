"""The roofline's FLOPs against those that PyTorch counts in SGLang's own modules, at full size and in small."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from config.architecture import PRESETS, Architecture
from config.lock import resolve
from verify.roofline.codec import audio_decode, calls_of_decoder, text_encoding, video_decode
from verify.roofline.dit import Machine
from verify.roofline.plan import Plan, plan_of

SCRIPT = Path(__file__).with_name("flop_reference.py")
TARGETS = {"full": "h200", "tiny": "cpu"}


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, Any]]:
    """Counts by preset and name (half a minute of one core)."""
    for package in ("torch", "sglang"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: there is nothing to count in")
    with socket.socket() as handle:
        handle.bind(("127.0.0.1", 0))
        port = handle.getsockname()[1]
    done = subprocess.run([sys.executable, SCRIPT, str(port)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    counts: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return counts


def small_or_full(preset: str) -> tuple[Plan, Architecture]:
    return plan_of(resolve(TARGETS[preset]).resolved), PRESETS[preset]


def padding(plan: Plan) -> int:
    """FLOPs of a block's padding rows attending to themselves, which a floor leaves out and SGLang computes."""
    return 4 * (plan.document.total - plan.document.live) ** 2 * plan.architecture.dit.inner


@pytest.mark.parametrize("preset", TARGETS)
def test_forwards(counted: dict[str, dict[str, Any]], preset: str) -> None:
    (plan, architecture), counts = small_or_full(preset), counted[preset]
    model, layers = plan.model, architecture.dit.layers
    forward = model.forward()
    assert forward.flops == counts["forward"]["all"] - layers * padding(plan)
    linear = sum(stage.flops for (kind, _), stage in forward.parts.items() if kind == "linear")
    modulation = forward.parts["linear", "adaln_proj"].flops
    assert linear - modulation == counts["forward"]["aten.mm"]
    assert forward.parts["attention", "attention"].flops == counts["forward"]["aten.bmm"] - layers * padding(plan)
    assert model.reused("firstblockcache").flops == counts["one block"]["all"] - padding(plan)
    probe = modulation / layers  # TeaCache's probe is block 0's modulation
    assert model.reused("teacache").flops == counts["no block"]["all"] + probe
    assert model.refiner().flops == counts["refiner"]["all"]


@pytest.mark.parametrize("preset", TARGETS)
def test_weights(counted: dict[str, dict[str, Any]], preset: str) -> None:
    (_, architecture), counts = small_or_full(preset), counted[preset]
    assert architecture.dit.block_parameters == counts["block parameters"]
    assert architecture.text.layer_parameters == counts["text layer parameters"]
    assert architecture.video.layer_parameters == counts["video layer parameters"]
    if preset == "full":
        assert counts["parameters"] == 33_122_992_896  # and 16 frequencies, a buffer


@pytest.mark.parametrize("preset", TARGETS)
def test_text_encoding(counted: dict[str, dict[str, Any]], preset: str) -> None:
    """PyTorch counts a causal attention as if it saw everything; SGLang makes the rotary angles by a product."""
    (plan, architecture), counts = small_or_full(preset), counted[preset]
    text, tokens = architecture.text, plan.document.text
    masked = text.layers * 2 * tokens * (tokens - 1) * text.heads * text.head_dim
    angles = 3 * tokens * text.head_dim  # three axes, half as many frequencies as a head has values, two FLOPs each
    assert text_encoding(text, tokens, Machine()).flops == counts["text"]["all"] - masked - angles


@pytest.mark.parametrize("preset", TARGETS)
def test_decoders(counted: dict[str, dict[str, Any]], preset: str) -> None:
    """Of the video decoder one layer is counted over all tiles and clips."""
    (plan, architecture), counts = small_or_full(preset), counted[preset]
    request, video = plan.target.request, architecture.video
    assert video.layers == counts["video layers"]
    size = (request.frames, request.width, request.height)
    assert calls_of_decoder(*size, video) == counts["video calls"]
    stage = video_decode(video, *size, Machine())
    layers = sum(part.flops for (kind, name), part in stage.parts.items() if name in ("attention", *video.linears))
    assert stage.flops - layers + layers / video.layers == counts["video"]["all"]
    assert audio_decode(architecture.audio, plan.document.audio // 2).flops == counts["audio"]["all"]
