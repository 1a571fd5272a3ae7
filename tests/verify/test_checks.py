"""Every check fails for what it is there to find, and for that alone passes a sound record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.verify.builder import edit, edit_events, save_safetensors, video
from verify.checks import CHECKS, run_checks
from verify.findings import Check, Finding, Scribe, Status, names_by_outcome, run_check, worst
from verify.reader import read_record
from verify.tensors import read_safetensors

BY_NAME = {check.name: check for check in CHECKS}
FULL = "arms/fullopt/"
EVENTS = FULL + "events-rank0.jsonl"
GATE = FULL + "gate-rank0.json"
SLICE = FULL + "gate-rank0.safetensors"
TIMING = FULL + "sample-1/timing.json"

Break = Callable[[Path], None]


def change(name: str, alter: Callable[[Any], Any]) -> Break:
    """Break one JSON file."""
    return lambda record: edit(record / name, alter)


def events(alter: Callable[[list[Any]], Any], name: str = EVENTS) -> Break:
    """Break the list of events."""
    return lambda record: edit_events(record / name, alter)


def each(kind: str, alter: Callable[[Any], Any], name: str = EVENTS, **where: Any) -> Break:
    """Break every event of a kind whose fields are `where`."""

    def apply(lines: list[Any]) -> None:
        found = [e for e in lines if e["event"] == kind and all(e.get(key) == value for key, value in where.items())]
        assert found, "the test breaks nothing"
        for event in found:
            alter(event)

    return events(apply, name)


def drop(kind: str, name: str = EVENTS, **where: Any) -> Break:
    """Take out every event of a kind, and number the rest again: only the missing event is wrong."""

    def apply(lines: list[Any]) -> list[Any]:
        kept = [e for e in lines if not (e["event"] == kind and all(e.get(k) == v for k, v in where.items()))]
        assert len(kept) < len(lines), "the test breaks nothing"
        count: dict[str, int] = {}
        for event in kept:
            event["seq"] = count.get(event["source"], 0)
            count[event["source"]] = event["seq"] + 1
        return kept

    return events(apply, name)


def tensor(name: str, alter: Callable[[Any], Any]) -> Break:
    """Break one tensor of the slice."""

    def apply(record: Path) -> None:
        tensors = dict(read_safetensors((record / SLICE).read_bytes(), SLICE))
        tensors[name] = alter(tensors[name].copy())
        (record / SLICE).write_bytes(save_safetensors(tensors))

    return apply


def remove(name: str) -> Break:
    return lambda record: (record / name).unlink()


def write(name: str, data: bytes) -> Break:
    return lambda record: (record / name).write_bytes(data)


def put(**fields: Any) -> Callable[[Any], None]:
    return lambda value: value.update(fields)


def values(**fields: Any) -> Callable[[Any], None]:
    """Change values of a lock behind its digest."""
    return lambda value: value["values"]["request"].update(fields)


def relock(alter: Callable[[Any], None], listed: list[dict[str, Any]], same_base: bool = True) -> Break:
    """Change a lock's values, give it the digest that follows, and list these overrides."""
    from config.canonical import sha256_json

    def apply(value: Any) -> None:
        alter(value["values"])
        value["digest"] = sha256_json(value["values"])
        value["base_digest"] = value["base_digest"] if same_base else value["digest"]
        value["overrides"] = listed

    return change("lock.json", apply)


def media(**fields: Any) -> Break:
    return change(TIMING, lambda value: value["media"].update(fields))


def latent(*item: Any, **fields: Any) -> Callable[[Any], None]:
    """Change fields of an event's video latent, or the sampled element (index, value)."""

    def alter(event: Any) -> None:
        event["video"].update(fields)
        if item:
            event["video"]["values"][item[0]] = item[1]

    return alter


def row_of_another_value(array: Any) -> Any:
    array[3] = (array[3].astype(np.float64) + 1).astype(ml_dtypes.bfloat16)
    return array


def scaled(factor: float) -> Callable[[Any], Any]:
    return lambda array: (array.astype(np.float64) * factor).astype(ml_dtypes.bfloat16)


def one_more(array: Any) -> Any:
    array[1, 0] += 1
    return array


