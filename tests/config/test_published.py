"""Published claims: complete, with the tolerances we say, and the published table checked against itself."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from config.published import FILE, Arithmetic, Claim, Tolerance, parse, published
from config.record import Ratio

CLAIMS = {claim.id: claim for claim in published().claims}
ARITHMETIC = {entry.id: entry for entry in published().arithmetic}

# (target, arm, metric) to the printed figure, typed from the sources a second time.
PRINTED = {
    ("rtx4090", "dense", "seconds"): "2239.22",
    ("rtx4090", "lossless", "seconds"): "1951.27",
    ("rtx4090", "cache", "seconds"): "613.71",
    ("rtx4090", "fullopt", "seconds"): "504.33",
    ("rtx4090", "fullopt", "ratio:fullopt/dense"): "4.44",
    ("rtx4090", "cache", "ratio:cache/lossless"): "3.18",
    ("rtx4090", "fullopt", "ratio:fullopt/cache"): "1.22",
    ("rtx4090", "fullopt", "ratio:fullopt/lossless"): "3.87",
    ("rtx4090", "fullopt", "warmup.density.first"): "19.65",
    ("rtx4090", "fullopt", "live_tokens"): "38247",
    ("rtx4090", "fullopt", "cache.compute"): "14",
    ("rtx4090", "fullopt", "cache.reuse"): "35",
    ("rtx4090", "fullopt", "cache.calls"): "49",
    ("rtx4090", "fullopt", "gate.max_abs"): "0.0625",
    ("rtx4090", "fullopt", "gate.mean_abs"): "0.000289",
    ("rtx4090", "fullopt", "gate.rel_l2"): "0.000609",
    ("h100x4", "dense", "seconds"): "81.47",
    ("h100x4", "fullopt", "seconds"): "22.89",
    ("h100x4", "fullopt", "ratio:fullopt/dense"): "3.56",
    ("h100x4", "fullopt", "warmup.density.first"): "18.04",
    ("h100x4", "fullopt", "cache.reuse_rate"): "67.35",
    ("h100x4", "fullopt", "peak_memory_mib"): "49154",
    ("h100x4", "fullopt", "live_tokens"): "38247",
    ("h100x4", "fullopt", "prefix_tokens"): "951",
    ("a100x4", "dense", "seconds"): "217.32",
    ("a100x4", "fullopt", "seconds"): "61.28",
    ("a100x4", "fullopt", "ratio:fullopt/dense"): "3.55",
    ("a100x4", "fullopt", "warmup.density.first"): "18.04",
    ("a100x4", "fullopt", "cache.reuse_rate"): "67.35",
    ("a100x4", "fullopt", "peak_memory_mib"): "49126",
    ("a100x4", "fullopt", "live_tokens"): "38247",
    ("a100x4", "fullopt", "prefix_tokens"): "951",
}


def test_every_published_figure_is_here_and_no_other() -> None:
    found = {(claim.target, claim.arm, claim.metric) for claim in CLAIMS.values() if claim.origin == "published"}
    assert found == set(PRINTED)


@pytest.mark.parametrize(
    "claim", [claim for claim in CLAIMS.values() if claim.origin == "published"], ids=lambda c: c.id
)
def test_value_rounds_to_the_printed_figure(claim: Claim) -> None:
    printed = Decimal(PRINTED[claim.target, claim.arm, claim.metric])
    percent = claim.kind == "density" or claim.metric == "cache.reuse_rate"
    value = Decimal(repr(claim.value)) * (100 if percent else 1)
    assert value.quantize(printed, rounding=ROUND_HALF_UP) == printed
    if not claim.printed.startswith("["):
        assert str(printed) in claim.printed.replace(",", "")


def test_default_tolerances() -> None:
    def margin(name: str) -> float:
        return CLAIMS[name].tolerance.margin(CLAIMS[name].value)

    assert margin("h100x4-fullopt-seconds") == pytest.approx(0.05 * 22.89)
    assert Tolerance(relative=0.05, absolute=0.5).margin(2.0) == 0.5  # a short time: the half second decides
    assert margin("rtx4090-density") == 0.005
    assert margin("rtx4090-cache-compute") == 0.0
    assert margin("h100x4-cache-reuse-rate") < 0.5 / 49  # no other count passes


def test_the_stack_of_the_datacentre_claims_is_not_ours() -> None:
    assert {claim.stack.cuda for claim in published().for_target("rtx4090")} == {"12.8"}
    for target in ("h100x4", "a100x4"):
        assert {claim.stack.cuda for claim in published().for_target(target)} == {"13.0"}
        assert {claim.stack.sglang_commit[:8] for claim in published().for_target(target)} == {"12eadf86"}


@pytest.mark.parametrize("target", ["h200", "cpu", "cpu-fbc"])
def test_no_claim_about_synthetic_weights(target: str) -> None:
    assert published().for_target(target) == ()


def test_ratios_point_the_way_of_the_record() -> None:
    """4.44x is fullopt's speed over dense: more than one, as `Ratio` has it."""
    claim = CLAIMS["rtx4090-fullopt-over-dense"]
    assert claim.ratio == ("fullopt", "dense")
    seconds = {arm: CLAIMS[f"rtx4090-{arm}-seconds"].value for arm in ("dense", "fullopt")}
    ratio = Ratio(arm="fullopt", baseline="dense", seconds=seconds["dense"] / seconds["fullopt"], denoise_seconds=1.0)
    assert ratio.seconds == pytest.approx(claim.value, rel=1e-6)


