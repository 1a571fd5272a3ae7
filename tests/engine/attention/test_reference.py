"""The PyTorch Sol-Attn against a float64 brute force that shares no code with it.

The brute force is literal: it gives every token of an approximated block the mean key's score and the mean value, and
loops over heads, query blocks and key blocks. Two comparisons isolate the roundings. ``float64`` precision must agree
to 1e-12: same stored BF16 summaries, no other rounding. ``kernel`` precision must agree to 4e-3 in relative L2: BF16
probabilities and a BF16 output each round by at most 2^-9, about 1.1e-3 root mean square; 2.2e-3 is what is measured.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.attention import sol_attention, sol_attention_packed
from engine.attention.call import SolAttentionOptions
from engine.attention.reference import attend
from engine.attention.routing import route

KERNEL_REL_L2 = 4e-3
LENGTHS = (1, 63, 64, 65, 127, 999)

# name -> (sink, dense_rows) of a document of T tokens
RANGES = {
    "none": lambda t: ((0, 0), (0, 0)),
    "prefix": lambda t: ((0, t // 10 + 1), (0, t // 10 + 1)),
    "middle": lambda t: ((t // 2, t // 2 + t // 9), (t // 3, t // 2 + 1)),
    "suffix": lambda t: ((t - t // 8 - 1, t), (t - t // 20 - 1, t)),
    "all": lambda t: ((0, t), (0, t)),
    "dense-only": lambda t: ((0, 0), (t // 4, t // 4 + 5 if t > 20 else t)),
}


def bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x)).to(torch.bfloat16).double().numpy()


def blocks_of(x: np.ndarray) -> list[np.ndarray]:
    return [x[i : i + 64] for i in range(0, len(x), 64)]


def brute_route(q, k, scale, tau, kind, sink):
    """[N, N] exact mask of one head, and the distance of each score from its threshold in standard deviations."""
    c = scale / math.log(2)
    key_means = np.stack([bf16(b.mean(0)) for b in blocks_of(k)])
    n = len(key_means)
    mask, margin = np.zeros((n, n), bool), np.zeros((n, n))
    for i, block in enumerate(blocks_of(q)):
        centroid = block.mean(0)
        if kind == "diag":
            mean = sum(centroid @ m for m in key_means) / n
            var = sum(centroid[d] ** 2 * key_means[:, d].var() for d in range(q.shape[1]))
        else:
            centroid = bf16(centroid)
            moments = bf16(bf16(sum(np.outer(m, m) for m in key_means)) / n)
            mean = sum(centroid @ m for m in key_means) / n
            var = max(centroid @ moments @ centroid - mean**2, 0.0)
        std = math.sqrt(c * c * var + 1e-6)
        for j in range(n):
            score = c * np.mean([row @ key_means[j] for row in block])
            in_sink = sink[1] > sink[0] and j * 64 < sink[1] and (j + 1) * 64 > sink[0]
            mask[i, j] = score > c * mean + tau * std or abs(i - j) <= 1 or in_sink
            margin[i, j] = abs(score - c * mean - tau * std) / std
    return mask, margin


def brute_attention(q, k, v, mask, scale, dense_rows):
    """One head, given its route: outputs [T, D] and natural-log LSE [T]."""
    out, lse = np.zeros_like(v), np.zeros(len(q))
    key_means = [bf16(b.mean(0)) for b in blocks_of(k)]
    value_sums = [bf16(b.sum(0)) for b in blocks_of(v)]
    for t in range(len(q)):
        scores, values = [], []
        for j, (b_k, b_v) in enumerate(zip(blocks_of(k), blocks_of(v), strict=True)):
            if mask[t // 64, j] or dense_rows[0] <= t < dense_rows[1]:
                scores.append(b_k @ q[t])
                values.append(b_v)
            else:
                scores.append(np.full(len(b_k), key_means[j] @ q[t]))
                values.append(np.tile(value_sums[j] / len(b_v), (len(b_v), 1)))
        s = np.concatenate(scores) * scale
        p = np.exp(s - s.max())
        out[t] = p @ np.concatenate(values) / p.sum()
        lse[t] = s.max() + math.log(p.sum())
    return out, lse


def document(tokens, heads, dim=128, seed=0, magnitude=1.0):
    """Q, K, V [1, T, H, D] BF16 whose blocks differ, so that routing has something to find."""
    generator = torch.Generator().manual_seed(seed * 1000 + tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    offsets = normal(2, -(-tokens // 64), 1, heads, dim).expand(-1, -1, 64, -1, -1).flatten(1, 2)[:, None, :tokens]
    q, k, v = (normal(1, tokens, heads, dim) for _ in range(3))
    return [(x * magnitude).bfloat16() for x in (q + 0.5 * offsets[0], k + 0.5 * offsets[1], v)]


def rel_l2(a, b):
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / max(np.linalg.norm(np.asarray(b)), 1e-300))


def check_against_brute_force(q, k, v, options):
    doubles = [x[0].double() for x in (q, k, v)]
    exact = attend(*(x[None] for x in doubles), options, precision="float64")
    kernel = attend(q, k, v, options)
    routes = {
        "float64": route(q.double(), k.double(), options, torch.float64).exact,
        "kernel": route(q, k, options).exact,
    }
    for head in range(q.shape[2]):
        per_head = [x[:, head].numpy() for x in doubles]
        mask, margin = brute_route(*per_head[:2], options.scale, options.tau, options.thresh_type, options.sink)
        clear = margin > 1e-3  # what a last bit of a BF16 summary or of a float32 sum can move
        for name, routed in routes.items():
            assert (routed[:, :, head].numpy() == mask)[clear].all(), name
        for name, result, limit in (("float64", exact, 1e-12), ("kernel", kernel, KERNEL_REL_L2)):
            taken = routes[name][:, :, head].numpy()  # the brute force's own, but for scores on the threshold
            out, lse = brute_attention(*per_head, taken, options.scale, options.dense_rows)
            assert rel_l2(result.out[0, :, head].double(), out) < limit, name
            assert result.route_counts[:, head].tolist() == taken.sum(1).tolist()
            if options.return_lse:
                # float32 storage of numbers of this size, plus float32 scores
                np.testing.assert_allclose(result.lse[0, :, head].double(), lse, rtol=2e-6, atol=2e-5)


def options_for(tokens, ranges="none", dim=128, **changes):
    sink, dense_rows = RANGES[ranges](tokens)
    settings = {"scale": dim**-0.5, "sink": sink, "dense_rows": dense_rows, "return_lse": True, **changes}
    return SolAttentionOptions(**settings)


# the longest brute forces take a second each: with three heads they are run for two of the ranges
CASES = [
    (tokens, heads, ranges)
    for tokens in LENGTHS
    for heads in (1, 3)
    for ranges in (RANGES if tokens * heads < 2000 else ("prefix", "middle"))
]


@pytest.mark.parametrize("kind", ["diag", "exact"])
@pytest.mark.parametrize(("tokens", "heads", "ranges"), CASES)
def test_agrees_with_brute_force(tokens, heads, ranges, kind):
    check_against_brute_force(*document(tokens, heads), options_for(tokens, ranges, thresh_type=kind))


@pytest.mark.parametrize("tau", [-0.5, 0.0, 2.0])
def test_other_taus_agree_with_brute_force(tau):
    check_against_brute_force(*document(700, 1), options_for(700, "prefix", tau=tau))


def test_other_head_dimension_and_scale():
    check_against_brute_force(*document(300, 2, dim=48), options_for(300, "middle", dim=48, scale=0.3))


@pytest.mark.parametrize("kind", ["diag", "exact"])
@pytest.mark.parametrize("magnitude", [1e-4, 1e4])
def test_tiny_and_huge_magnitudes(magnitude, kind):
    """At 1e4 the softmax picks one token, at 1e-4 it averages; neither may overflow, underflow or route otherwise."""
    q, k, v = document(500, 2, magnitude=magnitude)
    check_against_brute_force(q, k, v, options_for(500, "prefix", thresh_type=kind, return_lse=False))


@pytest.mark.parametrize("kind", ["diag", "exact"])
@pytest.mark.parametrize("key", [0.0, 1.0])
def test_equal_keys_route_only_the_forced_blocks_and_average_the_values(kind, key):
    """Zero variance: the epsilon under the root keeps every threshold above the common score.

    The rows of a query block are equal here. ``exact`` takes its threshold from the centroid as stored in BF16 but its
    scores from the rows, so with other rows the rounding of the centroid, and nothing else, would decide.
    """
    q, k, v = document(999, 2)
    q = q[:, torch.arange(999) // 64 * 64]
    k = torch.full_like(k, key)
    result = sol_attention(q, k, v, thresh_type=kind)
    band = [2] + [3] * 14 + [2]
    assert result.route_counts.T.tolist() == [band, band]
    # no softmax weights to average over: what is left is the BF16 storage of the block sums and of the output
    mean = v.double().mean(1, keepdim=True).expand_as(v)
    assert (result.out.double() - mean).abs().max() < 2**-9 * v.double().abs().max()


@pytest.mark.parametrize("kind", ["diag", "exact"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_everything_routed_is_dense_attention(tokens, kind):
    q, k, v = document(tokens, 3)
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v)))
    result = sol_attention(q, k, v, tau=-1000.0, thresh_type=kind)
    blocks = -(-tokens // 64)
    assert result.route_counts.dtype == torch.int32 and (result.route_counts == blocks).all()
    assert rel_l2(result.out.double(), dense.transpose(1, 2)) < KERNEL_REL_L2


def test_dense_rows_do_not_touch_their_block_mates():
    q, k, v = document(640, 2)
    plain, cut = (sol_attention(q, k, v, tau=1.0, dense_rows=rows) for rows in ((0, 0), (70, 100)))
    outside = [*range(70), *range(100, 640)]
    assert torch.equal(plain.out[:, outside], cut.out[:, outside])
    assert not torch.equal(plain.out[:, 70:100], cut.out[:, 70:100])
    assert torch.equal(plain.route_counts, cut.route_counts)


def test_strided_views_of_a_fused_qkv_buffer():
    tokens, heads, dim = 321, 3, 128
    fused = torch.randn(tokens, 3 * heads * dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    views = [x.unflatten(-1, (heads, dim))[None] for x in fused.split(heads * dim, dim=-1)]
    assert views[0].stride() == (tokens * 3 * heads * dim, 3 * heads * dim, dim, 1) or not views[0].is_contiguous()
    strided, copied = sol_attention(*views), sol_attention(*(x.contiguous() for x in views))
    assert torch.equal(strided.out, copied.out) and torch.equal(strided.route_counts, copied.route_counts)


def test_two_calls_are_bitwise_equal():
    q, k, v = document(999, 3)
    first, second = (sol_attention(q, k, v, return_lse=True) for _ in range(2))
    assert torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)


def test_float32_inputs_keep_their_dtype():
    q, k, v = (x.float() for x in document(200, 1))
    result = sol_attention(q, k, v)
    assert result.out.dtype == torch.float32
    assert rel_l2(result.out, sol_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).out.float()) < KERNEL_REL_L2


def test_a_process_that_allows_tf32_does_not_reach_the_reference():
    q, k, v = document(200, 1)
    expected = sol_attention(q, k, v).out
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(sol_attention(q, k, v).out, expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_packed_document_ignores_padding_and_leaves_zeros():
    q, k, v = (x[0] for x in document(384, 2))
    for x in (q, k, v):
        x[333:] = torch.nan
    packed = sol_attention_packed(q, k, v, 333, sink=(0, 40), dense_rows=(0, 40), return_lse=True)
    alone = sol_attention(*(x[None, :333] for x in (q, k, v)), sink=(0, 40), dense_rows=(0, 40), return_lse=True)
    assert packed.out.shape == q.shape and (packed.out[333:] == 0).all()
    assert torch.equal(packed.out[:333], alone.out[0]) and torch.equal(packed.lse, alone.lse)
    assert torch.equal(packed.route_counts, alone.route_counts)


@pytest.mark.parametrize("live", [0, 385])
def test_packed_document_refuses_impossible_live_rows(live):
    q, k, v = (x[0] for x in document(384, 1))
    with pytest.raises(ValueError, match="live rows"):
        sol_attention_packed(q, k, v, live)