def halve(lines: list[Any]) -> list[Any]:
    """Forget the upper half of the layers, consistently."""
    for line in lines:
        if line["event"] == "attention":
            line["layers"] = [layer for layer in line["layers"] if layer < 3]
    kept = [line for line in lines if line["event"] != "attention" or line["layers"]]
    count: dict[str, int] = {}
    for event in kept:
        event["seq"] = count.get(event["source"], 0)
        count[event["source"]] = event["seq"] + 1
    return kept


TAU = [{"key": "sol_attn.tau", "locked": 1.0, "value": 0.5}]


def set_tau(values: Any) -> None:
    values["sol_attn"]["tau"] = 0.5


# (check, status, what is broken, words of the finding)
CASES: list[tuple[str, str, str, Break, str]] = [
    ("record-status", "invalid", "running", write("status", b'{"state":"aborted","reason":"SIGTERM"}\n'), "SIGTERM"),
    ("record-files", "invalid", "a stranger", write("arms/note.txt", b""), "no place"),
    ("record-files", "invalid", "no summary", remove("benchmark.json"), "summary"),
    ("record-files", "invalid", "no video", remove(FULL + "sample-1/out.mp4"), "missing"),
    ("record-files", "invalid", "no slice", remove(SLICE), "missing"),
    ("record-files", "invalid", "no events", remove("arms/dense/events-rank0.jsonl"), "missing"),
    ("record-events", "invalid", "torn", lambda r: (r / EVENTS).write_bytes((r / EVENTS).read_bytes()[:-9]), "torn"),
    ("record-events", "invalid", "one missing", events(lambda lines: lines[:9] + lines[10:]), "has number"),
    ("record-events", "invalid", "cut at the end", drop("arm_end"), "arm_end"),
    ("record-events", "invalid", "another arm", each("arm_start", put(arm="dense")), "another arm"),
    ("record-events", "invalid", "no worker", drop("arm_start", source="worker"), "no worker"),
    ("record-events", "invalid", "no driver", drop("arm_start", source="driver"), "driver's arm_start"),
    ("record-outcomes", "fail", "an error", each("arm_end", put(outcome="error", reason="OOM")), "OOM"),
    ("record-outcomes", "invalid", "no measured sample", remove(TIMING), "measured"),
    ("record-outcomes", "invalid", "no warm-up", remove(FULL + "sample-0/timing.json"), "warm-up"),
    ("lock-digest", "invalid", "values", change("lock.json", values(seed=7)), "digest"),
    ("lock-digest", "invalid", "recipe", relock(lambda v: v["recipe_files"].update(sha256="0" * 64), []), "recipe"),
    ("lock-digest", "invalid", "prompt", relock(lambda v: v["request"].update(prompt_text="x"), []), "prompt"),
    ("lock-digest", "invalid", "name", change("lock.json", put(target="cpu-fbc")), "target"),
    ("lock-known", "invalid", "changed, no override", relock(set_tau, []), "lists no override"),
    ("lock-known", "fail", "a lock of nobody", relock(set_tau, [], same_base=False), "does not|is not one"),
    (
        "lock-known",
        "invalid",
        "hidden change",
        relock(lambda v: (set_tau(v), v["request"].update(seed=9)), TAU),
        "seed",
    ),
    (
        "lock-known",
        "invalid",
        "idle override",
        relock(set_tau, [*TAU, {"key": "gate.tau", "locked": 0, "value": 1}]),
        "nothing",
    ),
    (
        "lock-known",
        "invalid",
        "wrong value",
        relock(set_tau, [{"key": "sol_attn.tau", "locked": 1.0, "value": 0.6}]),
        "does not say",
    ),
    ("lock-known", "warn", "an open lock", relock(set_tau, TAU), "sol_attn.tau"),
    ("lock-known", "invalid", "override without one", change("lock.json", put(overrides=TAU)), "digest of its target"),
    (
        "environment-differences",
        "warn",
        "open",
        change("environment.json", put(differences=["another GPU"])),
        "another GPU",
    ),
    (
        "environment-warnings",
        "warn",
        "a warning",
        change("environment.json", put(warnings=["disk: slow"])),
        "disk: slow",
    ),
    ("environment-recipe", "invalid", "another", change("environment.json", put(recipe_sha256="0" * 64)), "recipe"),
    (
        "environment-recipe",
        "warn",
        "another, said",
        change("environment.json", put(recipe_sha256="0" * 64, differences=["x"])),
        "recipe",
    ),
    (
        "environment-checkpoint",
        "invalid",
        "kind",
        change("environment.json", lambda v: v["checkpoint"].update(kind="hub")),
        "weights",
    ),
    (
        "environment-checkpoint",
        "invalid",
        "digest",
        change("environment.json", lambda v: v["checkpoint"].update(sha256="0" * 64)),
        "digest",
    ),
    (
        "environment-checkpoint",
        "invalid",
        "no files",
        change("environment.json", lambda v: v["checkpoint"].update(files=[])),
        "listed",
    ),
    (
        "environment-sources",
        "invalid",
        "changed",
        change("environment.json", lambda v: v["sglang_sources"].update({"__init__.py": "0" * 64})),
        "__init__",
    ),
    ("environment-sources", "invalid", "none", change("environment.json", put(sglang_sources={})), "pinned"),
    (
        "environment-packages",
        "invalid",
        "version",
        change("environment.json", lambda v: v["packages"][0].update(version="0")),
        "instead of",
    ),
    (
        "environment-packages",
        "warn",
        "bare run",
        change("environment.json", lambda v: (v.update(image_digest=""), v["packages"].pop(0))),
        "missing",
    ),
    ("request-asked", "fail", "seed", change(TIMING, put(seed=5)), "seed 5"),
    ("request-asked", "fail", "steps", change(TIMING, put(num_inference_steps=9)), "num_inference_steps 9"),
    ("request-asked", "invalid", "number", change(TIMING, put(sample=4)), "sample 4"),
    (
        "request-asked",
        "invalid",
        "worker's seed",
        each("request_start", put(seed=5), source="worker", sample=1),
        "worker ran",
    ),
    ("request-asked", "invalid", "no driver", drop("request_start", source="driver", sample=1), "started by"),
    ("request-asked", "invalid", "no warm-up", each("request_start", put(phase="measured"), sample=0), "warm-up"),
    ("request-forwards", "fail", "one less", drop("step", sample=1, step=15), "15 forwards"),
    (
        "request-forwards",
        "invalid",
        "miscounted",
        each("request_end", put(forwards=3), source="worker", sample=1),
        "count",
    ),
    ("request-forwards", "fail", "falls", each("step", put(timestep=0.0), sample=1, step=9), "falls"),
    ("request-layout", "invalid", "gap", each("layout", put(audio=[71, 120])), "follow"),
    ("request-layout", "invalid", "end", each("layout", put(video=[120, 518])), "parts end"),
    ("request-layout", "invalid", "segments", each("layout", put(cu_seqlens=[0, 9])), "segments"),
    ("request-layout", "fail", "sink", each("layout", put(sink=[0, 120])), "sink"),
    ("request-layout", "invalid", "none", drop("layout", sample=1), "no layout"),
    ("request-layout", "fail", "two", each("layout", put(total_tokens=640), sample=1), "different layouts"),
    (
        "attention-backends",
        "fail",
        "dense",
        each("attention", put(backend="FlashAttentionImpl"), mode="dense"),
        "FlashAttention",
    ),
    (
        "attention-backends",
        "fail",
        "sparse",
        each("attention", put(backend="sana/triton"), mode="sparse"),
        "sana/triton",
    ),
    ("attention-policy", "fail", "not run", drop("attention", sample=1, step=3), "not run"),
    (
        "attention-policy",
        "fail",
        "dense instead",
        each("attention", put(mode="dense"), mode="sparse", sample=1),
        "policy: sparse",
    ),
    (
        "attention-policy",
        "fail",
        "sparse too early",
        each("attention", put(mode="sparse", blocks=9, routed=[50, 50]), sample=1, step=0),
        "policy: dense",
    ),
    ("attention-policy", "fail", "ran though reused", each("attention", put(step=6), sample=1, step=8), "forward 6"),
    ("attention-policy", "fail", "twice", each("attention", put(layers=[0, 0, 1, 2, 3]), sample=1, step=0), "twice"),
    ("attention-policy", "invalid", "nothing recorded", drop("attention"), "layers seen"),
    ("attention-policy", "invalid", "half of the model", events(halve), "layers seen"),
    ("attention-densities", "invalid", "blocks", each("attention", put(blocks=8), mode="sparse"), "blocks"),
    (
        "attention-densities",
        "invalid",
        "too few",
        each("attention", put(routed=[3, 60]), mode="sparse", sample=1),
        "possible",
    ),
    (
        "attention-densities",
        "invalid",
        "too many",
        each("attention", put(routed=[82, 60]), mode="sparse", sample=1),
        "possible",
    ),
    (
        "attention-densities",
        "invalid",
        "no head",
        each("attention", put(routed=[]), mode="sparse", sample=1),
        "no head",
    ),
    (
        "attention-densities",
        "invalid",
        "a head less",
        each("attention", put(routed=[60]), mode="sparse", sample=1),
        "numbers of heads",
    ),
    ("attention-densities", "invalid", "no layout", drop("layout", sample=1), "layout"),
    (
        "cache-decisions",
        "fail",
        "flipped",
        each("cache_decision", put(action="compute", reason="threshold"), sample=1, step=5),
        "step 5",
    ),
    ("cache-decisions", "fail", "signal", each("cache_decision", put(signal=0.9), sample=1, step=5), "step 5"),
    ("cache-decisions", "fail", "one less", drop("cache_decision", sample=1, step=15), "one at each"),
    (
        "gate-happened",
        "invalid",
        "no gate",
        lambda r: (drop("gate")(r), (r / GATE).unlink(), (r / SLICE).unlink()),
        "0 gate",
    ),
    ("gate-happened", "invalid", "no report", lambda r: ((r / GATE).unlink(), (r / SLICE).unlink()), "0 gate reports"),
    (
        "gate-happened",
        "invalid",
        "warm-up without sparse call",
        drop("attention", mode="sparse", sample=0),
        "never gated",
    ),
    ("gate-happened", "invalid", "later call", each("gate", put(layer=3)), "differ"),
    (
        "gate-happened",
        "invalid",
        "not before",
        lambda r: (each("gate", put(step=12))(r), change(GATE, put(step=12))(r)),
        "before",
    ),
    ("gate-happened", "invalid", "another kernel", change(GATE, put(backend="native")), "gated native"),
    (
        "gate-happened",
        "fail",
        "sparse in dense",
        each("attention", put(mode="sparse", blocks=9, routed=[60, 60]), "arms/dense/events-rank0.jsonl", step=0),
        "without Sol-Attn",
    ),
    ("gate-configured", "invalid", "limits", change(GATE, lambda v: v["limits"].update(rel_l2=0.5)), "limits"),
    ("gate-configured", "invalid", "tau", change(GATE, put(tau=0.9)), "tau is"),
    ("gate-configured", "invalid", "gate tau", change(GATE, put(gate_tau=-1.0)), "gate_tau"),
    ("gate-configured", "invalid", "scale", change(GATE, put(scale=0.5)), "scale"),
    ("gate-configured", "invalid", "tokens", change(GATE, put(shape=[1, 500, 2, 32])), "tokens"),
    ("gate-configured", "invalid", "sink", change(GATE, put(sink=[0, 0])), "sink"),
    ("gate-configured", "invalid", "threshold", change(GATE, put(thresh_type="exact")), "thresh_type"),
    (
        "gate-verdict",
        "fail",
        "red",
        change(GATE, lambda v: (v["against_sdpa"].update(rel_l2=0.02), v.update(passed=False))),
        "red",
    ),
    (
        "gate-verdict",
        "invalid",
        "red called green",
        change(GATE, lambda v: v["against_sdpa"].update(rel_l2=0.02)),
        "passed is True",
    ),
    ("gate-verdict", "invalid", "green called red", change(GATE, put(passed=False)), "passed is False"),
    (
        "gate-verdict",
        "invalid",
        "not judged again",
        change(GATE, lambda v: v["against_sdpa"].update(max_abs=0.2)),
        "judged again",
    ),
    ("gate-verdict", "invalid", "not finite", change(GATE, put(finite=False)), "passed is True"),
    ("gate-exact", "fail", "another output", tensor("all_exact", scaled(1.5)), "all-exact"),
    ("gate-exact", "fail", "one row", tensor("all_exact", row_of_another_value), "all-exact"),
    ("gate-exact", "fail", "another SDPA", tensor("sdpa", scaled(1.5)), "SDPA"),
    ("gate-exact", "fail", "other keys", tensor("k", scaled(2.0)), "float64"),
    (
        "gate-exact",
        "invalid",
        "less error reported",
        change(GATE, lambda v: v["against_fp32"].update(max_abs=1e-4)),
        "in the slice",
    ),
    (
        "gate-exact",
        "invalid",
        "less mean error",
        change(GATE, lambda v: v["against_sdpa"].update(mean_abs=1e-6)),
        "more error",
    ),
    ("gate-exact", "invalid", "rows", tensor("rows", lambda array: array + 1), "rows"),
    ("gate-exact", "invalid", "shape", tensor("v", lambda array: array[:-1]), "tensor v"),
    ("gate-exact", "invalid", "not finite", tensor("q", scaled(np.nan)), "finite"),
    ("gate-exact", "invalid", "block", change(GATE, lambda v: v["slice"].update(blocks=[0, 99])), "block"),
    (
        "gate-sparse",
        "fail",
        "dense instead",
        lambda r: tensor("real_tau", lambda a: read_safetensors((r / SLICE).read_bytes(), "")["sdpa"])(r),
        "not Sol-Attn",
    ),
    ("gate-sparse", "fail", "another output", tensor("real_tau", scaled(1.1)), "not Sol-Attn"),
    ("gate-routes", "fail", "one more", tensor("route_counts", one_more), "query block 1"),
    ("gate-routes", "invalid", "sums", each("attention", put(routed=[60, 61]), mode="sparse", sample=0), "add up"),
    ("gate-routes", "invalid", "no call", drop("attention", mode="sparse", sample=0), "no event"),
    ("gate-routes", "invalid", "too few", tensor("route_counts", lambda array: array * 0), "forced"),
    ("timing-nested", "invalid", "steps", each("step", put(seconds=5.0), sample=1), "forwards take"),
    ("timing-nested", "invalid", "negative", each("step", put(seconds=-0.1), sample=1, step=3), "less than no time"),
    ("timing-nested", "invalid", "loop", each("request_end", put(seconds=500.0), source="worker", sample=1), "passed"),
    (
        "timing-nested",
        "invalid",
        "driver",
        each("request_end", put(seconds=1.0), source="driver", sample=1),
        "driver's event",
    ),
    ("timing-nested", "invalid", "no end", drop("request_end", source="worker", sample=1), "no start and end"),
    (
        "timing-nested",
        "invalid",
        "claimed slower than the clock",
        lambda r: (
            each("request_end", put(seconds=99.0), source="driver", sample=1)(r),
            change(TIMING, put(seconds=99.0))(r),
        ),
        "s passed",
    ),
    ("timing-monotonic", "invalid", "backwards", each("step", put(t=0.5), sample=1, step=3), "earlier"),
    (
        "media-decoded",
        "invalid",
        "another video",
        write(FULL + "sample-1/out.mp4", video(448, 256, 39, 24, 8)),
        "frames_sha256",
    ),
    ("media-decoded", "invalid", "no video", write(FULL + "sample-1/out.mp4", b"nothing"), "cannot be decoded"),
    (
        "media-decoded",
        "invalid",
        "no sound",
        write(FULL + "sample-1/out.mp4", video(448, 256, 39, 24, 0, audio=False)),
        "streams",
    ),
    ("media-decoded", "invalid", "frames", media(frames=40), "frames is 39"),
    ("media-decoded", "invalid", "sound", media(audio_seconds=9.0), "audio_seconds"),
    ("latents-told", "invalid", "missing", drop("latents", sample=1), "tells its latents 0 times"),
    ("latents-told", "invalid", "count", each("latents", latent(values=[1.0])), "1 sampled of 38304"),
    ("latents-told", "invalid", "shape", each("latents", latent(shape=[38303])), "38303 elements do not lie in 399"),
    ("latents-told", "invalid", "too small a sum", each("latents", latent(sum_squares=1.0)), "sum to more than all"),
    ("latents-told", "invalid", "no float32", each("latents", latent(0, 0.1)), "no float32"),
    ("latents-told", "invalid", "beyond float32", each("latents", latent(0, 1e300)), "no float32"),
    ("latents-told", "invalid", "no bfloat16", each("latents", latent(dtype="bfloat16")), "no bfloat16"),
    ("latents-told", "invalid", "null", each("latents", latent(0, None)), "said not to be finite"),
    ("latents-told", "invalid", "all not finite", each("latents", latent(not_finite=38305)), "not to be finite"),
    ("latents-told", "fail", "not finite", each("latents", latent(not_finite=1)), "1 latent elements are not finite"),
    ("latents-told", "invalid", "unobserved", each("arm_start", put(seams=[])), "tells its latents 1 times"),
    ("media-asked", "fail", "frames", media(frames=40), "frames is 40"),
    ("media-asked", "fail", "size", media(width=440), "width"),
    ("media-asked", "fail", "length", media(audio_seconds=0.5), "audio_seconds"),
    ("media-asked", "fail", "no sound", media(audio_channels=0), "no sound"),
    (
        "benchmark-derived",
        "invalid",
        "a figure",
        change("benchmark.json", lambda v: v["arms"]["dense"].update(load_seconds=1.0)),
        "load_seconds",
    ),
    (
        "benchmark-derived",
        "invalid",
        "an arm",
        change("benchmark.json", lambda v: v["arms"].pop("dense")),
        "arms.dense",
    ),
    ("benchmark-derived", "invalid", "nothing", remove("benchmark.json"), "no summary"),
    (
        "benchmark-derived",
        "invalid",
        "many",
        change(
            "benchmark.json",
            lambda v: [a.update(load_seconds=1.0, live_tokens=1, prefix_tokens=1) for a in v["arms"].values()],
        ),
        "1 more",
    ),
]


