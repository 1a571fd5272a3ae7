"""The seams without SGLang: what the tracker decides and writes. The whole way through SGLang is in tests/e2e."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from config.errors import Exit, GateFailed
from config.lock import resolve
from engine.evidence import EventLog
from engine.h3 import seams, sparse
from engine.h3.arm import Driver, ungated_reason, worker_rank
from engine.h3.layout import PackedLayout
from engine.h3.spec import ArmSpec, RequestSpec
from engine.h3.tracker import Tracker

LAYOUT = PackedLayout(
    total_tokens=256,
    live_tokens=200,
    padding_tokens=56,
    text=(0, 40),
    condition=None,
    audio=(40, 60),
    video=(60, 200),
    prefix_tokens=60,
    cu_seqlens=(0, 200, 256),
)


def tracker(tmp_path: Path, arm: str = "fullopt", overrides: tuple[str, ...] = (), first: int = 0) -> Tracker:
    requests = (
        RequestSpec(sample=first, phase="warmup", seed=1, num_inference_steps=17),
        RequestSpec(sample=first + 1, phase="measured", seed=0, num_inference_steps=17),
    )
    spec = ArmSpec(
        record=str(tmp_path), arm=arm, lock=resolve("cpu", overrides), checkpoint="/weights", requests=requests
    )
    log = EventLog(spec.folder / "events-rank0.jsonl", "worker", time.monotonic())
    made = Tracker(spec, 0, log)
    made.layout = LAYOUT
    return made


def events(tmp_path: Path, arm: str = "fullopt") -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / f"arms/{arm}/events-rank0.jsonl").read_text().splitlines()]


def qkv() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(256, 3 * 2 * 128, generator=generator).to(torch.bfloat16)
    return [part.view(256, 2, 128) for part in fused.split(256, dim=-1)]


@pytest.mark.parametrize(
    ("arm", "step", "layer", "wanted"),
    [("fullopt", 6, 2, True), ("fullopt", 5, 2, False), ("fullopt", 6, 1, False), ("cache", 9, 5, False)],
)
def test_leading_steps_and_layers_stay_dense(tmp_path: Path, arm: str, step: int, layer: int, wanted: bool) -> None:
    made = tracker(tmp_path, arm)
    made.step = step
    assert made.is_sparse(layer) is wanted


def test_the_first_sparse_call_is_gated_once_and_each_call_is_counted(tmp_path: Path) -> None:
    made = tracker(tmp_path)
    made.step = 6
    q, k, v = qkv()
    for layer in (2, 3):
        out = sparse.sparse_attention(made, layer, 128**-0.5, q, k, v)
        assert out.shape == (256, 2, 128)
        assert bool((out[200:] == 0).all())
    made.end_step(1.0, 0.5)
    kinds = [(event["event"], event.get("layers", event.get("layer"))) for event in events(tmp_path)]
    assert kinds == [("gate", 2), ("attention", [2]), ("attention", [3]), ("step", None)]
    assert all(4 * 2 <= sum(event["routed"]) <= 2 * 16 for event in events(tmp_path)[1:3])  # type: ignore[arg-type]
    made.begin_step(7, {})
    made.end_step(1.0, 0.5)
    assert [event["event"] for event in events(tmp_path)[4:]] == ["step"], "a forward's calls are its own"
    report = json.loads((tmp_path / "arms/fullopt/gate-rank0.json").read_text())
    assert report["passed"] and report["shape"] == [1, 200, 2, 128] and report["sink"] == [0, 40]
    assert (tmp_path / "arms/fullopt/gate-rank0.safetensors").stat().st_size > 0


def test_a_red_gate_leaves_its_report_and_ends_the_call(tmp_path: Path) -> None:
    made = tracker(tmp_path, overrides=("gate.mean_abs=1e-12",))
    made.step = 6
    with pytest.raises(GateFailed):
        sparse.sparse_attention(made, 2, 128**-0.5, *qkv())
    assert json.loads((tmp_path / "arms/fullopt/gate-rank0.json").read_text())["passed"] is False
    assert [event["event"] for event in events(tmp_path)] == ["gate"]


def test_a_later_process_leaves_its_gate_with_its_warm_up(tmp_path: Path) -> None:
    assert tracker(tmp_path).spec.gate_folder() == tmp_path / "arms/fullopt"
    assert tracker(tmp_path, first=2).spec.gate_folder() == tmp_path / "arms/fullopt/sample-2"


def test_stages_before_the_loop_belong_to_the_coming_request(tmp_path: Path) -> None:
    made = tracker(tmp_path)
    for _ in range(2):
        made.end_stage("MiniMaxH3TextEncodingStage", 1.0)
        made.begin_request()
        made.end_request(2.0)
        made.end_stage("MiniMaxH3DenoisingStage", 2.0)
        made.end_stage("MiniMaxH3DecodingStage", 3.0)
    found = [(event["sample"], event["name"]) for event in events(tmp_path) if event["event"] == "stage"]
    names = ("MiniMaxH3TextEncodingStage", "MiniMaxH3DenoisingStage", "MiniMaxH3DecodingStage")
    assert found == [(sample, name) for sample in (0, 1) for name in names]


def test_a_stock_model_tells_which_attention_each_block_used(tmp_path: Path) -> None:
    class SDPAImpl: ...

    class FlashImpl: ...

    made = tracker(tmp_path, "dense")
    blocks = [SimpleNamespace(attn=SimpleNamespace(_attention_impl=kind())) for kind in (SDPAImpl, FlashImpl, SDPAImpl)]
    seams.observe_stock_attention(made, SimpleNamespace(blocks=blocks))
    assert made.dense == {"SDPAImpl": [0, 2], "FlashImpl": [1]}


def test_the_rank_is_in_the_workers_name() -> None:
    assert worker_rank("sglang-diffusionWorker-3") == 3


def test_a_first_sparse_call_in_a_measured_request_is_refused_and_not_gated(tmp_path: Path) -> None:
    """Its gate would run inside the stopwatch."""
    made = tracker(tmp_path)
    made.end_stage("MiniMaxH3DecodingStage", 1.0)  # the warm-up is over
    made.begin_request()
    made.layout, made.step = LAYOUT, 6
    with pytest.raises(RuntimeError, match="sample 1 makes the first sparse call"):
        sparse.sparse_attention(made, 2, 128**-0.5, *qkv())
    assert [event for event in events(tmp_path) if event["event"] in ("gate", "attention")] == []


def test_the_last_forward_of_a_warm_up_alone_is_computed(tmp_path: Path) -> None:
    made = tracker(tmp_path, overrides=("warmup.compute_last=true",))
    asked = []
    made.cache = SimpleNamespace(  # type: ignore[assignment]
        begin_request=lambda forwards, *, compute_last: asked.append((forwards, compute_last)), end_request=lambda: None
    )
    for _ in range(2):
        made.begin_request()
        made.end_request(1.0)
        made.end_stage("MiniMaxH3DecodingStage", 1.0)
    assert asked == [(16, True), (16, False)]
    other = tracker(tmp_path / "other")
    assert not other.compute_last


@pytest.mark.parametrize(("target", "kind"), [("cpu", seams.TeaCache), ("cpu-fbc", seams.FirstBlockCache)])
def test_the_locks_list_reaches_the_cache(tmp_path: Path, target: str, kind: type) -> None:
    spec = ArmSpec(
        record=str(tmp_path),
        arm="cache",
        lock=resolve(target, ["cache.replay=0,2-4"]),
        checkpoint="/weights",
        requests=(RequestSpec(sample=0, phase="warmup", seed=1, num_inference_steps=17),),
    )
    made = Tracker(spec, 0, EventLog(spec.folder / "events-rank0.jsonl", "worker", time.monotonic()))
    cache = seams.cache_factory(made)(SimpleNamespace(blocks=[SimpleNamespace()]))
    assert isinstance(cache, kind)
    assert cache._policy.replay == {0, 2, 3, 4}


@pytest.mark.parametrize(
    ("arm", "gates", "ungated"), [("fullopt", 0, True), ("fullopt", 1, False), ("cache", 0, False)]
)
def test_a_sparse_arm_without_a_gate_after_its_warm_up_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str, gates: int, ungated: bool
) -> None:
    monkeypatch.setattr(Driver, "load", lambda driver: None)
    for name in ("prepare", "prepare_cpu"):  # nothing of SGLang is imported or replaced in this process
        monkeypatch.setattr(f"engine.h3.arm.{name}", lambda spec: [], raising=False)
    spec = tracker(tmp_path, arm).spec
    driver = Driver(spec)
    driver.gate_verdicts = lambda: [True] * gates  # type: ignore[method-assign]
    assert driver.is_ungated() is ungated
    if ungated:
        served: list[int] = []
        driver.serve = lambda request: served.append(request.sample) or True  # type: ignore[method-assign,func-returns-value]
        assert driver.run() is Exit.INVALID_RECORD
        assert served == [0]
        (end,) = [event for event in events(tmp_path, arm) if event["event"] == "arm_end"]
        assert end["outcome"] == "ungated" and "held no sparse call" in str(end["reason"])


@pytest.mark.parametrize(
    ("overrides", "cached", "says"),
    [
        (("warmup.num_inference_steps=7",), True, "warmup.num_inference_steps to at least 8"),
        (("warmup.num_inference_steps=8",), True, "set warmup.compute_last=true"),
        (("sol_attn.dense_layers=99",), False, "sol_attn.dense_layers=99"),
    ],
)
def test_why_an_arm_is_ungated_names_what_to_change(overrides: tuple[str, ...], cached: bool, says: str) -> None:
    assert says in ungated_reason(resolve("cpu-fbc", overrides).resolved, cached)


def test_the_attention_core_stays_outside_a_compiled_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, it would be compiled anew for each block's number, and its bookkeeping done once, while tracing."""
    seen: list[tuple[int, bool]] = []
    dit = ModuleType(seams.DIT)

    def stock(attention: Any, q: torch.Tensor, *rest: torch.Tensor, **kwargs: object) -> torch.Tensor:
        seen.append((attention.sol_layer, torch.compiler.is_compiling()))
        attention._attention_impl = object()
        return q * 2

    dit._minimax_h3_attention_core_bcg = stock  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, seams.DIT, dit)
    made = tracker(tmp_path, "lossless")
    seams.install_attention(made)

    class Block(torch.nn.Module):
        def __init__(self, layer: int) -> None:
            super().__init__()
            self.attn = SimpleNamespace(sol_layer=layer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            core = dit._minimax_h3_attention_core_bcg
            return (
                core(self.attn, x + 1, x, x, cu_seqlens=x, cu_seqlens_host=(0,), max_seqlen=1, ulysses_active=False) - 1
            )

    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    x = torch.ones(3)
    for layer in range(4):
        block = Block(layer)
        block.compile(backend=count, dynamic=False)
        for _ in range(2):
            assert torch.equal(block(x), torch.full((3,), 3.0))
    assert seen == [(layer, False) for layer in range(4) for _ in range(2)]
    assert made.dense == {"object": [0, 0, 1, 1, 2, 2, 3, 3]}
    assert graphs, "nothing was compiled: the test shows nothing"


def test_a_resident_decode_is_cast_and_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Vae(torch.nn.Linear):
        def disable_offload(self) -> None:
            calls.append("disable_offload")

        def enable_offload(self) -> None:
            calls.append("enable_offload")

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(f"decode {self.weight.dtype}")
            return x

    class Stage:
        def __init__(self) -> None:
            self.video_vae = Vae(2, 2)

        def _get_vae_decode_fn(self, *args: object, **kwargs: object) -> object:
            raise AssertionError("SGLang would compile here")

        def forward(self, batch: object, server_args: object) -> object:
            return self._get_vae_decode_fn(self.video_vae, server_args, decode_fn=self.video_vae.decode)(batch)

    module = ModuleType("decoding")
    module.MiniMaxH3DecodingStage = Stage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, seams.STAGES + "decoding", module)
    made = tracker(tmp_path, overrides=("vae.dtype=bfloat16", "vae.resident_after_denoise=true"))
    assert seams.install_decode_residency(made) == "replace.decode_residency(bfloat16)"
    Stage().forward(torch.ones(1), None)
    assert calls == ["disable_offload", "decode torch.bfloat16", "enable_offload"]
