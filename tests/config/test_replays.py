"""Lists of computed forwards: their short form, the named ones, and where they are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from config.errors import Exit, UsageError
from config.lock import load_target, resolve, shipped_locks, target_names
from config.published import published
from config.replays import NamedList, format_steps, named_lists, parse_steps

from .conftest import FIXTURE, target_folder

TEA = [0, 1, 2, 3, 4, 9, 14, 19, 24, 29, 34, 39, 44, 48]
FIRST = list(range(0, 46, 3))


@pytest.mark.parametrize(
    ("target", "override", "steps"),
    [
        ("rtx4090", "published-count", TEA),
        ("h100x4", "published-count", FIRST),
        ("h200", "published-count", FIRST),
        ("cpu", "0-4,9,14", [0, 1, 2, 3, 4, 9, 14]),
        ("cpu", " 0 - 2 , 9 ", [0, 1, 2, 9]),
        ("cpu", '"0-2"', [0, 1, 2]),
        ("cpu", "[0, 1, 15]", [0, 1, 15]),
        ("cpu", "0", [0]),
        ("cpu", "0,15", [0, 15]),
    ],
)
def test_a_list_opens_the_run_and_stands_in_the_lock(target: str, override: str, steps: list[int]) -> None:
    lock = resolve(target, [f"cache.replay={override}"])
    assert [(entry.key, entry.locked, entry.value) for entry in lock.overrides] == [("cache.replay", None, steps)]
    assert list(lock.resolved.cache.replay) == steps
    assert lock.recomputed_digest() == lock.digest != lock.base_digest


def test_a_name_means_the_list_of_the_cache_that_is_set_beside_it() -> None:
    cache = 'cache={kind="firstblockcache", threshold=0.08}'
    assert list(resolve("rtx4090", [cache, "cache.replay=published-count"]).resolved.cache.replay) == FIRST


@pytest.mark.parametrize("override", ["cache.replay=[]", "cache.replay=", "warmup.compute_last=false"])
def test_what_is_not_set_leaves_the_lock_as_it_was(override: str) -> None:
    """The locks that shipped before these keys existed keep their digests."""
    for name in target_names():
        base = resolve(name)
        assert "replay" not in base.values["cache"]
        assert base.values["warmup"].get("compute_last", True) is True
        if base.resolved.warmup.compute_last:
            continue
        assert resolve(name, [override]) == base


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("1,2", "begins with forward 1; forward 0 has nothing to reuse"),
        ("0,2,1", "must rise"),
        ("0,0", "must rise"),
        ("0-99", "lists forward 99; the request's last is 15"),
        ("[0, -1]", "greater than or equal to 0"),
        ("[0, 1.5]", "valid integer"),
        ("true", "valid tuple"),
        ("0-4,9,", "is no list of forwards"),
        ("0--4", "is no list of forwards"),
        ("3-1", "is no range of forwards"),
        ("0-999999999", "is no range of forwards"),
        ("published-cuont", "no list 'published-cuont' for teacache"),
        ("published-count", "lists forward 48; the request's last is 15"),
    ],
)
def test_wrong_lists_are_refused_with_a_reason(override: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve("cpu", [f"cache.replay={override}"])
    assert says in str(caught.value) and caught.value.exit_code is Exit.USAGE


@pytest.mark.parametrize("value", ["[0, 1]", "[0]", "0", '"0-1"', '"published-count"'])
def test_a_target_that_ships_with_a_list_is_refused(tmp_path: Path, value: str) -> None:
    text = FIXTURE.replace("threshold = 0.08", f"threshold = 0.08\nreplay = {value}")
    with target_folder(tmp_path, text), pytest.raises(UsageError, match=r"has cache\.replay"):
        load_target("fixture")
    with target_folder(tmp_path, text), pytest.raises(UsageError):
        load_target("fixture", ["cache.replay=[]"])


def test_no_lock_that_ships_has_a_list() -> None:
    assert all("replay" not in lock.values["cache"] for lock in shipped_locks().values())


# --- the named lists --------------------------------------------------------------------------------------------------


def test_the_named_lists_are_those_of_the_issue_and_have_the_published_counts() -> None:
    found = {(entry.name, entry.cache): entry for entry in named_lists()}
    assert {key: list(entry.listed) for key, entry in found.items()} == {
        ("published-count", "teacache"): TEA,
        ("published-count", "firstblockcache"): FIRST,
    }
    claims = {claim.target: claim.value for claim in published().claims if claim.metric == "cache.compute"}
    assert claims == {target: len(TEA if target == "rtx4090" else FIRST) for target in claims}
    assert {"rtx4090", "h100x4"} <= set(claims)
    assert all(re.search("ours", entry.source) for entry in found.values())


@pytest.mark.parametrize(("field", "value"), [("count", 13), ("forwards", 48), ("source", ""), ("steps", "0, 0")])
def test_a_named_list_that_is_not_what_it_says_is_refused(field: str, value: Any) -> None:
    entry = named_lists()[0].model_dump()
    with pytest.raises((ValidationError, UsageError)):
        NamedList.model_validate({**entry, field: value})


# --- the short form ---------------------------------------------------------------------------------------------------

rising = st.lists(st.integers(0, 200), min_size=1, max_size=40).map(lambda steps: tuple(sorted(set(steps))))


@given(rising)
def test_the_short_form_reads_back(steps: tuple[int, ...]) -> None:
    assert parse_steps(format_steps(steps)) == steps


@given(st.text(alphabet="0123456789,- ", max_size=12))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    """Judged a second time by splitting alone."""
    parts = [[bound.strip() for bound in part.split("-")] for part in text.split(",")]
    whole = all(len(part) <= 2 and all(bound.isdecimal() for bound in part) for part in parts)
    bounds = [(int(part[0]), int(part[-1])) for part in parts] if whole else []
    if not whole or any(low > high or high >= 10_000 for low, high in bounds):
        with pytest.raises(UsageError):
            parse_steps(text)
        return
    assert list(parse_steps(text)) == [step for low, high in bounds for step in range(low, high + 1)]


# --- warm-ups that cannot hold the gate -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "arms"),
    [
        ([], []),
        (["warmup.num_inference_steps=8"], []),  # forward 6 follows six dense ones; the cache's signal decides about it
        (["warmup.num_inference_steps=7"], ["fullopt", "sol"]),
        (["warmup.num_inference_steps=7", "warmup.compute_last=true"], ["fullopt", "sol"]),
        (["warmup.num_inference_steps=8", "cache.replay=0-5,7"], ["fullopt"]),
        (["warmup.num_inference_steps=8", "cache.replay=0-6"], []),
        (["warmup.num_inference_steps=8", "cache.replay=0", "warmup.compute_last=true"], []),
    ],
)
def test_a_warm_up_that_cannot_hold_the_gate_is_known_from_the_values(overrides: list[str], arms: list[str]) -> None:
    target = load_target("cpu-fbc", overrides)
    assert [arm for arm in target.arms if target.never_gated(arm)] == arms


def test_every_target_that_ships_can_be_gated() -> None:
    targets = [load_target(name) for name in target_names()]
    assert [(target.name, arm) for target in targets for arm in target.arms if target.never_gated(arm)] == []