def put_question(record: Path, name: str) -> list[Finding]:
    return run_check(BY_NAME[name], read_record(record))


@pytest.mark.parametrize(("name", "status", "what", "breaks", "words"), CASES, ids=[f"{c[0]}: {c[2]}" for c in CASES])
def test_check_finds(fresh, name: str, status: str, what: str, breaks: Break, words: str) -> None:  # type: ignore[no-untyped-def]
    import re

    record = fresh()
    breaks(record)
    found = put_question(record, name)
    assert worst(found) in (status, "invalid" if status == "fail" else status), found
    assert any(finding.status == status and re.search(words, finding.message) for finding in found), found
    assert all(finding.remedy for finding in found if finding.status in ("warn", "fail", "invalid"))
    assert not any("could not be judged" in finding.message for finding in found)


def test_sound_records_have_no_objection(fresh) -> None:  # type: ignore[no-untyped-def]
    everything = ("dense", "lossless", "cache", "fullopt", "sol")
    for options in (
        {},
        {"target": "cpu-fbc"},
        {"arms": everything, "samples": 2, "resumed": ("fullopt", "dense")},
        {"overrides": ("parallel.num_gpus=2", "parallel.ulysses=2")},
    ):
        found = run_checks(read_record(fresh(**options)))
        wrong = [finding for finding in found if finding.status not in ("ok", "skipped")]
        assert [finding.check for finding in wrong] == (["lock-known"] if "overrides" in options else [])


