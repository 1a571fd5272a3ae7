"""The native attention kernels on a GPU, against the float64 reference. Skipped, with the reason, without one."""

from __future__ import annotations

import pytest
import torch

from engine.attention import kernels, reference, sol_attention_packed
from engine.attention.bench import correlated_data, exact_rows, random_data
from engine.attention.call import SolAttentionOptions
from engine.attention.kernels import Plan
from engine.attention.kernels.summaries import summarise
from engine.attention.routing import num_blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
SCALE = 128**-0.5
REL_L2 = 3e-3
POINTER = kernels.POINTER_OTHER
# name -> (sink, dense_rows) of a document of T tokens
RANGES = {
    "none": lambda t: ((0, 0), (0, 0)),
    "prefix": lambda t: ((0, t // 10 + 1), (0, t // 10 + 1)),
    "middle": lambda t: ((t // 2, t // 2 + t // 9), (t // 3, t // 2 + 1)),
    "suffix": lambda t: ((t - t // 8 - 1, t), (t - t // 20 - 1, t)),
    "all": lambda t: ((0, t), (0, t)),
}


@pytest.fixture(params=["capability", "pointer"])
def plan(request: pytest.FixtureRequest) -> Plan | None:
    """The plan that the device's capability gets, and the pointer kernel, which any device can run."""
    return POINTER if request.param == "pointer" else None


def relative_l2(x: torch.Tensor, reference: torch.Tensor) -> float:
    return float((x.double() - reference.double()).norm() / reference.double().norm())


def check(q, k, v, options, plan, limit=REL_L2):
    out = torch.full((1, *q.shape[1:]), float("nan"), dtype=q.dtype, device=q.device)
    got = kernels.attend(q, k, v, options, out, plan=plan)
    want = reference.attend(q, k, v, options, precision="float64")
    assert (got.route_counts != want.route_counts).float().mean() < 1e-3
    assert relative_l2(got.out, want.out) < limit
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["diag", "exact"])
@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("heads", [1, 3, 14])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000, 4095])
def test_agrees_with_float64(tokens, heads, ranges, kind, plan):
    sink, rows = RANGES[ranges](tokens)
    check(*random_data(tokens, heads), SolAttentionOptions(SCALE, 1.0, kind, sink, rows, True), plan)


def test_correlated_data(plan):
    check(*correlated_data(4095, 3), SolAttentionOptions(SCALE, 1.0, sink=(0, 951), return_lse=True), plan)


@pytest.mark.parametrize("magnitude", [1e-4, 30.0, 1e4])
def test_magnitudes(magnitude, plan):
    """At 30 and 1e4 rows leave the range of the SM90 kernel's fixed references, and are repaired."""
    q, k, v = (x * magnitude for x in random_data(999, 2))
    sink, rows = RANGES["prefix"](999)
    check(q, k, v, SolAttentionOptions(SCALE, 1.0, "diag", sink, rows, True), plan)


@pytest.mark.parametrize("kind", ["diag", "exact"])
def test_keys_without_variance(kind, plan):
    q, k, v = random_data(999, 2)
    k[:] = k[:, :1].clone()
    options = SolAttentionOptions(SCALE, 1.0, kind, return_lse=True)
    got = kernels.attend(q, k, v, options, plan=plan)
    # Which blocks are exact is decided by rounding alone, and changes nothing: all keys have one score.
    want = v.double().mean(1, keepdim=True).expand(-1, 999, -1, -1)
    assert relative_l2(got.out, want) < 1e-2  # of a mean of 999: the value sums' bfloat16 shows


def test_padding_is_never_read(plan):
    rows, live = 1024, 999
    fused = torch.full((rows, 3, 3, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    fused[:live] = torch.randn(live, 3, 3, 128, device="cuda").bfloat16()
    result = sol_attention_packed(*fused.unbind(1), live, backend="native", sink=(0, 100), dense_rows=(0, 100))
    assert result.out[live:].eq(0).all() and result.out.isfinite().all()
    assert result.route_counts.shape == (num_blocks(live), 3)


# Shape and strides of a storage, of which a view is q, k or v: what the memory accelerator cannot read in place.
UNALIGNED = {
    "addresses two bytes off": lambda x: x.new_zeros(500, 2, 132)[:, :, 1:129],
    "a token stride of 257 elements": lambda x: x.new_zeros(500, 257)[:, :256].unflatten(1, (2, 128)),
    "a head stride of 129 elements": lambda x: x.new_zeros(500, 264)[:, :258].unflatten(1, (2, 129))[..., :128],
    "heads before tokens, two bytes off": lambda x: x.new_zeros(2, 500, 136)[..., 3:131].transpose(0, 1),
}


def strided(kind, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(500, 2, 128, device="cuda", generator=generator).bfloat16()
    view = UNALIGNED[kind](x)
    view.copy_(x)
    return view[None]


@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("kind", UNALIGNED)
def test_strides_that_the_memory_accelerator_cannot_take(kind, which, plan):
    """Copied once for the SM90 kernel, in place for the pointer kernel; the record's name of the backend says which."""
    q, k, v = random_data(500, 2)
    q, k, v = (strided(kind, i) if name in which else x for i, (name, x) in enumerate({"q": q, "k": k, "v": v}.items()))
    options = SolAttentionOptions(SCALE, 1.0, "diag", (0, 100), (64, 200), True)
    check(q, k, v, options, plan)
    result = kernels.attend(q, k, v, options, plan=plan)
    packed = kernels.attend(*(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)), options, plan=plan)
    assert torch.equal(result.out, packed.out)
    if plan is None and CAPABILITY == (9, 0):
        assert (result.backend, packed.backend) == ("native/sm90-copied", "native/sm90")
    else:
        assert result.backend == packed.backend and result.backend.startswith("native/pointer")


@pytest.mark.parametrize("kind", UNALIGNED)
def test_any_strides_of_the_output(kind, plan):
    q, k, v = random_data(500, 2)
    out = UNALIGNED[kind](k)[None]
    result = kernels.attend(q, k, v, SolAttentionOptions(SCALE), out, plan=plan)
    assert result.out is out and "copied" not in result.backend
    assert torch.equal(out, kernels.attend(q, k, v, SolAttentionOptions(SCALE), plan=plan).out)


def test_output_with_strides(plan):
    q, k, v = random_data(500, 3)
    wide = torch.zeros(1, 500, 2, 3, 128, dtype=torch.bfloat16, device="cuda")
    options = SolAttentionOptions(SCALE)
    kernels.attend(q, k, v, options, wide[:, :, 1], plan=plan)
    assert torch.equal(wide[:, :, 1], kernels.attend(q, k, v, options, plan=plan).out) and not wide[:, :, 0].any()


def test_everything_routed_is_dense_attention(plan):
    q, k, v = random_data(4095, 3)
    out = kernels.attend(q, k, v, SolAttentionOptions(SCALE, -1000.0), plan=plan).out
    rows = torch.arange(0, 4095, 7, device="cuda")
    assert relative_l2(out[0, rows], exact_rows(q, k, v, rows, SCALE)) < REL_L2


def test_runs_are_bitwise_equal(plan):
    q, k, v = random_data(8000, 14)
    options = SolAttentionOptions(SCALE, 1.0, "diag", (0, 951), (0, 951), True)
    runs = [kernels.attend(q, k, v, options, plan=plan) for _ in range(5)]
    for run in runs[1:]:
        assert torch.equal(run.out, runs[0].out) and torch.equal(run.lse, runs[0].lse)
        assert torch.equal(run.route_counts, runs[0].route_counts)


def test_second_moments_are_the_same_every_time():
    """They were not: asynchronous copies reached the tensor cores without a fence (see summaries.UNPIPELINED)."""
    q, k, v = random_data(4095, 14)
    means = summarise(q, k, v, "exact").k_mean.double().transpose(0, 1)  # [H, N, D]
    want = ((means.mT @ means).bfloat16().double() / 64).bfloat16()
    runs = [summarise(q, k, v, "exact").spread for _ in range(20)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert (runs[0] != want).float().mean() < 1e-3


@pytest.mark.parametrize("tokens", [38247, 103237])
def test_long_documents(tokens, plan):
    """At 103,237 tokens the elements of one fused tensor are more than 32 bits can count: 2.2e9."""
    q, k, v = random_data(tokens, 56)
    options = SolAttentionOptions(SCALE, 1.0, "diag", (0, 951), (tokens - 700, tokens))
    got = kernels.attend(q, k, v, options, plan=plan)
    assert got.out.isfinite().all()
    rows = torch.arange(tokens - 700, tokens, 50, device="cuda")
    assert relative_l2(got.out[0, rows], exact_rows(q, k, v, rows, SCALE)) < REL_L2
    # Three heads through the reference's own arithmetic, from other memory.
    heads = slice(53, 56) if tokens < 50_000 else slice(55, 56)
    few = [x[:, :, heads].contiguous() for x in (q, k, v)]
    want = reference.attend(*few, options)
    assert (got.route_counts[:, heads] != want.route_counts).float().mean() < 1e-2
    assert relative_l2(got.out[:, :, heads], want.out) < 5e-3  # both round the probabilities to bfloat16
