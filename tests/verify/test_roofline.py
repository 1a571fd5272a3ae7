"""The roofline's arithmetic against figures worked out by hand, against times measured on an H200, and by its rules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.architecture import PUBLISHED, TINY
from config.ceilings import Ceilings, ceilings_of, known_gpus
from config.errors import UsageError
from config.lock import resolve
from verify.roofline.codec import audio_decode, calls_of_decoder, text_encoding, video_decode
from verify.roofline.dit import MEANS, PRODUCTS, ROUTED, Document, Machine, Model, audio_latents, latents
from verify.roofline.plan import Plan, plan_of, totals
from verify.roofline.work import Operation, Stage, Traffic, elementwise, floor, linear

PUBLISHED_TARGETS = ("rtx4090", "h100x4", "a100x4", "h200")


def plan(name: str, *overrides: str, density: float | None = None, computed: int | None = None) -> Plan:
    return plan_of(resolve(name, overrides).resolved, density=density, computed=computed)


def ceilings(name: str = "NVIDIA H200") -> Ceilings:
    found = ceilings_of(name)
    assert found is not None
    return found


def part(stage: Stage, *names: str) -> Stage:
    parts = [operation for operation in stage.operations if operation.name in names]
    assert parts
    return Stage("part", tuple(parts), gpus=stage.gpus)


# ---------------------------------------------------------------- the request


@pytest.mark.parametrize("name", PUBLISHED_TARGETS)
def test_the_published_document(name: str) -> None:
    """NVlabs/Sana's README: 38,247 tokens, a prefix of 951; 37,296 = 37 x 24 x 42 of video, 414 = 2 x 207 of audio."""
    found = plan(name)
    assert (found.document.live, found.document.total) == (38247, 38272)
    assert (found.document.text, found.document.audio, found.document.video) == (537, 414, 37296)
    assert found.document.dense_rows == (537 if name == "rtx4090" else 951)
    assert latents(124) == 37
    assert audio_latents(found.target.request, found.architecture) == 207


def test_the_small_document() -> None:
    """What the CPU target's runs record: 2,011 tokens in 2,048 rows."""
    assert (plan("cpu").document.live, plan("cpu").document.total) == (2011, 2048)


def test_decoder_calls() -> None:
    """Seven clips of four by seven tiles at 1344 x 768 with 37 latents."""
    assert calls_of_decoder(124, 1344, 768, PUBLISHED.video) == 7 * 4 * 7 == 196


# ---------------------------------------------------------------- by hand, and measured on an H200


def test_dense_forward_by_hand() -> None:
    """As profiled on an H200: attention 4,026.0 ms is 521 TFLOP/s of 4 T^2 7168 a layer, the linear layers 1,982.5 ms
    are 744 TFLOP/s over 38,272 rows."""
    forward = plan("h200").model.forward()
    attention, products = part(forward, "attention").flops, part(forward, *PRODUCTS).flops
    assert attention == 50 * 4 * 38247**2 * 7168
    assert attention / 4.0260 / 1e12 == pytest.approx(521, abs=0.5)
    assert products == 50 * 2 * 38272 * (5376 * 21504 + 7168 * 5376 + 5376 * 28672 + 14336 * 5376)
    assert products / 1.9825 / 1e12 == pytest.approx(744, abs=0.5)


def test_sparse_call_by_hand() -> None:
    """engine/attention/NOTES.md: 18.4 % + 1/64 of one call at 773 TFLOP/s is 10.8 ms; q, k and v once are 1.64 GB,
    0.39 ms at 4.27 TB/s."""
    model = replace(plan("h200").model, document=replace(plan("h200").document, dense_rows=0))
    call = model.forward(0.184, 1)
    assert part(call, ROUTED).flops == pytest.approx(0.184 * 4 * 38247**2 * 7168)
    assert floor(part(call, ROUTED, MEANS), ceilings()).seconds * 1e3 == pytest.approx(10.8, abs=0.05)
    means = part(call, MEANS)
    assert means.bytes / 1e9 == pytest.approx(1.64, abs=0.01)
    assert means.bytes / 4.27e12 * 1e3 == pytest.approx(0.39, abs=0.005)


def test_dense_rows_of_a_sparse_call_see_every_key() -> None:
    """951 rows against all keys and the rest at a density, by counting pairs."""
    model = plan("h200").model
    pairs = 951 * 38247 + (38247 - 951) * 38247 * 0.25
    assert part(model.forward(0.25, 48), ROUTED).flops == pytest.approx(48 * 4 * 128 * 56 * pairs)


