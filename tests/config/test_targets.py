"""The targets that ship: every constant of the published policies, typed a second time from the sources."""

from __future__ import annotations

import hashlib
import tomllib
from typing import Any

import pytest

from config.lock import PROMPTS, load_target, prompt_names, read_prompt, recipes_root, target_names
from config.schema import FirstBlockCache, Target, TeaCache

TARGETS = ["a100x4", "cpu", "cpu-fbc", "h100x4", "h200", "h200-tea", "rtx4090"]
PUBLISHED = ["rtx4090", "h100x4", "a100x4"]
FOUR_GPUS = ["h100x4", "a100x4"]

PROMPT_DIGESTS = {
    "starship": "98f36b879692095e099ae824c18d9e93e7006a490e082fd474a5f531769dcf06",
    "flamenco": "1aab0646647c9e280c3866c3de8cc5003f4ac6a6d38da2140e7be417b4eadb2b",
    "mechanics": "4c0eb5b94dd8d108a1b2f9815cf259d355744e17aba0b4016e02909107bd0d7b",
}


def snapped_frames(duration: float, fps: int) -> int:
    """SGLang's rule for MiniMax-H3: the rounded frame count, up to the next 17 n + 5."""
    frames = round(duration * fps)
    while (frames - 5) % 17:
        frames += 1
    return frames


def test_exactly_these_targets_ship() -> None:
    assert target_names() == TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_loads_and_is_consistent(name: str) -> None:
    target = load_target(name)
    assert target.title and target.notes
    assert target.request.frames == snapped_frames(target.request.duration_seconds, target.request.fps)
    assert target.request.width % 32 == target.request.height % 32 == 0
    assert target.request.height == target.request.short_edge
    assert target.arms["dense"].stock
    assert all(not arm.stock for key, arm in target.arms.items() if key != "dense")
    assert all(key == key.upper() for key in target.env)
    assert (target.gate.tau, target.gate.max_abs, target.gate.mean_abs, target.gate.rel_l2) == (
        -1000,
        0.15,
        0.002,
        0.005,
    )
    assert target.gate.heads == "all"


@pytest.mark.parametrize("name", TARGETS)
def test_every_line_with_a_value_of_its_own_has_a_source(name: str) -> None:
    """A value, or the table it stands in, carries a comment; the switches of an arm are named by the arm."""
    from config.lock import TARGETS as FOLDER

    bare, table, table_said = [], "", False
    for line in (FOLDER / f"{name}.toml").read_text("utf-8").splitlines():
        if line.startswith("["):
            table, table_said = line, "#" in line
        elif "=" in line and not line.startswith(("#", " ")) and not table.startswith("[arms"):
            said = "#" in line or table_said or line.startswith(("schema_version", "name", "title", "recipe", "notes"))
            bare += [] if said else [line]
    allowed = (
        "OPENBLAS",
        "MKL",
        "NUMEXPR",
        "arms",
        "samples",
        "num_gpus",
        "tensor_parallel",
        "ulysses",
        "fsdp",
        "kind",
    )
    assert [line for line in bare if not line.startswith(allowed)] == []


@pytest.mark.parametrize("name", ["rtx4090", "h100x4", "a100x4", "h200", "h200-tea"])
def test_the_published_request(name: str) -> None:
    request = load_target(name).request
    assert (request.task, request.prompt, request.short_edge, request.aspect_ratio) == ("t2va", "starship", 768, "16:9")
    assert (request.width, request.height, request.frames, request.fps) == (1344, 768, 124, 24)
    assert (request.num_inference_steps, request.forwards, request.seed) == (50, 49, 0)
    assert (request.flow_shift, request.audio_flow_shift) == (12.0, 3.0)
    assert request.duration_seconds == (5 if name in ("rtx4090", "h200-tea") else 5.166667)
    sol = load_target(name).sol_attn
    assert (sol.block, sol.tau, sol.dense_steps, sol.dense_layers, sol.kv_splits) == (64, 1.0, 10, 2, 1)


@pytest.mark.parametrize("name", ["rtx4090", "h200-tea"])
def test_rtx4090_policy(name: str) -> None:
    target = load_target(name)
    assert target.cache == TeaCache(
        kind="teacache", threshold=0.10, retain_steps=5, cooldown_steps=1, coefficients=(1.0, 0.0)
    )
    assert target.sol_attn.thresh_type == "diag"
    assert target.sol_attn.sink == target.sol_attn.dense_rows == "text"
    assert set(target.offload.components) == ({"dit", "text_encoder", "vae"} if name == "rtx4090" else set())
    assert (target.offload.prefetch, target.offload.resident_layers, target.offload.pin_cpu_memory) == (1, 0, False)
    assert target.compile.enabled and target.compile.regional
    assert (target.vae.resident_after_denoise, target.vae.dtype, target.vae.tile_batch_size) == (True, "bfloat16", 0)
    assert (target.warmup.num_inference_steps, target.warmup.seed) == (50 if name == "rtx4090" else 12, 1)
    assert target.warmup.compute_last is (name == "h200-tea")
    assert target.attention == ("torch_sdpa" if name == "rtx4090" else "torch_cudnn_sdpa")
    assert target.hardware.compute_capability == ("8.9" if name == "rtx4090" else "9.0")