def test_every_check_has_a_case_that_makes_it_fail() -> None:
    """The five that are left are tested below and in test_latents.py: they need another target than the CPU, or two
    ranks or samples."""
    elsewhere = {"environment-hardware", "cache-ranks", "latents-repeatable", "media-repeatable", "telemetry"}
    assert set(BY_NAME) == {name for name, *_ in CASES} | elsewhere
    assert len(BY_NAME) == len(CHECKS)


GPU: list[tuple[str, Any, str]] = [
    ("another GPU", lambda v: v["gpus"][0].update(name="NVIDIA L40S"), "L40S"),
    ("capability", lambda v: v["gpus"][0].update(compute_capability="9.0"), "needed"),
    ("one too many", lambda v: v["gpus"].append({**v["gpus"][0], "index": 1, "uuid_sha256": "5" * 64}), "needed: 1x"),
    ("none", lambda v: v.update(gpus=[]), "none"),
    ("the same twice", lambda v: v["gpus"].append({**v["gpus"][0], "index": 1}), "one identity"),
    ("memory", lambda v: v["gpus"][0].update(memory_mib=100), "MiB"),
    ("MIG", lambda v: v["gpus"][0].update(mig=True), "MIG"),
    ("driver", lambda v: v.update(driver="560.35.03"), "driver"),
    ("no driver", lambda v: v.update(driver=""), "unknown"),
]