def test_everything_routed_is_dense_attention_and_the_means() -> None:
    model = plan("h200").model
    dense, sparse = model.forward(), model.forward(1.0, 48)
    means = part(sparse, MEANS).flops
    assert sparse.flops == pytest.approx(dense.flops + means)
    assert means == 48 * 4 * 38247 * 598 * 7168  # 598 blocks of 64


def test_layer_wise_offload_streams_every_block_once_a_forward() -> None:
    """50 blocks of 1.291 GB are 64.6 GB a forward; a forward that FirstBlockCache reuses fetches one, TeaCache none."""
    model = plan("rtx4090").model
    assert model.forward().traffic.host / 1e9 == pytest.approx(64.6, abs=0.05)
    assert model.reused("firstblockcache").traffic.host / 1e9 == pytest.approx(1.291, abs=5e-4)
    assert model.reused("teacache").traffic.host == 0
    assert plan("h200").model.forward().traffic.host == 0
    kept = plan("rtx4090", "offload.resident_layers=10").model
    assert kept.forward().traffic.host == pytest.approx(model.forward().traffic.host * 40 / 50)


def test_pcie_floor_of_the_rtx4090() -> None:
    """64.56 GB at 31.5 GB/s are 2.05 s, hidden behind 22 s of products; streaming the VAE for each of 196 tiles is not
    hidden: 36 layers of 67.1 M FP32 weights, 1.9 TB, a minute."""
    found = plan("rtx4090")
    card = ceilings("NVIDIA GeForce RTX 4090")
    dense = floor(found.model.forward(), card)
    assert dense.bound == "products" and dense.seconds > 64.56 / 31.5
    streamed, kept = found.after(resident=False)[0], found.after(resident=True)[0]
    assert streamed.traffic.host == pytest.approx(196 * 36 * 67_143_680 * 4)
    assert floor(streamed, card).bound == "PCIe"
    assert floor(streamed, card).seconds == pytest.approx(1894.96 / 31.5, rel=1e-3)
    assert kept.traffic.host * 196 == pytest.approx(streamed.traffic.host)
    assert floor(kept, card).bound == "products"


def test_ulysses_exchange() -> None:
    """Measured on two H200: the queries, keys and values of one rank are 823 MB; half of them sent in 1.28 ms is
    321 GB/s. The output goes back as a fourth tensor."""
    two = Model(PUBLISHED.dit, plan("h200").document, Machine(gpus=2))
    logits = 38272 * 128 * 4 / 2
    each = (two.forward().traffic.exchanged - logits) / 50
    assert each * 3 / 4 == pytest.approx(823e6 / 2, rel=1e-3)
    assert each * 3 / 4 / 1.28e-3 / 1e9 == pytest.approx(321, abs=1)


def test_four_gpus_exchange_three_quarters_and_gather_the_weights() -> None:
    model = plan("h100x4").model
    traffic = model.forward().traffic
    assert traffic.exchanged == pytest.approx(0.75 * (50 * 4 * 9568 * 7168 * 2 + 38272 * 128 * 4))
    assert traffic.gathered == pytest.approx(0.75 * 50 * 645_571_840 * 2)
    assert model.reused("teacache").traffic.gathered == 0


def test_no_measured_time_lies_below_its_floor() -> None:
    """Measured on one H200, random weights (SGLang 0.5.17): dense forward 6.2114 s; text encoder 61 ms; video decode
    7.28 s, its kernels 0.706 s for one of seven clips; audio decode 66 ms; a sparse call 14.6 ms and more."""
    found, h200 = plan("h200"), ceilings()
    text, _ = found.before()
    video, audio = found.after(resident=True)
    for stage, seconds in ((found.model.forward(), 6.2114), (text, 0.061), (video, 7 * 0.706), (audio, 0.066)):
        assert 0.02 < floor(stage, h200).share(seconds) < 1, stage.name


