"""The GPU kernels without a GPU: run by Triton's interpreter on small tensors, and compiled for three capabilities.

The interpreter runs summaries, routing and the pointer attention kernel (see interpreted_kernels.py). The Gluon kernel
of SM90 it cannot run: here that one is compiled; tests/gpu runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.attention import kernels, reference
from engine.attention.kernels import attend_pointer, attend_sm90, lists, rotary, summaries
from engine.attention.kernels.rotary import rotary_embedding
from engine.attention.routing import block_lengths, num_blocks, route_from_summaries, summarise
from tests.engine.attention.cross_compile import compile_for
from tests.engine.attention.interpreted_kernels import CASES, ROTARY, Case, rotary_tensors, rotate_plainly

REPOSITORY = Path(__file__).parents[3]
REL_L2 = 3e-3  # bfloat16 probabilities and a bfloat16 output: 2.3e-3 is what is measured


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    file = tmp_path_factory.mktemp("interpreted") / "computed.pt"
    script = Path(__file__).with_name("interpreted_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, script, file], check=True, env=environment, cwd=REPOSITORY)
    return torch.load(file)


@pytest.fixture(scope="module")
def computed(interpreted: dict[str, list]) -> dict[str, dict[str, torch.Tensor]]:
    return dict(zip((case.name for case in CASES), interpreted["calls"], strict=True))


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def relative_l2(x: torch.Tensor, reference: torch.Tensor) -> float:
    return float((x.double() - reference.double()).norm() / reference.double().norm())


@cache
def expected(case: Case):
    return reference.attend(*case.tensors(), case.options, precision="float64")


@cache
def expected_route(case: Case):
    q, k, v = case.tensors()
    return route_from_summaries(summarise(q[0], k[0], v[0]), case.options, case.tokens)


def decode(bits: torch.Tensor, blocks: int) -> torch.Tensor:
    """[H, N, words] -> [H, N, N] bool."""
    j = torch.arange(blocks)
    return ((bits[:, :, j // 32] >> (j % 32)) & 1).bool()


def test_summaries_are_those_of_the_reference(case, computed):
    q, k, v = case.tensors()
    want, got = summarise(q[0], k[0], v[0]), computed[case.name]
    torch.testing.assert_close(got["q_mean"], want.q_mean, rtol=1e-5, atol=1e-6 * case.magnitude)
    for name, value in (("k_mean", want.k_mean), ("v_sum", want.v_sum)):
        # One rounding of a float32 sum whose order is free: at most one bfloat16 apart, and rarely.
        assert (got[name] != value).float().mean() < 1e-3
        torch.testing.assert_close(got[name], value, rtol=2**-7, atol=1e-5 * case.magnitude)


def test_route_is_that_of_the_reference(case, computed):
    got, want = computed[case.name], expected_route(case)
    blocks = num_blocks(case.tokens)
    differing = decode(got["bits"], blocks) != want.exact.permute(2, 0, 1)
    # Where all scores are equal, rounding alone decides; else a score within rounding of the threshold is improbable.
    if case.data != "equal keys":
        assert differing.float().mean() < 1e-3
    assert torch.equal(got["counts"], got["group_counts"])
    assert torch.equal(got["counts"], got["counts_alone"]), "of a call whose attention another backend computes"
    assert torch.equal(got["counts"].T.long(), decode(got["bits"], blocks).sum(-1))


def test_bits_behind_the_last_block_are_set(case, computed):
    bits, blocks = computed[case.name]["bits"], num_blocks(case.tokens)
    assert bits.shape[-1] * 32 % 64 == 0
    assert decode(bits, bits.shape[-1] * 32)[:, :, blocks:].all()


def test_lists_hold_each_members_blocks_in_order(case, computed):
    """Decoded, a group's list gives every member its routed whole blocks; dense members have none."""
    got, blocks = computed[case.name], num_blocks(case.tokens)
    exact = decode(got["bits"], blocks)
    shift = int(got["shift"])
    first, last = lists.dense_block_range(case.tokens, case.dense_rows)
    for head in range(case.heads):
        for group, length in enumerate(got["lengths"][head].tolist()):
            entries = got["entries"][head, group, :length].int() & (0xFFFF if shift == 12 else -1)
            j, members = entries & ((1 << shift) - 1), entries >> shift
            assert (j[1:] > j[:-1]).all() and (members > 0).all()
            for member in range(case.group):
                i = group * case.group + member
                own = j[(members >> member) & 1 == 1].tolist()
                if i >= blocks or first <= i < last:
                    assert own == []
                else:
                    assert own == [x for x in range(case.tokens // 64) if exact[head, i, x]]


def test_reference_score_is_the_greatest_of_the_means(case, computed):
    q, k, v = case.tensors()
    s = summarise(q[0], k[0], v[0], torch.float64)
    scores = torch.einsum("ihd,jhd->ijh", s.q_mean, s.k_mean.double()) * (128**-0.5 * 1.4426950408889634)
    want = scores.amax(1)
    torch.testing.assert_close(computed[case.name]["reference"].double(), want, rtol=1e-4, atol=1e-4)


def test_output_and_lse_agree_with_float64(case, computed):
    got, want = computed[case.name], expected(case)
    assert relative_l2(got["out"], want.out) < REL_L2
    torch.testing.assert_close(got["lse"], want.lse, rtol=1e-5, atol=1e-4)


def test_repair_computes_the_flagged_blocks_and_no_others(case, computed):
    got, want = computed[case.name], expected(case)
    flags = got["flags"][:-1].view(num_blocks(case.tokens), case.heads).bool()
    rows = flags.repeat_interleave(block_lengths(case.tokens), dim=0)  # [T, H]
    assert relative_l2(got["repaired"][0][rows], want.out[0][rows]) < REL_L2
    torch.testing.assert_close(got["repaired_lse"][0][rows], want.lse[0][rows], rtol=1e-5, atol=1e-4)
    assert not got["repaired"][0][~rows].any() and not got["repaired_lse"][0][~rows].any()


@pytest.mark.parametrize("index", range(len(ROTARY)))
def test_rotary_embedding_is_bitwise_the_plain_branch(index, interpreted):
    for got, want in zip(interpreted["rotary"][index], rotate_plainly(ROTARY[index]), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_neox": False}, "interleaved"),
        ({"head_size": 60}, "last stride 1"),
        ({"cos_sin_cache": torch.zeros(9, 48)}, "alike"),
        ({"cos_sin_cache": torch.zeros(9, 66, dtype=torch.float16)}, "even number up to 64"),
        ({"query": torch.zeros(4, 128, dtype=torch.float16)}, "query is"),
    ],
)
def test_rotary_embedding_refuses(change, message):
    positions, q, k, cache = rotary_tensors(*ROTARY[0])
    arguments = {
        "positions": positions, "query": q.flatten(1), "key": k.flatten(1), "head_size": 64, "cos_sin_cache": cache,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        rotary_embedding(**{**arguments, **change})


@pytest.mark.parametrize(
    ("tokens", "rows", "expected"),
    [
        (999, (0, 0), (0, 0)),
        (999, (0, 951), (0, 14)),
        (999, (1, 127), (0, 0)),
        (999, (64, 128), (1, 2)),
        (999, (960, 999), (15, 16)),  # the ragged last block, whole
        (999, (960, 998), (0, 0)),
        (999, (0, 999), (0, 16)),
    ],
)
def test_dense_blocks_are_those_without_a_sparse_row(tokens, rows, expected):
    assert lists.dense_block_range(tokens, rows) == expected


def test_long_documents_have_wide_entries():
    assert lists.SHORT_BLOCKS * 64 == 262_144
    assert lists.SHORT_BLOCKS == 1 << 12


@pytest.mark.parametrize(
    ("shape", "strides", "message"),
    [
        ((38247, 56, 128), (21504, 128, 1), None),  # SGLang's views of one fused tensor
        ((38247, 56, 128), (128, 38247 * 128, 1), None),  # head after head
        ((500, 2, 128), (264, 132, 1), "16-byte steps"),
        ((500, 1, 128), (128, 3, 1), None),  # the stride of a single head is never used
        ((400_000, 56, 128), (128, 400_000 * 128, 1), "31 bits"),
    ],
)
def test_which_strides_the_memory_accelerator_takes(shape, strides, message):
    reason = attend_sm90.unsupported_strides(torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta"))
    assert reason is None if message is None else message in reason


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (8, 9), (8, 6), (10, 0), (12, 0)])
def test_plan_by_capability(capability):
    assert kernels.plan_for(capability).variant == {
        (9, 0): "sm90", (8, 0): "pointer-sm80", (8, 9): "pointer-sm89",
    }.get(capability, "pointer")  # fmt: skip


def test_only_what_the_memory_accelerator_cannot_take_is_copied():
    fused = torch.randn(50, 3, 2, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = (fused[None, :, i] for i in range(3))
    odd = torch.zeros(1, 50, 2, 132, dtype=torch.bfloat16)[..., 1:129].copy_(v)
    read = kernels.readable(kernels.SM90, q, k, odd)
    assert read[0] is q and read[1] is k
    assert torch.equal(read[2], v) and read[2].is_contiguous() and read[2].data_ptr() % 16 == 0
    assert kernels.readable(kernels.POINTER_OTHER, q, k, odd)[2] is odd


def test_unsupported_calls_say_why():
    options = CASES[0].options
    x = torch.zeros((1, 10, 1, 128), dtype=torch.bfloat16)
    assert "CUDA device" in kernels.supports(x, x, x, options)
    assert "bfloat16" in kernels.supports(*[x.half()] * 3, options)
    assert "128 channels" in kernels.supports(*[x[..., :64]] * 3, options)


# ------------------------------------------------------------------------------------------------ compiled

# Shared memory that one program may have, by capability (CUDA C++ Programming Guide, technical specifications).
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
TYPES = {"diag": {"p_spread": "*fp32"}, "exact": {}}


def assert_copies_are_fenced(ptx: str) -> None:
    """Triton 3.6 gives asynchronously copied tiles to Hopper's tensor cores without a proxy fence. The second moments
    of the exact threshold differed from run to run for it (8 warps, 3 stages); so no kernel may have both."""
    assert not ("wgmma" in ptx and "cp.async.cg" in ptx)


@pytest.mark.parametrize("capability", SHARED)
def test_summaries_compile_without_spills(capability):
    report = compile_for(
        summaries._summarise_kernel, capability, {"D": 128, "BT": 64}, num_warps=summaries.WARPS
    )  # fmt: skip
    assert report.spill_stores == 0 and report.shared <= SHARED[capability]
    for exact in (False, True):
        constants = {"EXACT": exact, "D": 128, "BD": 128 if exact else 32, "BN": 64 if exact else 256}
        launch = {"num_warps": 8 if exact else 4, "num_stages": summaries.UNPIPELINED}
        report = compile_for(summaries._statistics_kernel, capability, constants, **launch)
        assert report.spill_stores == 0 and report.shared <= SHARED[capability]
        assert_copies_are_fenced(report.ptx)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("capability", SHARED)
def test_routing_compiles_within_shared_memory(capability, kind):
    plan = {80: kernels.POINTER[8, 0], 89: kernels.POINTER[8, 9], 90: kernels.SM90}[capability]
    constants = {
        "EXACT": kind == "exact", "G": plan.group, "SLOTS": {1: 1, 2: 2, 3: 4}[plan.group], "SHIFT": 12,
        "R": plan.rows, "D": 128, "BT": 64, "BN": lists.LAUNCH["BN"],
    }  # fmt: skip
    launch = {name: value for name, value in lists.LAUNCH.items() if name.startswith("num_")}
    report = compile_for(lists._route_kernel, capability, constants, TYPES[kind], **launch)
    assert report.spill_stores <= 16 and report.shared <= SHARED[capability]
    assert_copies_are_fenced(report.ptx)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("capability", SHARED)
def test_pointer_attention_compiles_within_shared_memory(capability, lse):
    plan = kernels.POINTER.get((capability // 10, capability % 10), kernels.POINTER_OTHER)
    constants = {"SHIFT": 12, "LSE": lse, "STAGES": plan.stages, "BT": 64, "D": 128}
    report = compile_for(attend_pointer._attend_kernel, capability, constants, num_warps=4, num_stages=plan.stages)
    assert report.shared <= SHARED[capability]
    assert report.registers <= 255 and report.spill_stores <= 32
    assert ("cp.async" in report.ptx) == (capability < 90)  # K and V are loaded ahead, where that is safe


@pytest.mark.parametrize("capability", SHARED)
def test_repair_compiles(capability):
    constants = {"LSE": False, "BT": 64, "D": 128}
    report = compile_for(attend_pointer._repair_kernel, capability, constants, num_warps=4, num_stages=1)
    assert report.shared <= SHARED[capability]
    assert_copies_are_fenced(report.ptx)


@pytest.mark.parametrize("capability", SHARED)
def test_rotary_embedding_compiles_without_spills(capability):
    types = {"p_positions": "*i64", **dict.fromkeys(("p_q", "p_k", "p_cache"), "*fp16")}
    report = compile_for(rotary._rotary_kernel, capability, {"BH": 16, "HALF": 32}, types, num_warps=4)
    assert report.spill_stores == 0


@pytest.mark.parametrize("lse", [False, True])
def test_sm90_attention_compiles_to_hopper_instructions(lse):
    plan = kernels.SM90
    constants = {
        "G": plan.group, "SHIFT": 12, "STAGES": plan.stages, "REGISTERS": plan.registers, "LSE": lse,
        "BT": 64, "D": 128,
    }  # fmt: skip
    report = compile_for(attend_sm90._attend_kernel, 90, constants, num_warps=4)
    assert report.shared <= SHARED[90]
    # 65,536 registers between G consumer warpgroups and the producer's: what is asked for must exist.
    assert (plan.group * plan.registers + 24) * 128 <= 65_536
    assert report.spill_stores <= 256  # of values that live through an item, outside the loop over tiles
    assert "cp.async.bulk.tensor.2d" in report.ptx and "setmaxnreg" in report.ptx
    assert report.ptx.count("wgmma.mma_async") >= plan.group * 2 * 12  # 8 + 4 for each tile of means, and of the list