@pytest.mark.parametrize("entry", published().arithmetic, ids=lambda entry: entry.id)
def test_the_published_table_against_itself(entry: Arithmetic) -> None:
    assert entry.agrees == entry.holds


def test_the_translated_article_contradicts_the_table() -> None:
    """4.44x is not against the compiled dense run: that ratio is 3.87x."""
    assert not ARITHMETIC["rtx4090-4.44-same-compiler"].agrees
    assert ARITHMETIC["rtx4090-4.44"].agrees and ARITHMETIC["rtx4090-3.87"].agrees


def test_67_35_percent_is_33_of_49_only() -> None:
    assert [n for n in range(50) if f"{100 * n / 49:.2f}" == "67.35"] == [33]


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_arithmetic_can_fail(first: int, second: int) -> None:
    value = Decimal(first) / Decimal(second)
    right = value.quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)
    if abs(value - right) > Decimal("0.00499"):
        return  # too near a tie for binary floating point to decide
    fields = {
        "id": "x",
        "statement": "",
        "operation": "quotient",
        "terms": (float(first), float(second)),
        "holds": True,
    }
    assert Arithmetic(**fields, printed=str(right)).agrees
    assert not Arithmetic(**fields, printed=str(right + Decimal("0.01"))).agrees


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('metric = "cache.compute"', 'metric = "cache.computed"', "unknown or not of kind"),
        ('metric = "cache.compute"', 'metric = "seconds"', "unknown or not of kind"),
        ('target = "h100x4"', 'target = "h100x8"', "unknown targets: h100x8"),
        ('metric = "ratio:fullopt/dense"', 'metric = "ratio:fullopt/sparse"', "no such arm"),
        ('metric = "ratio:fullopt/dense"', 'metric = "ratio:cache/dense"', "the arm of"),
        ('id = "h100x4-density"', 'id = "rtx4090-density"', "stand twice: rtx4090-density"),
        ('printed = "4.44"', 'printed = "4.44x"', "printed"),
        ('kind = "density"', 'kind = "time"', "not of kind 'time'"),
        ('\norigin = "derived"', '\norigin = "guessed"', "origin"),
    ],
)
def test_a_wrong_file_is_refused(old: str, new: str, message: str) -> None:
    text = FILE.read_text("utf-8")
    assert old in text
    with pytest.raises(ValidationError, match=message):
        parse(text.replace(old, new, 1))


def test_every_remark_says_what_follows() -> None:
    assert all(remark.text and remark.consequence for remark in published().remarks)