@pytest.mark.parametrize(("what", "alter", "words"), GPU, ids=[what for what, _, _ in GPU])
def test_hardware_of_a_gpu_target(fresh, what: str, alter, words: str) -> None:  # type: ignore[no-untyped-def]
    record = fresh(target="rtx4090", arms=())
    assert worst(put_question(record, "environment-hardware")) == "ok"
    edit(record / "environment.json", alter)
    found = put_question(record, "environment-hardware")
    assert worst(found) == "invalid" and any(words in finding.message for finding in found), found
    edit(record / "environment.json", lambda value: value.update(differences=["said"]))
    assert worst(put_question(record, "environment-hardware")) == ("invalid" if what == "the same twice" else "warn")


def test_published_weights_that_are_not_the_listed_ones_make_a_locked_record_invalid(fresh) -> None:  # type: ignore[no-untyped-def]
    from config.canonical import sha256_json

    record = fresh(target="rtx4090", arms=())
    assert worst(put_question(record, "environment-checkpoint")) == "ok"

    def change(value: Any) -> None:
        value["checkpoint"]["files"][0]["sha256"] = "0" * 64
        value["checkpoint"]["sha256"] = sha256_json(value["checkpoint"]["files"])

    edit(record / "environment.json", change)
    found = put_question(record, "environment-checkpoint")
    assert worst(found) == "invalid" and "1 files of the published list" in found[0].message
    edit(record / "environment.json", put(differences=["weights come from --checkpoint"]))
    assert worst(put_question(record, "environment-checkpoint")) == "warn"


