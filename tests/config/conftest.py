"""A target folder of its own: one tiny target, one prompt, one recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

FIXTURE = """\
schema_version = 1
name = "fixture"
title = "A fixture"
recipe = "fixture"
attention = "torch_sdpa"
bare_is_locked = true
[hardware]
kind = "cpu"
host_memory_gib = 1.5
disk_gib = 2
[checkpoint]
kind = "synthetic"
preset = "tiny"
[request]
task = "t2va"
prompt = "hello"
short_edge = 256
aspect_ratio = "16:9"
duration_seconds = 1.6
width = 448
height = 256
frames = 39
fps = 24
num_inference_steps = 5
forwards = 4
seed = 0
flow_shift = 12.0
audio_flow_shift = 3.0
[warmup]
num_inference_steps = 5
seed = 1
[measure]
min_samples = 1
[sol_attn]
tau = 1.0
thresh_type = "exact"
dense_steps = 1
dense_layers = 2
sink = "text"
dense_rows = "none"
[cache]
kind = "firstblockcache"
threshold = 0.08
[offload]
components = []
[compile]
enabled = false
[vae]
resident_after_denoise = false
dtype = "unchanged"
[parallel]
num_gpus = 1
ulysses = 1
[gate]
tau = -1000
max_abs = 0.15
mean_abs = 2e-3
rel_l2 = 0.005
[arms.dense]
cache = false
sparse = "none"
compile = false
vae_resident = false
stock = true
[arms.cache]
cache = true
sparse = "none"
compile = false
vae_resident = false
[env]
B = "2"
A = "é"
[defaults]
arms = ["dense"]
samples = 1
"""

# The canonical JSON of the fixture's lock values, by hand from RFC 8785: keys sorted, 1.0 as 1, defaults explicit.
CANONICAL = (
    '{"arms":{"cache":{"cache":true,"compile":false,"sparse":"none","stock":false,"vae_resident":false},'
    '"dense":{"cache":false,"compile":false,"sparse":"none","stock":true,"vae_resident":false}},'
    '"attention":"torch_sdpa","bare_is_locked":true,"cache":{"kind":"firstblockcache","threshold":0.08},'
    '"checkpoint":{"kind":"synthetic","partition":"FL2VA","preset":"tiny","repo":"","revision":"","seed":0},'
    '"compile":{"enabled":false,"regional":true},"env":{"A":"é","B":"2"},'
    '"gate":{"heads":"all","max_abs":0.15,"mean_abs":0.002,"rel_l2":0.005,"tau":-1000},'
    '"hardware":{"compute_capability":"","disk_gib":2,"driver_floor":"","gpu_count":0,"gpu_memory_mib":0,"gpu_name":"",'
    '"host_memory_gib":1.5,"kind":"cpu"},"measure":{"min_samples":1},"name":"fixture",'
    '"offload":{"components":[],"pin_cpu_memory":false,"prefetch":1,"resident_layers":0},'
    '"parallel":{"fsdp":false,"num_gpus":1,"tensor_parallel":1,"ulysses":1},"recipe":"fixture",'
    '"recipe_files":{"files":{"image.toml":"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",'
    '"requirements.lock":null},"image":"fixture",'
    '"sha256":"b624502f0341fd09277de9a2fd60295e8d573a81f6c2bd3e6c20091446cb059d"},'
    '"request":{"aspect_ratio":"16:9","audio_flow_shift":3,"duration_seconds":1.6,"flow_shift":12,"forwards":4,"fps":24,'
    '"frames":39,"height":256,"num_inference_steps":5,"prompt":"hello",'
    '"prompt_sha256":"2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824","prompt_text":"hello",'
    '"seed":0,"short_edge":256,"task":"t2va","width":448},"schema_version":1,'
    '"sol_attn":{"block":64,"dense_layers":2,"dense_rows":"none","dense_steps":1,"kv_splits":1,"sink":"text","tau":1,'
    '"thresh_type":"exact"},"vae":{"dtype":"unchanged","resident_after_denoise":false,"tile_batch_size":0},'
    '"warmup":{"num_inference_steps":5,"seed":1}}'
)


@contextmanager
def target_folder(folder: Path, text: str = FIXTURE, image: bytes = b"abc") -> Iterator[None]:
    """Make `config.lock` see one target, one prompt and one recipe below `folder`, and nothing else."""
    for part in ("targets", "prompts", "images/fixture"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "targets/fixture.toml").write_text(text, "utf-8")
    (folder / "prompts/hello.txt").write_text("hello\n", "utf-8")
    (folder / "images/fixture/image.toml").write_bytes(image)
    with (
        patch("config.lock.TARGETS", folder / "targets"),
        patch("config.lock.PROMPTS", folder / "prompts"),
        patch("config.lock.recipes_root", lambda: folder / "images"),
    ):
        yield


@pytest.fixture
def fixture_target(tmp_path: Path) -> Iterator[Path]:
    """The tiny target alone; yields its folder."""
    with target_folder(tmp_path):
        yield tmp_path