def test_modulation_is_bound_by_its_weights() -> None:
    """The 50 modulation layers took 6.5 ms: 26 GB at 4.27 TB/s are 6.1 ms."""
    found = floor(part(plan("h200").model.forward(), "adaln_proj"), ceilings())
    assert found.bound == "memory"
    assert found.seconds * 1e3 == pytest.approx(6.1, abs=0.05)


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize("name", ["h100x4", "a100x4"])
def test_four_gpus_share_one_gpus_work(name: str) -> None:
    four, one = plan(name).model, Model(PUBLISHED.dit, plan(name).document, Machine())
    for stages in zip(
        (four.forward(), four.forward(0.2, 48), four.reused("firstblockcache")),
        (one.forward(), one.forward(0.2, 48), one.reused("firstblockcache")),
        strict=True,
    ):
        replicated = [part(stage, "adaln_proj", "time embedder", "final adaln_proj").flops for stage in stages]
        assert replicated[0] == replicated[1]
        assert 4 * (stages[0].flops - replicated[0]) == pytest.approx(stages[1].flops - replicated[1])


def test_a_reused_forward_has_no_block_or_the_first() -> None:
    model = plan("h200").model
    whole, tea, first = model.forward(), model.reused("teacache"), model.reused("firstblockcache")
    assert not {"attention", *PRODUCTS} & {operation.name for operation in tea.operations}
    assert part(first, "attention", *PRODUCTS).flops * 50 == part(whole, "attention", *PRODUCTS).flops


def test_a_cache_costs_bytes_and_no_product() -> None:
    model = plan("h200").model
    for cache in ("teacache", "firstblockcache"):
        assert model.forward(cache=cache).flops == model.forward().flops
        assert model.forward(cache=cache).bytes > model.forward().bytes


def test_totals_of_the_published_counts() -> None:
    """RTX 4090: 14 of 49, at most nine of them sparse. Four GPUs: 16 of 49, at most fifteen."""
    for name, kinds in (("rtx4090", {(10, 4, 35), (5, 9, 35)}), ("h100x4", {(10, 6, 33), (1, 15, 33)})):
        rows = [row for row in totals(plan(name)) if "fullopt" in row.arms]
        assert {(row.dense, row.sparse, row.reused) for row in rows} == kinds
    (dense,) = [row for row in totals(plan("h200")) if "dense" in row.arms]
    one = plan("h200")
    refiner = one.before()[1]
    assert dense.denoise_flops == pytest.approx(49 * one.model.forward().flops + refiner.flops)
    assert dense.denoise_seconds == pytest.approx(
        49 * floor(one.model.forward(), ceilings()).seconds + floor(refiner, ceilings()).seconds
    )


def test_a_replayed_list_is_counted_as_it_is() -> None:
    listed = "cache.replay=[0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45]"
    (row,) = [row for row in totals(plan("h200", listed)) if "fullopt" in row.arms]
    assert (row.dense, row.sparse, row.reused, row.note) == (4, 12, 33, "")


def test_published_figures_stand_for_their_own_policy_only() -> None:
    assert plan("h200").density is not None and "h100x4-density" in plan("h200").density.source
    assert plan("cpu").density is None and plan("cpu").computed is None
    assert plan("h200", "sol_attn.tau=0.5").density is None
    assert [row.arms for row in totals(plan("cpu"))] == [("dense", "lossless")]
    assert len(totals(plan("cpu", density=0.4, computed=9))) == 5


