"""Routing and densities: literal cases, the moments against a direct mean and deviation, and a known density."""

from __future__ import annotations

import pytest
import torch

from engine.attention.call import SolAttentionOptions
from engine.attention.density import exact_density, published_density
from engine.attention.routing import block_lengths, route, route_counts, sink_block_range, summarise, thresholds

LOG2_E = 1.4426950408889634


@pytest.mark.parametrize(
    ("tokens", "sink", "blocks"),
    [
        (38247, (0, 951), (0, 15)),  # the published prefix
        (38247, (0, 537), (0, 9)),  # the published text
        (38247, (951, 38247), (14, 598)),
        (200, (0, 0), (4, 4)),
        (200, (63, 65), (0, 2)),
        (200, (64, 128), (1, 2)),
        (200, (199, 200), (3, 4)),
        (1, (0, 1), (0, 1)),
    ],
)
def test_a_sink_is_rounded_outwards_to_blocks(tokens, sink, blocks):
    assert sink_block_range(tokens, sink) == blocks


@pytest.mark.parametrize(
    ("tokens", "lengths"), [(1, [1]), (64, [64]), (65, [64, 1]), (130, [64, 64, 2])], ids=lambda x: str(x)[:8]
)
def test_block_lengths(tokens, lengths):
    assert block_lengths(tokens).tolist() == lengths


def test_summaries_divide_by_the_true_length_and_are_stored_in_bf16():
    x = torch.ones(66, 1, 2)
    x[64:] = 3.0
    x[0] = 1000.0
    summaries = summarise(x, x, x)
    assert summaries.q_mean.dtype == torch.float32
    assert summaries.q_mean[:, 0, 0].tolist() == [1063 / 64, 3.0]
    assert summaries.k_mean[:, 0, 0].tolist() == [16.625, 3.0]  # 1063 / 64 = 16.609 to 8 bits
    assert summaries.v_sum[:, 0, 0].tolist() == [1064.0, 6.0]


def test_thresholds_are_mean_and_deviation_of_the_scores():
    """``exact``: the deviation of the scores, as far as BF16 moments go. ``diag``: that of independent channels."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(400, 2, 128, generator=generator) for _ in range(2))
    k = k.bfloat16()
    scores = torch.einsum("ihd,jhd->ihj", q, k.float()).double() * 0.5 * LOG2_E
    direct = scores.mean(-1) + 0.7 * scores.std(-1, correction=0)
    found = thresholds(q, k, 0.5, 0.7, "exact")
    assert ((found - direct).abs() / scores.std(-1)).max() < 0.05
    channels = (q.double() ** 2 * k.double().var(0, correction=0)).sum(-1).sqrt() * 0.5 * LOG2_E
    torch.testing.assert_close(
        thresholds(q, k, 0.5, 0.7, "diag").double(), scores.mean(-1) + 0.7 * channels, rtol=1e-4, atol=1e-4
    )


def test_exact_threshold_has_the_published_bf16_stores():
    """Keys with a large common part: the second moment nearly cancels, and what is stored in BF16 decides."""
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(40, 1, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    k = (k + 3.0).bfloat16()

    def bf16(x):
        return x.bfloat16().double()

    def threshold(centroid, store):
        keys, mean = k[:, 0].double(), k[:, 0].double().mean(0)
        moments = store(store(sum(torch.outer(key, key) for key in keys)) / 40)
        variance = max((centroid @ moments @ centroid - (centroid @ mean) ** 2).item(), 0.0) * LOG2_E**2
        return LOG2_E * (centroid @ mean).item() + (variance + 1e-6) ** 0.5

    found = thresholds(q, k, 1.0, 1.0, "exact")[:, 0].tolist()
    assert found == pytest.approx([threshold(bf16(row), bf16) for row in q[:, 0]], rel=1e-9)
    for centroids, store in ((q[:, 0], bf16), (bf16(q[:, 0]), lambda x: x)):  # either store left out shows
        assert found != pytest.approx([threshold(row, store) for row in centroids], rel=1e-4)


def test_the_comparison_is_strict_and_neighbours_are_forced():
    """All scores equal their threshold at tau 0: only the band is exact."""
    q = torch.zeros(1, 64 * 5, 1, 8)
    options = SolAttentionOptions(scale=1.0, tau=0.0)
    band = [[abs(i - j) <= 1 for j in range(5)] for i in range(5)]
    routed = route(q, torch.ones_like(q), options)
    assert routed.exact[:, :, 0].tolist() == band and not routed.above.any()


def test_exact_density_counts_triples():
    assert exact_density(torch.tensor([[1, 3], [2, 2], [3, 1]], dtype=torch.int32)) == 12 / 18
    assert exact_density(torch.ones(1, 4, dtype=torch.int32)) == 1.0


def test_effective_density_equals_the_counts_and_leads_the_threshold_density():
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, 1000, 3, 32, generator=generator).bfloat16() for _ in range(2))
    options = SolAttentionOptions(scale=32**-0.5, sink=(0, 100), dense_rows=(0, 100))
    published = published_density(q, k, options)
    counts = route_counts(q, k, options)
    assert published.heads == 3 and published.threshold < published.effective
    assert published.effective == pytest.approx(exact_density(counts), abs=1e-12)
    one = published_density(q, k, options, heads=1)
    assert one.heads == 1 and one.effective == pytest.approx(exact_density(counts[:, :1]), abs=1e-12)


@pytest.mark.parametrize(("sink", "effective"), [((0, 0), 0.163), ((0, 951), 0.184)])
def test_random_data_of_the_published_length_has_the_density_of_one_deviation(sink, effective):
    """15.87 % of a normal distribution lies above one deviation.

    The effective figures were measured on a GPU with a Triton port of the published kernel, on random data like this.
    """
    generator = torch.Generator().manual_seed(7)
    q, k = (torch.randn(1, 38247, 1, 128, generator=generator).bfloat16() for _ in range(2))
    density = published_density(q, k, SolAttentionOptions(scale=128**-0.5, sink=sink))
    assert density.threshold == pytest.approx(0.1587, abs=0.004)
    assert density.effective == pytest.approx(effective, abs=0.004)