def test_gpu_run_outside_an_image_is_not_locked(fresh) -> None:  # type: ignore[no-untyped-def]
    record = fresh(target="rtx4090", arms=())
    edit(record / "environment.json", put(image_digest=""))
    assert worst(put_question(record, "environment-differences")) == "invalid"


SMALL = ("request.width=64", "request.height=64", "request.frames=5", "request.fps=24")


def test_gpu_run_without_telemetry_is_invalid(fresh) -> None:  # type: ignore[no-untyped-def]
    record = fresh(target="rtx4090", arms=("dense",), overrides=SMALL)
    assert worst(put_question(record, "telemetry")) == "ok"
    (record / "arms/dense/telemetry-gpu0.jsonl").unlink()
    assert worst(put_question(record, "telemetry")) == "invalid"


def test_ranks_that_decide_otherwise_fail(fresh) -> None:  # type: ignore[no-untyped-def]
    record = fresh(overrides=("parallel.num_gpus=2", "parallel.ulysses=2"))
    assert worst(put_question(record, "cache-ranks")) == "ok"
    each("cache_decision", put(signal=0.0315), FULL + "events-rank1.jsonl", step=6, sample=1)(record)
    assert worst(put_question(record, "cache-ranks")) == "fail"


def test_cpu_run_that_does_not_repeat_is_warned_of(fresh) -> None:  # type: ignore[no-untyped-def]
    record = fresh(samples=2)
    assert worst(put_question(record, "media-repeatable")) == "ok"
    media(frames_sha256="0" * 64)(record)
    assert worst(put_question(record, "media-repeatable")) == "warn"