@pytest.mark.parametrize(
    ("overrides", "figures", "message"),
    [
        (("request.prompt=mechanics",), {}, "not known without its tokenizer"),
        ((), {"density": 1.5}, "--density 1.5"),
        ((), {"density": math.nan}, "--density nan"),
        ((), {"computed": 0}, "--computed 0 of 49"),
        ((), {"computed": 50}, "--computed 50 of 49"),
    ],
)
def test_figures_that_cannot_be_are_refused(
    overrides: tuple[str, ...], figures: dict[str, float], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan("h200", *overrides, **figures)  # type: ignore[arg-type]


def test_no_ceiling_no_floor() -> None:
    assert plan("cpu").ceilings is None
    assert all(row.denoise_seconds is None and row.denoise_flops > 0 for row in totals(plan("cpu")))


def test_exchange_without_a_link_is_an_error() -> None:
    stage = Stage("two", (), Traffic(exchanged=1.0), gpus=2)
    with pytest.raises(ValueError, match="no ceiling of their link"):
        floor(stage, ceilings("NVIDIA GeForce RTX 4090"))


OPERATIONS = st.builds(
    Operation,
    name=st.just("x"),
    kind=st.sampled_from(["attention", "linear", "rest"]),
    flops=st.floats(0, 1e15),
    bytes=st.floats(1, 1e12),
    precision=st.sampled_from(["half", "tf32", "fp32"]),
    count=st.integers(1, 100),
)
STAGES = st.builds(
    Stage,
    name=st.just("stage"),
    operations=st.lists(OPERATIONS, max_size=6).map(tuple),
    traffic=st.builds(Traffic, st.floats(0, 1e12), st.floats(0, 1e12), st.floats(0, 1e12)),
)
GPUS = st.sampled_from([name for name in known_gpus() if ceilings(name).gb_s.link])


@given(STAGES, GPUS)
def test_a_floor_bounds_every_resource(stage: Stage, gpu: str) -> None:
    limits = ceilings(gpu)
    assert limits.gb_s.link is not None
    found = floor(stage, limits)
    best = max(limits.tflops.half.value, limits.tflops.tf32.value, limits.tflops.fp32.value)
    link = stage.traffic.exchanged + stage.traffic.gathered
    for need, rate in (
        (stage.flops, 1e12 * best),
        (stage.bytes, 1e9 * limits.gb_s.memory.value),
        (stage.traffic.host, 1e9 * limits.gb_s.host.value),
        (link, 1e9 * limits.gb_s.link.value),
    ):
        assert found.seconds >= need / rate * (1 - 1e-9)
    if found.reachable is not None:
        assert found.reachable >= found.seconds * (1 - 1e-9)


@given(STAGES, OPERATIONS, GPUS)
def test_more_work_never_lowers_a_floor(stage: Stage, more: Operation, gpu: str) -> None:
    longer = replace(stage, operations=(*stage.operations, more))
    assert floor(longer, ceilings(gpu)).seconds >= floor(stage, ceilings(gpu)).seconds * (1 - 1e-12)


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_denser_forward_is_never_cheaper(left: float, right: float) -> None:
    model = plan("h200").model
    low, high = (model.forward(density, 48) for density in sorted((left, right)))
    assert low.flops <= high.flops
    assert floor(low, ceilings()).seconds <= floor(high, ceilings()).seconds


def test_one_product_by_hand() -> None:
    """773e12 FLOPs at 773 TFLOP/s are a second; 4,270 GB at 4,270 GB/s another."""
    both = Stage("both", (Operation("x", "linear", 773e12, 1), Operation("y", "rest", 0, 4270e9)))
    assert floor(both, ceilings()).seconds == pytest.approx(2)
    assert floor(Stage("host", both.operations, Traffic(host=3 * 55.3e9)), ceilings()).seconds == pytest.approx(3)
    assert floor(Stage("link", both.operations, Traffic(exchanged=321e9)), ceilings()).seconds == pytest.approx(3)
    assert floor(Stage("ahead", both.operations, Traffic(gathered=321e9)), ceilings()).seconds == pytest.approx(2)
    layer = linear("x", 3, (5, 7), bias=True)
    assert (layer.flops, layer.bytes) == (2 * 3 * 5 * 7, 2 * (3 * 5 + 5 * 7 + 7 + 3 * 7))
    assert elementwise("x", 10).bytes == 20


def test_stages_beside_the_dit_scale_with_the_gpus() -> None:
    alone, four = Machine(), Machine(gpus=4)
    text = [text_encoding(PUBLISHED.text, 537, machine) for machine in (alone, four)]
    assert text[0].flops == pytest.approx(4 * text[1].flops)
    assert text[0].traffic.exchanged == 0
    # an all-reduce of n values receives 2 (p - 1) / p of them on each of p GPUs: two a layer
    assert text[1].traffic.exchanged == pytest.approx(2 * 0.75 * 100 * 537 * 5120 * 2)
    video = [video_decode(PUBLISHED.video, 124, 1344, 768, machine) for machine in (alone, four)]
    assert video[0].flops == pytest.approx(4 * video[1].flops)  # 28 tiles, seven each
    small = [video_decode(TINY.video, 39, 448, 256, machine).flops for machine in (alone, Machine(gpus=3))]
    assert small[0] == small[1]  # two tiles for three GPUs: each decodes both
    assert audio_decode(PUBLISHED.audio, 207).gpus == 1


def test_document_of_another_size() -> None:
    """Two seconds at 448 x 256: 48 frames snap to 56, 17 latents of 8 x 14 rows, 93 audio latents a channel."""
    target = resolve("cpu", ("request.frames=56", "request.duration_seconds=2.0")).resolved
    document = Document.of(target.request, TINY, 100, "none")
    assert (document.video, document.audio, document.live) == (17 * 8 * 14, 2 * 93, 100 + 186 + 1904)
    assert document.total % 64 == 0 and document.dense_rows == 0
