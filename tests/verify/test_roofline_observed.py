"""Shares of the floor from a record's events, with times made so that the share is known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.ceilings import ceilings_of
from config.lock import resolve
from config.record import EVENT
from verify.reader import ArmEvidence, Record, read_record
from verify.roofline.observed import layer_densities, plan_of_record, reached
from verify.roofline.plan import Plan, plan_of
from verify.roofline.work import floor

Fresh = Callable[..., Path]
HEADS, BLOCKS, LAYERS = 56, 598, 50


def evidence(name: str, events: list[dict[str, Any]]) -> ArmEvidence:
    lines = [
        EVENT.validate_python({"t": float(number), "seq": number, "source": "worker", **event})
        for number, event in enumerate(events)
    ]
    return ArmEvidence(name, {0: tuple(lines)}, {}, {}, ())  # type: ignore[arg-type]


def request(sample: int, phase: str) -> dict[str, Any]:
    return {"event": "request_start", "sample": sample, "phase": phase, "seed": 0, "num_inference_steps": 50}


def layout(sample: int) -> dict[str, Any]:
    return {
        "event": "layout",
        "sample": sample,
        "total_tokens": 38272,
        "live_tokens": 38247,
        "text": [0, 537],
        "condition": None,
        "audio": [537, 951],
        "video": [951, 38247],
        "sink": [0, 951],
        "dense_rows": [0, 951],
        "cu_seqlens": [0, 38247, 38272],
    }


def step(sample: int, number: int, seconds: float) -> dict[str, Any]:
    return {"event": "step", "sample": sample, "step": number, "seconds": seconds, "timestep": 1.0}


def sparse(sample: int, number: int, layer: int, density: float) -> dict[str, Any]:
    routed = [round(density * BLOCKS**2)] * HEADS
    return {
        "event": "attention",
        "sample": sample,
        "step": number,
        "layers": [layer],
        "backend": "native",
        "mode": "sparse",
        "blocks": BLOCKS,
        "routed": routed,
    }


def decided(sample: int, number: int, action: str) -> dict[str, Any]:
    reason = "threshold" if action == "compute" else "below_threshold"
    rest = {"signal": 0.1, "rescaled": None, "accumulator": None}
    return {
        "event": "cache_decision",
        "sample": sample,
        "step": number,
        "kind": "firstblockcache",
        "action": action,
        "reason": reason,
        **rest,
    }


def record_of(fresh: Fresh, **arms: list[dict[str, Any]]) -> Record:
    """A record of the H200 target whose arms have these worker's events."""
    made = read_record(fresh(target="h200", arms=("dense",)))
    return replace(made, arms={name: evidence(name, events) for name, events in arms.items()})  # type: ignore[misc]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(resolve("h200").resolved)


def seconds_of(plan: Plan, kind: str, share: float, density: float = 0.25) -> float:
    """A time that is the floor over `share`."""
    model, h200 = plan.model, ceilings_of("NVIDIA H200")
    assert h200 is not None
    stage = {
        "dense": model.forward(),
        "dense, cached": model.forward(cache="firstblockcache"),
        "sparse, cached": model.forward(density, 48, "firstblockcache"),
        "reused": model.reused("firstblockcache"),
        "text": plan.before()[0],
    }.get(kind)
    if stage is None:
        return sum(floor(stage, h200).seconds for stage in plan.after(resident=True)) / share
    return floor(stage, h200).seconds / share


