"""The Real-QKV gate: what passes, what fails, the second judgement of rows, and a slice that can be recomputed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from config.errors import Exit, GateFailed
from config.record import GateLimits, GateReport
from engine import gate
from engine.attention import sol_attention
from engine.attention.call import SolAttentionOptions
from engine.gate import require_green, run_gate, sdpa, slice_blocks, softmax_attention_fp32

TOKENS, HEADS, DIM = 999, 3, 128
LIMITS = GateLimits(max_abs=0.15, mean_abs=0.002, rel_l2=0.005)  # the published ones
GATE_TAU = -1000.0
OPTIONS = SolAttentionOptions(scale=DIM**-0.5, sink=(0, 150), dense_rows=(0, 150))
good = partial(sol_attention, backend="reference")


@pytest.fixture(scope="module")
def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, TOKENS, HEADS, DIM, generator=generator).bfloat16() for _ in range(3)]


def run(qkv, attend=good, **changes):
    settings = {"options": OPTIONS, "limits": LIMITS, "head": 1, **changes}
    where = {"rank": 0, "sample": 0, "step": 10, "layer": 2}
    return run_gate(*qkv, attend=attend, gate_tau=GATE_TAU, **where, **settings)


def damaged(change, *, sparse=False):
    """The reference with ``change`` applied to the output of its everything-routed call, or of its sparse call."""

    def attend(q, k, v, **options):
        result = good(q, k, v, **options)
        if (options["tau"] != GATE_TAU) == sparse:
            change(result.out)
        return result

    return attend


def float64_attention(q, k, v, scale):
    q, k, v = (x[0].double().transpose(0, 1) for x in (q, k, v))
    return (torch.softmax(q @ k.mT * scale, -1) @ v).transpose(0, 1)[None]


def test_a_good_kernel_passes_with_all_heads_judged(qkv):
    report, _ = run(qkv)
    assert report.passed and report.finite and (report.rejudged_rows, report.rejudged_failed) == (0, 0)
    assert report.shape == (1, TOKENS, HEADS, DIM) and report.backend == "reference"
    assert (report.gate_tau, report.tau, report.sink, report.dense_rows) == (GATE_TAU, 1.0, (0, 150), (0, 150))
    assert report.real_tau.rel_l2 > 0.1  # random data has nothing to approximate: reported, and not gating
    require_green(report)
    assert GateReport.model_validate_json(report.model_dump_json()) == report


def test_statistics_are_those_of_the_whole_tensors(qkv):
    """Head by head or at once: against statistics over [T, H, D], computed here in another way."""
    report, _ = run(qkv)
    out = good(*qkv, scale=OPTIONS.scale, tau=GATE_TAU).out.double()
    heads_first = [x.transpose(1, 2) for x in qkv]
    dense = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2).double()
    precise = float64_attention(*qkv, OPTIONS.scale)
    for stats, reference, rel in ((report.against_sdpa, dense, 1e-9), (report.against_fp32, precise, 1e-3)):
        d = out - reference
        assert stats.max_abs == pytest.approx(d.abs().max().item(), rel=rel)
        assert stats.mean_abs == pytest.approx(d.abs().mean().item(), rel=rel)
        assert stats.rel_l2 == pytest.approx((d.norm() / reference.norm()).item(), rel=rel)


def wrong_block(out):
    out[0, 320:384, 2] = 0


def wrong_scale(q, k, v, *, scale, **options):
    return good(q, k, v, scale=scale * 1.05, **options)


def ignores_tau(q, k, v, *, tau, **options):
    return good(q, k, v, tau=1.0, **options)


def only_the_dense_rows_are_right(q, k, v, *, dense_rows=(0, 0), **options):
    result = good(q, k, v, dense_rows=dense_rows, **options)
    result.out[:, dense_rows[1] :] *= 0.5
    return result


@pytest.mark.parametrize(
    "attend", [damaged(wrong_block), wrong_scale, ignores_tau, only_the_dense_rows_are_right], ids=lambda f: f.__name__
)
def test_a_wrong_kernel_fails(qkv, attend):
    options = SolAttentionOptions(scale=DIM**-0.5, dense_rows=(0, TOKENS))
    report, _ = run(qkv, attend, options=options)
    assert report.finite and not report.passed
    assert report.against_sdpa.rel_l2 > LIMITS.rel_l2
    with pytest.raises(GateFailed, match=r"red for reference on rank 0: max_abs .* \(limit 0.15\)") as caught:
        require_green(report)
    assert caught.value.exit_code == Exit.GATE == 12


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("sparse", [False, True], ids=["everything-routed", "real-tau"])
def test_one_value_that_is_not_finite_fails(qkv, value, sparse):
    def poison(out):
        out[0, 700, 0, 5] = value

    report, _ = run(qkv, damaged(poison, sparse=sparse))
    assert not report.finite and not report.passed
    # the rest is still measured, so that the record can be written: JSON has no NaN
    assert GateReport.model_validate_json(report.model_dump_json()) == report
    assert report.against_sdpa.rel_l2 <= LIMITS.rel_l2
    with pytest.raises(GateFailed, match="NaN or Inf"):
        require_green(report)


def test_inputs_that_are_not_finite_fail(qkv):
    q, k, v = (x.clone() for x in qkv)
    v[0, 3, 0, 0] = torch.nan
    report, _ = run((q, k, v))
    assert not report.passed and not report.finite


class TestSecondJudgement:
    """One row beyond max_abs whose mean and L2 are within: only float32 can tell whose fault it is."""

    limits = GateLimits(max_abs=0.01, mean_abs=0.002, rel_l2=0.005)

    def spoil(self, out):
        out[500, 7] += 0.05

    def test_a_row_that_is_the_reference_own_error_passes(self, qkv, monkeypatch):
        def spoiled_sdpa(q, k, v, scale):
            out = sdpa(q, k, v, scale)
            self.spoil(out)
            return out

        monkeypatch.setattr(gate, "sdpa", spoiled_sdpa)
        report, _ = run(qkv, limits=self.limits)
        assert report.against_sdpa.max_abs > self.limits.max_abs >= report.against_fp32.max_abs
        assert (report.rejudged_rows, report.rejudged_failed) == (HEADS, 0)
        assert report.sdpa_against_fp32.max_abs > self.limits.max_abs
        assert report.passed

    def test_a_row_that_is_the_kernel_own_error_fails(self, qkv):
        report, _ = run(qkv, damaged(lambda out: self.spoil(out[0, :, 2])), limits=self.limits)
        assert report.against_sdpa.mean_abs <= self.limits.mean_abs
        assert report.against_sdpa.rel_l2 <= self.limits.rel_l2
        assert (report.rejudged_rows, report.rejudged_failed) == (1, 1)
        assert not report.passed
        with pytest.raises(GateFailed, match="1 of 1 rows beyond max_abs fail against FP32 too"):
            require_green(report)

    @pytest.mark.parametrize("beyond", ["mean_abs", "rel_l2"])
    def test_it_pardons_no_other_statistic(self, qkv, beyond):
        limits = LIMITS.model_copy(update={beyond: 1e-9})
        report, _ = run(qkv, limits=limits)
        assert report.rejudged_rows == 0 and getattr(report.against_sdpa, beyond) > 1e-9 and not report.passed


def test_the_slice_is_enough_to_recompute_its_rows(qkv):
    report, tensors = run(qkv, head=2)
    assert report.slice.head == 2 and report.slice.blocks == (0, 2, 7, 15)
    rows = tensors["rows"]
    assert rows.dtype == torch.int64
    assert rows.tolist() == [*range(64), *range(128, 192), *range(448, 512), *range(960, 999)]
    assert tensors["k"].shape == tensors["v"].shape == (TOKENS, DIM)
    for name in ("q", "all_exact", "sdpa", "real_tau"):
        assert tensors[name].shape == (len(rows), DIM) and tensors[name].dtype == torch.bfloat16, name
    assert all(x.is_contiguous() and x.device.type == "cpu" for x in tensors.values())
    assert torch.equal(tensors["q"], qkv[0][0, rows, 2])

    scores = tensors["q"].double() @ tensors["k"].double().T * report.scale
    dense = torch.softmax(scores, -1) @ tensors["v"].double()
    for name in ("all_exact", "sdpa"):
        assert (tensors[name].double() - dense).norm() / dense.norm() < 4e-3, name
    real = good(*qkv, scale=OPTIONS.scale, sink=OPTIONS.sink, dense_rows=OPTIONS.dense_rows)
    assert torch.equal(tensors["real_tau"], real.out[0, rows, 2])
    assert torch.equal(tensors["route_counts"], real.route_counts) and real.route_counts.shape == (16, HEADS)


@pytest.mark.parametrize("tokens", [1, 63, 65])
def test_short_documents(tokens):
    generator = torch.Generator().manual_seed(tokens)
    qkv = [torch.randn(1, tokens, 1, DIM, generator=generator).bfloat16() for _ in range(3)]
    report, tensors = run(qkv, options=SolAttentionOptions(scale=DIM**-0.5), head=0)
    assert report.passed and tensors["rows"].tolist() == list(range(tokens))


def test_a_strided_view_is_gated_like_its_copy(qkv):
    fused = torch.cat([x[0].flatten(1) for x in qkv], dim=-1)
    views = [x.unflatten(-1, (HEADS, DIM))[None] for x in fused.split(HEADS * DIM, dim=-1)]
    assert run(views)[0] == run(qkv)[0]


@given(st.integers(1, 5000), st.data())
def test_slice_blocks_hold_the_ends_and_both_sides_of_every_edge(tokens, data):
    stop = data.draw(st.integers(1, tokens))
    blocks = slice_blocks(tokens, SolAttentionOptions(scale=1.0, sink=(0, stop)))
    last = (tokens - 1) // 64
    assert list(blocks) == sorted(set(blocks)) and 0 in blocks and last in blocks and len(blocks) <= 5
    assert (stop - 1) // 64 in blocks and min(stop // 64, last) in blocks


def test_float32_softmax_splits_rows_without_changing_them(qkv, monkeypatch):
    per_head = [x[0, :, 0] for x in qkv]
    whole = softmax_attention_fp32(*per_head, 0.1)
    monkeypatch.setattr(gate, "SCORE_ELEMENTS", 100 * TOKENS)
    torch.testing.assert_close(softmax_attention_fp32(*per_head, 0.1), whole, rtol=1e-5, atol=1e-6)