def test_rows_judged_again_by_fp32_leave_the_gate_green(fresh) -> None:  # type: ignore[no-untyped-def]
    record = fresh()
    edit(record / GATE, lambda v: (v["against_sdpa"].update(max_abs=0.2), v.update(rejudged_rows=2, rejudged_failed=0)))
    assert worst(put_question(record, "gate-verdict")) == "ok"
    edit(record / GATE, put(rejudged_failed=1))
    found = put_question(record, "gate-verdict")
    assert {finding.status for finding in found} >= {"fail", "invalid"}


def test_red_gate_fails_and_names_no_contradiction(fresh) -> None:  # type: ignore[no-untyped-def]
    found = run_checks(read_record(fresh(red=("fullopt",))))
    assert {f.check for f in found if f.status not in ("ok", "skipped")} == {"record-outcomes", "gate-verdict"}
    assert worst(found) == "fail"


def test_red_gate_with_outputs_that_are_not_finite_is_failed_not_invalid(fresh) -> None:  # type: ignore[no-untyped-def]
    record = fresh(red=("fullopt",))
    edit(record / GATE, put(finite=False))
    tensor("all_exact", scaled(np.nan))(record)
    edit_events(record / EVENTS, lambda lines: None)
    assert worst(run_checks(read_record(record))) == "fail"