def test_each_kind_of_forward_and_stage_gets_its_own_share(fresh: Fresh, plan: Plan) -> None:
    """Densities differ by layer, their mean is 25 %; the warm-up counts for nothing."""
    dense, routed, reused = (
        seconds_of(plan, "dense, cached", 0.5),
        seconds_of(plan, "sparse, cached", 0.4),
        seconds_of(plan, "reused", 0.8),
    )
    calls = [sparse(1, 1, layer, 0.2 if layer % 2 else 0.3) for layer in range(2, LAYERS)]
    whole = {"event": "request_end", "sample": 1, "seconds": 2 * (dense + routed + reused), "forwards": 3}
    stages = [
        {"event": "stage", "sample": 1, "name": "MiniMaxH3TextEncodingStage", "seconds": seconds_of(plan, "text", 0.6)},
        {"event": "stage", "sample": 1, "name": "MiniMaxH3DecodingStage", "seconds": seconds_of(plan, "decode", 0.3)},
    ]
    events = [
        *(request(0, "warmup"), layout(0), step(0, 0, 1000.0), request(1, "measured"), layout(1)),
        *(decided(1, 0, "compute"), step(1, 0, dense), decided(1, 1, "compute"), *calls, step(1, 1, routed)),
        *(decided(1, 2, "reuse"), step(1, 2, reused), whole, *stages),
    ]
    record = record_of(fresh, fullopt=events)
    (arm,) = reached(record, plan_of_record(record))
    found = {entry.kind: entry for entry in arm.kinds}
    assert (arm.arm, arm.samples, [entry.count for entry in arm.kinds]) == ("fullopt", 1, [1] * 6)
    for kind, share in (
        ("forward, dense", 0.5),
        ("forward, sparse", 0.4),
        ("forward, reused", 0.8),
        ("text encoding", 0.6),
        ("decode", 0.3),
    ):
        assert found[kind].share == pytest.approx(share, rel=1e-4), kind
    assert found["forward, sparse"].density == pytest.approx(0.25, abs=1e-5)
    assert found["forward, dense"].density is None
    assert 0.2 < (found["denoise"].share or 0) < 0.4
    assert found["forward, dense"].tflops == pytest.approx(plan.model.forward().flops / dense / 1e12)


def test_share_of_several_samples_is_floor_over_time_and_the_time_is_the_median(fresh: Fresh, plan: Plan) -> None:
    floor_seconds = seconds_of(plan, "dense", 1.0)
    times = [2.0, 3.0, 10.0]
    events = [
        event
        for sample, factor in enumerate(times, 1)
        for event in (request(sample, "measured"), layout(sample), step(sample, 0, factor * floor_seconds))
    ]
    record = record_of(fresh, dense=events)
    ((entry,),) = [arm.kinds for arm in reached(record, plan_of_record(record))]
    assert (entry.kind, entry.count) == ("forward, dense", 3)
    assert entry.seconds == pytest.approx(3 * floor_seconds)
    assert entry.share == pytest.approx(3 / sum(times))


def test_density_and_count_of_the_record_take_the_place_of_published_ones(fresh: Fresh) -> None:
    events = [request(1, "measured"), layout(1)]
    for number in range(49):
        events += [decided(1, number, "reuse" if number % 7 else "compute"), step(1, number, 1.0)]
    events += [sparse(1, 14, layer, 0.2) for layer in range(2, LAYERS)]
    record = record_of(fresh, fullopt=events)
    found = plan_of_record(record)
    assert found.density is not None and found.density.value == pytest.approx(0.2, abs=1e-5)
    assert found.computed is not None and found.computed.value == 7
    assert "measured" in found.density.source and "measured" in found.computed.source
    given = plan_of_record(record, density=0.5, computed=20)
    assert given.density is not None and given.density.value == 0.5
    assert given.computed is not None and given.computed.value == 20


def test_density_of_a_call_is_that_of_all_ranks() -> None:
    events = [
        EVENT.validate_python({"t": 0.0, "seq": 0, "source": "worker", **sparse(1, 3, 2, density)})
        for density in (0.1, 0.5)
    ]
    arm = ArmEvidence("fullopt", {rank: (event,) for rank, event in enumerate(events)}, {}, {}, ())
    assert layer_densities(arm, 1)[3][2] == pytest.approx(0.3, abs=1e-5)
    assert layer_densities(arm, 0) == {}


def test_another_gpu_than_the_targets_has_its_own_ceilings_or_none(fresh: Fresh) -> None:
    record = record_of(fresh, dense=[request(1, "measured"), layout(1), step(1, 0, 7.0)])
    for name, known in (("NVIDIA H100 80GB HBM3", True), ("NVIDIA L40S", False)):
        gpus = tuple(gpu.model_copy(update={"name": name}) for gpu in record.environment.gpus)
        other = replace(record, environment=record.environment.model_copy(update={"gpus": gpus}))
        plan = plan_of_record(other)
        ((entry,),) = [arm.kinds for arm in reached(other, plan)]
        assert plan.gpu == name and (entry.share is not None) is known
        assert entry.tflops > 0


