"""From target to lock: the digest, the overrides, and what is said about a wrong name or value."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from config.canonical import canonical_json
from config.errors import Exit, UsageError
from config.lock import Lock, load_target, lock_file_name, lock_json, read_prompt, read_recipe, resolve, target_names
from config.schema import ARMS

from .conftest import CANONICAL, FIXTURE, target_folder

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "ea0fcd886c8d9f1a812602ef071f13f761dd1476e6777f31c1eba588f71fb1c0"  # sha256sum of CANONICAL


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# --- the digest -------------------------------------------------------------------------------------------------------


def test_literal_vector(fixture_target: Path) -> None:
    lock = resolve("fixture")
    assert canonical_json(lock.values).decode() == CANONICAL
    assert lock.digest == lock.base_digest == hashlib.sha256(CANONICAL.encode()).hexdigest() == DIGEST
    assert lock.overrides == ()


@given(st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_order_of_keys_and_tables_does_not_matter(rng: random.Random) -> None:
    head, *tables = FIXTURE.split("\n[")
    rng.shuffle(tables)
    blocks = [head.splitlines(), *(("[" + table).splitlines() for table in tables)]
    for block in blocks:
        names, lines = block[:1] if block[0].startswith("[") else [], block[1:] if block[0].startswith("[") else block
        rng.shuffle(lines)
        block[:] = [*names, *lines]
    text = "\n".join(line for block in blocks for line in block)
    with tempfile.TemporaryDirectory() as folder, target_folder(Path(folder), text):
        assert resolve("fixture").digest == DIGEST


def test_comments_titles_notes_and_defaults_are_not_locked(tmp_path: Path) -> None:
    text = FIXTURE.replace('title = "A fixture"', 'title = "Another"\nnotes = ["x"]').replace(
        "\nsamples = 1", "\nsamples = 7 # seven"
    )
    with target_folder(tmp_path, text):
        assert resolve("fixture").digest == DIGEST


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tau = 1.0", "tau = 1.5"),
        ("max_abs = 0.15", "max_abs = 0.16"),
        ('A = "é"', 'A = "e"'),
        ('sparse = "none"', 'sparse = "reference"'),
        ("min_samples = 1", "min_samples = 2"),
        ('attention = "torch_sdpa"', 'attention = "fa"'),
    ],
)
def test_any_value_changes_the_digest(tmp_path: Path, old: str, new: str) -> None:
    # The last occurrence: a stock arm may not be changed.
    text = new.join(FIXTURE.rsplit(old, 1))
    with target_folder(tmp_path, text):
        assert resolve("fixture").digest != DIGEST


def test_prompt_and_recipe_are_covered(tmp_path: Path) -> None:
    with target_folder(tmp_path, image=b"abd"):
        assert resolve("fixture").digest != DIGEST
    with target_folder(tmp_path):
        (tmp_path / "prompts/hello.txt").write_text("hello!\n", "utf-8")
        assert resolve("fixture").digest != DIGEST
    with target_folder(tmp_path):
        (tmp_path / "images/fixture/requirements.lock").write_text("", "utf-8")
        assert resolve("fixture").recipe.files["requirements.lock"] is not None
        assert resolve("fixture").digest != DIGEST


def test_same_digests_in_every_process() -> None:
    """Whatever PYTHONHASHSEED, locale and working directory are."""
    program = "from config.lock import *; print(*(resolve(name).digest for name in target_names()))"
    here = [resolve(name).digest for name in target_names()]
    for seed, locale, cwd in (("0", "C", "/"), ("4242", "C.UTF-8", str(ROOT))):
        env = {"PYTHONPATH": str(ROOT), "PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": seed, "LC_ALL": locale}
        there = subprocess.run([sys.executable, "-c", program], env=env, cwd=cwd, stdout=subprocess.PIPE, check=True)
        assert there.stdout.decode().split() == here


# --- reading back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", target_names())
def test_a_lock_reads_back_as_its_target(name: str) -> None:
    lock = Lock.model_validate_json(lock_json(resolve(name)))
    target = load_target(name)
    assert lock == resolve(name) and lock.recomputed_digest() == lock.digest
    kept = {"title": "", "notes": (), "defaults": None}
    resolved = lock.resolved
    assert resolved.model_dump(exclude=set(kept) | {"request"}) == target.model_dump(exclude=set(kept) | {"request"})
    assert resolved.request.prompt_text == read_prompt(target.request.prompt)
    assert lock.recipe == read_recipe(target.recipe)
    assert lock_file_name(lock) == f"{name}-{lock.digest[:12]}.json"


def test_a_lock_from_disk_keeps_the_order_of_arms() -> None:
    """lock.json sorts its keys; the arms of a run have an order."""
    lock = Lock.model_validate_json(lock_json(resolve("cpu")))
    assert lock.resolved.defaults.arms == tuple(arm for arm in ARMS if arm in lock.values["arms"])


def test_a_changed_lock_is_noticed() -> None:
    data = json.loads(lock_json(resolve("cpu")))
    data["values"]["sol_attn"]["tau"] = 0.5
    lock = Lock.model_validate(data)
    assert lock.recomputed_digest() != lock.digest


# --- overrides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("sol_attn.tau=0.5", "sol_attn.tau", 0.5),
        ("sol_attn.tau=2", "sol_attn.tau", 2.0),
        ("sol_attn.sink=prefix", "sol_attn.sink", "prefix"),
        ('sol_attn.sink="prefix"', "sol_attn.sink", "prefix"),
        ('offload.components=["dit", "vae"]', "offload.components", ["dit", "vae"]),
        ("offload.components=[]", "offload.components", []),
        ("env.NEW=1", "env.NEW", "1"),
        ('env.NEW="1"', "env.NEW", "1"),
        ("env.NEW=", "env.NEW", ""),
        ("env.NEW=a=b", "env.NEW", "a=b"),
        ("env.NEW=expandable_segments:True", "env.NEW", "expandable_segments:True"),
        ("arms.cache.sparse=reference", "arms.cache.sparse", "reference"),
        ('hardware.driver_floor="570.1"', "hardware.driver_floor", "570.1"),
    ],
)
def test_override_is_listed(override: str, key: str, value: object) -> None:
    lock = resolve("cpu", [override])
    assert [(entry.key, entry.value) for entry in lock.overrides] == [(key, value)]
    assert lock.digest != lock.base_digest == resolve("cpu").digest
    assert dict(leaves(lock.values))[key] == value


def test_overrides_that_carry_others_along() -> None:
    lock = resolve("cpu", ["request.num_inference_steps=20"])
    assert {entry.key: entry.value for entry in lock.overrides} == {
        "request.num_inference_steps": 20,
        "request.forwards": 19,
    }
    lock = resolve("cpu", ["request.prompt=mechanics"])
    assert {entry.key for entry in lock.overrides} == {"request.prompt", "request.prompt_text", "request.prompt_sha256"}
    assert lock.resolved.request.prompt_text == read_prompt("mechanics")
    lock = resolve("cpu", ["request.prompt_text=A cat."])
    assert lock.resolved.request.prompt_sha256 == hashlib.sha256(b"A cat.").hexdigest()


def test_a_prompt_by_name_replaces_a_text() -> None:
    assert resolve("cpu", ["request.prompt_text=A cat.", "request.prompt=starship"]) == resolve("cpu")


def test_a_prompt_loses_one_newline_at_its_end_and_nothing_else(tmp_path: Path) -> None:
    with target_folder(tmp_path):
        (tmp_path / "prompts/hello.txt").write_text(" hello \n\n", "utf-8")
        assert read_prompt("hello") == " hello \n"


def test_a_target_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_target("cpu").sol_attn.tau = 2.0  # type: ignore[misc]


def test_another_cache_is_one_table() -> None:
    lock = resolve("cpu", ['cache={kind="firstblockcache", threshold=0.08}'])
    assert lock.values["cache"] == {"kind": "firstblockcache", "threshold": 0.08}


def test_the_last_override_of_a_key_counts() -> None:
    assert resolve("cpu", ["sol_attn.tau=3", "sol_attn.tau=0.5"]) == resolve("cpu", ["sol_attn.tau=0.5"])


@pytest.mark.parametrize("name", ["cpu", "rtx4090"])
def test_overriding_with_the_same_value_is_no_difference(name: str) -> None:
    target = load_target(name).model_dump(mode="json", exclude={"notes", "title", "defaults"})
    same = [f"{key}={json.dumps(value)}" for key, value in leaves(target) if key != "request.prompt_text"]
    assert len(same) > 60
    assert resolve(name, same) == resolve(name)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("tau", "is not of the form section.key=value"),
        ("=1", "is not of the form"),
        (".tau=1", "is not of the form"),
        ("sol_attn..tau=1", "is not of the form"),
        ("sol attn.tau=1", "is not of the form"),
        ("sol_attn.tou=1", "unknown key 'sol_attn.tou'; did you mean 'tau'?"),
        ("sol_atn.tau=1", "unknown key 'sol_atn'; did you mean 'sol_attn'?"),
        ("cache.treshold=1", "unknown key 'cache.treshold'; did you mean 'threshold'?"),
        ("arms.fulopt.cache=true", "unknown key 'arms.fulopt'; did you mean 'fullopt'?"),
        ("arms.fullopt.cach=true", "unknown key 'arms.fullopt.cach'; did you mean 'cache'?"),
        ("xyz=1", "known: arms, attention"),
        ("sol_attn.tau=high", "sol_attn.tau: Input should be a valid number (found 'high')"),
        ("sol_attn.tau=true", "sol_attn.tau: Input should be a valid number"),
        ("sol_attn.tau=nan", "sol_attn.tau: Input should be a finite number"),
        ("sol_attn.tau=-inf", "sol_attn.tau: Input should be a finite number"),
        ("sol_attn.tau=1\nblock=2", "sol_attn.tau: Input should be a valid number"),
        ("sol_attn.tau.x=1", "'tau' is a value, not a section"),
        ("sol_attn=1", "sol_attn: Input should be a valid dictionary"),
        ("request.seed=1.5", "request.seed: Input should be a valid integer (found 1.5)"),
        ("request.seed=-1", "request.seed: Input should be greater than or equal to 0"),
        ("request.seed=99999999999999999999", "no canonical JSON form"),
        ("request.seed=" + "9" * 5000, "request.seed: Input should be a valid integer"),
        ("request.forwards=3", "forwards must be num_inference_steps - 1"),
        ("request.prompt=starshp", "prompt 'starshp' does not exist"),
        ("request.prompt_sha256=" + "0" * 64, "has SHA-256"),
        ("request.prompt_text=\udc80", "is not valid UTF-8"),
        ("hardware.compute_capability=9.0", """write hardware.compute_capability='"9.0"'"""),
        ("defaults.samples=3", "is not part of a lock"),
        ("title=Mine", "is not part of a lock"),
        ("recipe=cpuu", "image recipe 'cpuu' does not exist"),
        ("name=other", "calls itself 'other'"),
        ("parallel.num_gpus=2", "ulysses (1) must equal num_gpus (2)"),
        ("arms.dense.cache=true", "arms.dense: a stock arm switches nothing on"),
        ("arms.fullopt.compile=true", "compile.enabled is false"),
        ("vae.resident_after_denoise=false", "vae.resident_after_denoise is false"),
        ("hardware.gpu_name=NVIDIA H100", "hardware: a cuda target names gpu_name, gpu_count and compute_capability"),
        ("checkpoint.repo=somebody/weights", "checkpoint: a synthetic checkpoint has a preset, and no repo"),
        ("checkpoint.kind=hub", "checkpoint: a hub checkpoint has repo and revision"),
        ("env.A.B=1", "env.A: Input should be a valid string"),
        ("checkpoint.preset=", "a synthetic checkpoint has a preset"),
    ],
)
def test_wrong_overrides_are_refused_with_a_reason(override: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve("cpu", [override])
    assert says in str(caught.value)
    assert caught.value.exit_code == Exit.USAGE


def test_a_gpu_target_needs_its_gpus() -> None:
    with pytest.raises(UsageError, match=r"hardware.gpu_count \(4\) must equal parallel.num_gpus \(2\)"):
        resolve("h100x4", ["parallel.num_gpus=2", "parallel.ulysses=2"])


KEYS = [key for key, _ in leaves(load_target("cpu").model_dump(mode="json"))]
TEXTS = st.one_of(
    st.integers(-3, 100).map(str),
    st.floats(allow_nan=True).map(repr),
    st.sampled_from(
        ["true", "false", "prefix", "text", "none", "exact", '"x"', "[]", '["dit"]', "{}", "mechanics", ""]
    ),
    st.text(max_size=8),
)
OVERRIDES = st.lists(
    st.one_of(st.builds("{}={}".format, st.sampled_from(KEYS), TEXTS), st.text(max_size=12)), min_size=1, max_size=3
)


@given(OVERRIDES)
@settings(max_examples=150, deadline=None)
def test_any_override_is_refused_or_listed(overrides: list[str]) -> None:
    """Never another exception; and what is listed is exactly what differs from the target's own lock."""
    base = resolve("cpu")
    try:
        lock = resolve("cpu", overrides)
    except UsageError as error:
        assert error.found and error.exit_code == Exit.USAGE
        return
    assert lock.base_digest == base.digest and lock.recomputed_digest() == lock.digest
    assert (lock.digest == base.digest) == (lock.overrides == ())
    before, after = dict(leaves(base.values)), dict(leaves(lock.values))
    assert {entry.key for entry in lock.overrides} == {
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    }
    for entry in lock.overrides:
        assert (entry.locked, entry.value) == (before.get(entry.key), after.get(entry.key))
    assert Lock.model_validate_json(lock_json(lock)) == lock
    assert lock.resolved.name == "cpu"


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rtx409", "'rtx4090'"),
        ("h100", "'h100x4'"),
        ("CPU", "known: a100x4, cpu"),
        ("", "known:"),
        ("../targets/cpu", "known: a100x4"),
    ],
)
def test_unknown_target_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(name)
    assert f"target {name!r} does not exist" in caught.value.found and hint in caught.value.remedy


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("tau = 1.0", "tou = 1.0", "unknown key 'sol_attn.tou'; did you mean 'tau'?"),
        ("tau = 1.0\n", "", "key 'sol_attn.tau' is missing"),
        ("[cache]\nkind", "[cache]\nknd", "cache"),
        ("seed = 0", 'seed = "0"', "request.seed: Input should be a valid integer (found '0')"),
        ("[cache]", "[cache", "is not TOML"),
        ('name = "fixture"', 'name = "other"', "make the two names equal"),
        ('arms = ["dense"]', 'arms = ["sol"]', "defaults.arms names arms that the target lacks: sol"),
    ],
)
def test_wrong_target_file(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in FIXTURE
    with target_folder(tmp_path, FIXTURE.replace(old, new, 1)), pytest.raises(UsageError) as caught:
        load_target("fixture")
    assert says in str(caught.value)


def test_a_lock_names_the_output_only_where_it_need_not_be_a_video() -> None:
    """The key is younger than the first locks, which keep their digests."""
    assert "output" not in resolve("cpu").values and resolve("cpu").resolved.output == "mp4"
    assert resolve("cpu", ["output=mp4"]).digest == resolve("cpu").digest
    other = resolve("cpu", ["output=mp4_or_tensors"])
    assert other.resolved.output == "mp4_or_tensors" and other.digest != other.base_digest
    assert [override.key for override in other.overrides] == ["output"]
    with pytest.raises(UsageError, match="mp4_or_tensors"):
        resolve("cpu", ["output=tensors"])