def test_unfinished_sample_of_an_earlier_process_is_warned_of(fresh) -> None:  # type: ignore[no-untyped-def]
    """Symptom: a resumed record could never pass. Cause: what the first process had begun was taken for missing
    evidence.
    """
    record = fresh(arms=("fullopt",), resumed=("fullopt",))
    (record / TIMING).unlink()

    def first_was_killed(lines: list[Any]) -> None:
        next(line for line in lines if line["event"] == "arm_end").update(outcome="aborted", reason="killed")

    edit_events(record / EVENTS, first_was_killed)
    found = put_question(record, "record-outcomes")
    assert worst(found) == "warn" and "sample 1" in found[0].message


def test_withheld_slice_and_video_are_skipped_with_their_reason(fresh) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    record = read_record(fresh())
    record = replace(record, withheld=frozenset({SLICE, FULL + "sample-1/out.mp4"}))
    for name in ("gate-exact", "gate-sparse", "gate-routes", "media-decoded"):
        found = run_check(BY_NAME[name], record)
        assert any(finding.status == "skipped" and "withheld" in finding.message for finding in found), name


def test_missing_pyav_is_a_skip_that_says_how_to_get_it(fresh, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    import sys

    monkeypatch.setitem(sys.modules, "av", None)
    found = put_question(fresh(), "media-decoded")
    assert [finding.status for finding in found] == ["skipped"] and "pip install" in found[0].message


def test_recipe_that_we_do_not_have_is_a_skip(fresh) -> None:  # type: ignore[no-untyped-def]
    record = fresh()
    edit(record / "lock.json", lambda value: value["values"]["recipe_files"].update(image="another", sha256="0" * 64))
    for name in ("environment-sources", "environment-packages"):
        assert [finding.status for finding in put_question(record, name)] == ["skipped"]


def test_check_that_breaks_or_says_nothing_is_invalid(fresh) -> None:  # type: ignore[no-untyped-def]
    record = read_record(fresh())

    def broken(_: object, say: Scribe) -> None:
        raise ZeroDivisionError("x")

    for run in (broken, lambda record, say: None):
        found = run_check(Check("x", "?", run), record)
        assert [finding.status for finding in found] == ["invalid"]


def test_no_finding_at_all_is_invalid() -> None:
    assert worst([]) == worst([Finding("x", Status.SKIPPED, "y")]) == "invalid"
    assert worst([Finding("x", Status.OK, "y"), Finding("x", Status.WARN, "y")]) == "warn"


def test_names_by_outcome() -> None:
    findings = [
        Finding("b", Status.OK, ""), Finding("b", Status.FAIL, ""), Finding("a", Status.OK, ""),
        Finding("c", Status.SKIPPED, ""), Finding("d", Status.WARN, ""), Finding("d", Status.SKIPPED, ""),
    ]  # fmt: skip
    assert names_by_outcome(findings) == {"passedTests": ["a"], "warnedTests": ["d"], "failedTests": ["b"]}


def test_findings_are_plain_json() -> None:
    found = Finding("a", Status.OK, "m", where="w").as_json()
    assert json.loads(json.dumps(found)) == {"check": "a", "status": "ok", "message": "m", "remedy": "", "where": "w"}