def test_layers_that_were_fetched_are_counted_in_bytes(fresh: Fresh) -> None:
    loads = {"event": "offload", "sample": 1, "loads": {"blocks": 2450, "decoder.transformer_blocks": 36}}
    record = record_of(fresh, dense=[request(1, "measured"), layout(1), step(1, 0, 7.0), loads])
    ((found,),) = [arm.loads for arm in reached(record, plan_of_record(record))]
    assert found.layers == 2450 and found.bytes == 49 * 50 * 645_571_840 * 2


def test_an_arm_without_a_measured_forward_has_no_share(fresh: Fresh) -> None:
    record = record_of(fresh, dense=[request(0, "warmup"), layout(0), step(0, 0, 7.0)])
    (arm,) = reached(record, plan_of_record(record))
    assert (arm.samples, arm.kinds) == (0, ())


def test_times_that_no_clock_gives_have_no_share(fresh: Fresh) -> None:
    """A stranger's record may hold zero or negative seconds: they are left out, never divided by."""
    stages = [
        {"event": "stage", "sample": 1, "name": "MiniMaxH3DecodingStage", "seconds": -1.0},
        {"event": "stage", "sample": 1, "name": "MiniMaxH3TextEncodingStage", "seconds": 0.0},
    ]
    end = {"event": "request_end", "sample": 1, "seconds": -3.0, "forwards": 2}
    times = [step(1, 0, 0.0), step(1, 1, -2.0)]
    record = record_of(fresh, dense=[request(1, "measured"), layout(1), *times, end, *stages])
    (arm,) = reached(record, plan_of_record(record))
    assert (arm.samples, arm.kinds) == (1, ())


# ---------------------------------------------------------------- the verb


def sol(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "entrypoints.cli", "roofline", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"COLUMNS": "160", "PATH": ""})


def test_verb_prints_a_records_shares(fresh: Fresh) -> None:
    path = fresh(target="h200", arms=("dense", "fullopt"))
    shown, data = sol("h200", "--record", path), sol("h200", "--record", path, "--json")
    assert shown.returncode == data.returncode == 0, shown.stderr
    for text in ("arm dense", "arm fullopt", "share of the floor", "forward, sparse", "(measured)", "(data sheet)"):
        assert text in shown.stdout, text
    arms = json.loads(data.stdout)["record"]
    assert [arm["arm"] for arm in arms] == ["dense", "fullopt"]
    assert all(entry["share"] > 0 for arm in arms for entry in arm["kinds"])


def test_verb_without_a_ceiling_says_so_and_prints_flops_and_bytes(fresh: Fresh) -> None:
    path = fresh()
    shown = sol("cpu", "--record", path)
    assert shown.returncode == 0, shown.stderr
    assert "no ceiling known for a CPU" in shown.stdout
    data = json.loads(sol("cpu", "--record", path, "--json").stdout)
    assert data["ceilings"] is None and all(stage["floor"] is None for stage in data["stages"])
    assert all(stage["flops"] > 0 and stage["bytes"] > 0 for stage in data["stages"])
    assert all(entry["share"] is None and entry["tflops"] > 0 for arm in data["record"] for entry in arm["kinds"])


def test_verb_counts_a_replayed_list() -> None:
    done = sol("h200", "--set", "cache.replay=[0, 10, 20]", "--json")
    (row,) = [row for row in json.loads(done.stdout)["totals"] if "fullopt" in row["arms"]]
    assert (row["dense"], row["sparse"], row["reused"]) == (1, 2, 46)


def test_verb_refuses_a_record_of_another_target_and_overrides_beside_one(fresh: Fresh) -> None:
    path = fresh()
    done = sol("h200", "--record", path)
    assert done.returncode == 2 and "a record of target 'cpu'" in done.stderr and "Traceback" not in done.stderr
    done = sol("cpu", "--record", path, "--set", "sol_attn.tau=2")
    assert done.returncode == 2 and "--set beside --record" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("rtx4900",), 2, "did you mean 'rtx4090'?"),
        (("h200", "--density", "2"), 2, "--density 2"),
        (("h200", "--computed", "99"), 2, "--computed 99"),
        (("h200", "--record", "/nowhere"), 13, "/nowhere"),
    ],
)
def test_verb_refuses_with_one_message(arguments: tuple[str, ...], code: int, text: str) -> None:
    done = sol(*arguments)
    assert done.returncode == code and text in done.stderr and "Traceback" not in done.stderr