@pytest.mark.parametrize("name", ["h100x4", "a100x4", "h200"])
def test_four_gpu_policy(name: str) -> None:
    target = load_target(name)
    assert target.cache == FirstBlockCache(kind="firstblockcache", threshold=0.08)
    assert target.sol_attn.thresh_type == "exact"
    assert target.sol_attn.sink == target.sol_attn.dense_rows == "prefix"
    assert target.offload.components == () and not target.compile.enabled
    assert target.vae.dtype == "unchanged" and not target.vae.resident_after_denoise
    assert (target.warmup.num_inference_steps, target.warmup.seed) == (12 if name == "h200" else 50, 10000)
    assert target.warmup.compute_last is (name == "h200")
    gpus = 1 if name == "h200" else 4
    assert (target.parallel.num_gpus, target.parallel.ulysses, target.parallel.fsdp) == (gpus, gpus, gpus == 4)
    assert target.attention == ("torch_sdpa" if name == "a100x4" else "torch_cudnn_sdpa")
    assert target.hardware.compute_capability == ("8.0" if name == "a100x4" else "9.0")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_targets_use_the_published_weights_in_an_image(name: str) -> None:
    target = load_target(name)
    assert target.checkpoint.kind == "hub" and target.checkpoint.repo == "MiniMaxAI/MiniMax-H3"
    assert target.checkpoint.revision == "bfc8ed0353f5a9733be73e6b2c98ec0948195b86"
    assert target.checkpoint.partition == "FL2VA" and not target.bare_is_locked
    assert target.measure.min_samples >= 3 and target.defaults.samples >= target.measure.min_samples


@pytest.mark.parametrize("name", ["h200", "h200-tea", "cpu", "cpu-fbc"])
def test_the_others_have_synthetic_weights(name: str) -> None:
    target = load_target(name)
    assert target.checkpoint.kind == "synthetic" and target.bare_is_locked
    assert target.checkpoint.preset == ("full" if name.startswith("h200") else "tiny")


@pytest.mark.parametrize("name", TARGETS)
def test_arms(name: str) -> None:
    target = load_target(name)
    sparse = "sana" if name in PUBLISHED else "native" if name.startswith("h200") else "reference"
    extras = name in ("rtx4090", "h200-tea", "cpu")
    compiled = name in ("rtx4090", "h200-tea")
    expected = {
        "dense": (False, "none", False, False),
        "lossless": (False, "none", compiled, extras),
        "cache": (True, "none", compiled, extras),
        "fullopt": (True, sparse, compiled, extras),
        "sol": (False, sparse, compiled, extras),
    }
    if name in PUBLISHED:
        expected["native"] = (True, "native", compiled, extras)
    found = {key: (arm.cache, arm.sparse, arm.compile, arm.vae_resident) for key, arm in target.arms.items()}
    assert found == expected


def policy(target: Target) -> dict[str, Any]:
    sol, cache = target.sol_attn.model_dump(exclude={"dense_steps"}), target.cache.model_dump()
    return {"sol": sol, "cache": cache if cache["kind"] == "firstblockcache" else {**cache, "threshold": None}}


@pytest.mark.parametrize(("small", "large"), [("cpu", "rtx4090"), ("cpu-fbc", "h100x4")])
def test_cpu_targets_follow_a_published_policy(small: str, large: str) -> None:
    """All but what their size asks for: fewer dense steps, and TeaCache's threshold, which fits the weights."""
    assert policy(load_target(small)) == policy(load_target(large))


@pytest.mark.parametrize("name", ["cpu", "cpu-fbc"])
def test_cpu_targets_are_large_enough_to_be_sparse(name: str) -> None:
    """12 latent frames of 14 x 8 tokens, 2 x 65 audio tokens and 537 of text make 2,011: 32 blocks of 64."""
    request = load_target(name).request
    latent_frames = (request.frames - 5) // 17 * 5 + 2
    video = latent_frames * (request.width // 32) * (request.height // 32)
    audio = 2 * round(request.frames / request.fps * 40)
    assert (video, audio) == (1344, 130)
    assert -(-(537 + audio + video) // 64) >= 30
    assert load_target(name).sol_attn.dense_steps < request.forwards


@pytest.mark.parametrize("name", [*PUBLISHED, "h200", "h200-tea"])
def test_agrees_with_its_image_recipe(name: str) -> None:
    recipe = tomllib.loads((recipes_root() / load_target(name).recipe / "image.toml").read_text("utf-8"))
    target = load_target(name)
    assert target.hardware.driver_floor == recipe["cuda"]["driver_floor"]
    assert target.hardware.gpu_count == recipe["gpu"]["count"]
    assert target.env.get("TORCH_CUDA_ARCH_LIST", recipe["gpu"]["arch_list"]) == recipe["gpu"]["arch_list"]


def test_prompts_are_the_published_bytes() -> None:
    assert prompt_names() == sorted(PROMPT_DIGESTS)
    for name, digest in PROMPT_DIGESTS.items():
        assert hashlib.sha256(read_prompt(name).encode()).hexdigest() == digest
        assert (PROMPTS / f"{name}.txt").read_bytes().removesuffix(b"\n") == read_prompt(name).encode()
    assert len(read_prompt("starship").encode()) == len(read_prompt("starship")) == 2504
