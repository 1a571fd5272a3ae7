"""TeaCache and FirstBlockCache on fake block stacks, against a plain re-implementation that keeps every tensor."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from config.errors import SolError
from engine.cache.base import BlockStackCache, difference_into, local_sums, relative_l1
from engine.cache.decision import Decision, FirstBlockCachePolicy, TeaCachePolicy
from engine.cache.first_block_cache import FirstBlockCache
from engine.cache.teacache import TeaCache
from tests.engine.cache.stacks import (
    CountingBlock,
    equal,
    make_blocks,
    make_inputs,
    run_plain,
    run_request,
    run_stack,
)

TINY = 1e-30  # a threshold that every measured change exceeds


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def probe(hidden: Tensor, *, time: float) -> Tensor:
    return hidden * (1.0 + time)


def teacache(
    threshold: float = 0.06,
    retain: int = 2,
    cooldown: int = 1,
    on_decision: Callable[[Decision], None] | None = None,
    all_reduce: Callable[[Tensor], Tensor] = local_sums,
) -> TeaCache:
    policy = TeaCachePolicy(threshold, retain, cooldown, (1.0, 0.0))
    return TeaCache(policy, probe, all_reduce=all_reduce, on_decision=on_decision)


def first_block_cache(
    threshold: float = 0.03,
    on_decision: Callable[[Decision], None] | None = None,
    all_reduce: Callable[[Tensor], Tensor] = local_sums,
) -> FirstBlockCache:
    return FirstBlockCache(FirstBlockCachePolicy(threshold), all_reduce=all_reduce, on_decision=on_decision)


BOTH = pytest.mark.parametrize("make", [teacache, first_block_cache])


# --- the signal ------------------------------------------------------------------------------------------------------


def test_relative_l1_literal() -> None:
    previous = torch.tensor([1.0, -2.0, 4.0, 1.0]).bfloat16()
    current = torch.tensor([1.5, -2.0, 3.0, 1.5]).bfloat16()
    assert relative_l1(current, previous, local_sums) == 2.0 / 8.0


def test_relative_l1_takes_the_difference_in_bf16_and_sums_in_fp32() -> None:
    # 256 + 1 is not a BF16 number: the exact difference 1.0078125 - 256 = -254.9921875 rounds to -255.
    current, previous = torch.tensor([1.0078125]).bfloat16(), torch.tensor([256.0]).bfloat16()
    assert relative_l1(current, previous, local_sums) == 255.0 / 256.0
    # A BF16 sum of ones stops at 256.
    ones = torch.ones(10_000).bfloat16()
    assert relative_l1(2 * ones, ones, local_sums) == 1.0


def test_relative_l1_of_a_zero_reference_is_finite() -> None:
    zero = torch.zeros(4).bfloat16()
    assert relative_l1(zero, zero, local_sums) == 0.0
    one = torch.tensor([1.0, 0, 0, 0]).bfloat16()
    assert relative_l1(one, zero, local_sums) == pytest.approx(1e8)


def test_relative_l1_against_float64() -> None:
    generator = torch.Generator().manual_seed(5)
    previous = torch.randn(999, 33, generator=generator).bfloat16()
    current = previous + (0.1 * torch.randn(999, 33, generator=generator)).bfloat16()
    before = current.clone(), previous.clone()
    difference = (current - previous).double()
    expected = (difference.abs().sum() / previous.double().abs().sum()).item()
    assert relative_l1(current, previous, local_sums) == pytest.approx(expected, rel=1e-6)
    assert equal([current, previous], before), "the signal changed its arguments"


def test_difference_into_equals_the_plain_difference_bitwise() -> None:
    generator = torch.Generator().manual_seed(6)
    left, right = (torch.randn(65, 7, generator=generator).bfloat16() for _ in range(2))
    expected = left - right
    own = right.clone()
    assert difference_into(left, own) is own
    assert torch.equal(own, expected)


# --- both caches -----------------------------------------------------------------------------------------------------


def test_both_satisfy_the_protocol_of_the_seam() -> None:
    caches: list[BlockStackCache] = [teacache(), first_block_cache()]
    assert len(caches) == 2


def test_teacache_that_never_reuses_equals_no_cache_bitwise() -> None:
    seen: list[Decision] = []
    inputs = make_inputs(6)
    outputs = run_request(teacache(TINY, 1, 0, on_decision=seen.append), make_blocks(5), inputs)
    assert equal(outputs, run_plain(make_blocks(5), inputs))
    assert [d.reason for d in seen] == ["warmup"] + ["threshold"] * 5


def test_firstblockcache_that_never_reuses_equals_no_cache_bitwise() -> None:
    seen: list[Decision] = []
    inputs = make_inputs(6)
    outputs = run_request(first_block_cache(TINY, on_decision=seen.append), make_blocks(5), inputs)
    assert equal(outputs, run_plain(make_blocks(5), inputs))
    assert [d.reason for d in seen] == ["initialize"] + ["threshold"] * 5


def plain_teacache(blocks: list[CountingBlock], inputs: list[Tensor]) -> tuple[list[Tensor], str]:
    """TeaCache as a loop over lists of all tensors, with `teacache`'s defaults."""
    probes = [probe(hidden, time=0.01 * step) for step, hidden in enumerate(inputs)]
    full = run_plain(blocks, inputs)
    outputs, pattern, total, source = [], "", 0.0, -1
    for step, hidden in enumerate(inputs):
        reuse = False
        if 2 <= step < len(inputs) - 1:
            change = (probes[step] - probes[step - 1]).abs().float().sum()
            total += float(change / probes[step - 1].abs().float().sum())
            reuse = total < 0.06
        if reuse:
            outputs.append(hidden + (full[source] - inputs[source]))
        else:
            total, source = 0.0, step
            outputs.append(full[step])
        pattern += "R" if reuse else "C"
    return outputs, pattern


def plain_first_block(blocks: list[CountingBlock], inputs: list[Tensor]) -> tuple[list[Tensor], str]:
    """FirstBlockCache as a loop over lists of all tensors, with `first_block_cache`'s default."""
    ones = [block_output.clone() for block_output in run_plain(blocks[:1], inputs)]
    heads = [one - hidden for one, hidden in zip(ones, inputs, strict=True)]
    full = run_plain(blocks, inputs)
    outputs, pattern, source = [], "", -1
    for step in range(len(inputs)):
        reuse = False
        if source >= 0:
            change = (heads[step] - heads[source]).abs().float().sum() / heads[source].abs().float().sum()
            reuse = float(change) <= 0.03
        if reuse:
            outputs.append(ones[step] + (full[source] - ones[source]))
        else:
            source = step
            outputs.append(full[step])
        pattern += "R" if reuse else "C"
    return outputs, pattern


PLAIN = pytest.mark.parametrize(("make", "plain"), [(teacache, plain_teacache), (first_block_cache, plain_first_block)])


@PLAIN
@pytest.mark.parametrize("in_place", [False, True], ids=["out_of_place", "in_place"])
def test_outputs_equal_a_plain_implementation_bitwise(make, plain, in_place: bool) -> None:
    """The fault this guards: on CUDA a block returns its own argument, so that `output - input` was 0 everywhere."""
    seen: list[Decision] = []
    inputs = make_inputs(14)
    outputs = run_request(make(on_decision=seen.append), make_blocks(5, in_place=in_place), inputs)
    expected, pattern = plain(make_blocks(5), inputs)
    assert "".join("R" if d.action == "reuse" else "C" for d in seen) == pattern
    assert "R" in pattern and pattern.count("C") > 3, f"{pattern} does not exercise both branches"
    assert equal(outputs, expected)


@BOTH
@pytest.mark.parametrize("count", [1, 2, 5])
def test_skipped_blocks_are_never_called(make, count: int) -> None:
    seen: list[Decision] = []
    blocks = make_blocks(count)
    run_request(make(on_decision=seen.append), blocks, make_inputs(14))
    computed = sum(d.action == "compute" for d in seen)
    assert 0 < computed < 14
    first = 14 if make is first_block_cache else computed
    assert [block.calls for block in blocks] == [first] + [computed] * (count - 1)


@BOTH
@pytest.mark.parametrize("count", [1, 2, 5])
def test_callable_k_stands_for_block_k(make, count: int) -> None:
    """SGLang passes `block_adaln_params[index]` under tensor parallelism: an extra callable would run past its end."""
    cache = make()
    blocks = make_blocks(count)
    cache.begin_request(14)
    for step, hidden in enumerate(make_inputs(14)):
        yielded = 0
        for index, block in enumerate(cache.forward_blocks(step, blocks)):
            calls = [b.calls for b in blocks]
            hidden = block(hidden, time=0.01 * step)
            changed = [i for i, b in enumerate(blocks) if b.calls != calls[i]]
            assert changed in ([index], []), f"callable {index} ran blocks {changed}"
            yielded += 1
        assert yielded in (1, count)


@BOTH
def test_request_2_equals_a_fresh_caches_request_1_bitwise(make) -> None:
    first, second = make_inputs(9, seed=1), make_inputs(11, seed=2)
    seen_used: list[Decision] = []
    seen_fresh: list[Decision] = []
    used = make(on_decision=seen_used.append)
    run_request(used, make_blocks(4), first)
    seen_used.clear()
    outputs = run_request(used, make_blocks(4), second)
    assert equal(outputs, run_request(make(on_decision=seen_fresh.append), make_blocks(4), second))
    assert seen_used == seen_fresh


@BOTH
def test_request_under_an_unchanged_label_starts_afresh(make) -> None:
    """Upstream resets only when the request's label changes, and the label is constant per profile and phase: a request
    repeated in one process started on the residuals of the one before. Here a request begins by a call, and a step that
    goes back without that call is refused.
    """
    inputs = make_inputs(9)
    cache = make()
    once = run_request(cache, make_blocks(4), inputs)
    assert equal(run_request(cache, make_blocks(4), inputs), once)

    cache.begin_request(9)
    for step in range(9):
        run_stack(cache.forward_blocks(step, make_blocks(4)), inputs[step].clone(), step)
    with pytest.raises(ValueError, match="step went back from 8 to 0"):
        run_stack(cache.forward_blocks(0, make_blocks(4)), inputs[0].clone(), 0)


@pytest.mark.parametrize("make", [lambda **kwargs: teacache(0.2, 0, 0, **kwargs), first_block_cache])
def test_begin_request_drops_what_an_unfinished_request_left(make) -> None:
    """Without a forced warm-up, and on the same inputs, a left-over residual would be reused at once."""
    seen: list[Decision] = []
    inputs = make_inputs(9)
    cache = make(on_decision=seen.append)
    cache.begin_request(9)
    for step in range(2):
        run_stack(cache.forward_blocks(step, make_blocks(4)), inputs[step].clone(), step)
    seen.clear()
    fresh: list[Decision] = []
    outputs = run_request(cache, make_blocks(4), inputs)
    assert equal(outputs, run_request(make(on_decision=fresh.append), make_blocks(4), inputs))
    assert seen == fresh
    assert seen[0].reason == "initialize"


@BOTH
def test_end_request_releases_every_tensor(make) -> None:
    cache = make()
    held: list[weakref.ref[Tensor]] = []
    cache.begin_request(4)
    for step, hidden in enumerate(make_inputs(4)):
        run_stack(cache.forward_blocks(step, make_blocks(3)), hidden, step)
    held = [weakref.ref(value) for value in vars(cache).values() if isinstance(value, Tensor)]
    assert len(held) == 2, "the docstring says two tensors between forwards"
    gc.disable()
    try:
        cache.end_request()
        assert [ref() for ref in held] == [None, None], "kept alive by a reference cycle or another owner"
    finally:
        gc.enable()


@BOTH
def test_only_two_tensors_live_while_the_blocks_of_a_computed_forward_run(make) -> None:
    """Counts the live tensors of the hidden state's size beside the loop's own: what the docstrings promise."""
    cache = make(TINY)
    alive: list[int] = []

    def count_alive(hidden: Tensor, *, time: float) -> Tensor:
        tensors = {id(o) for o in gc.get_objects() if type(o) is Tensor and o.shape == hidden.shape}
        alive.append(len(tensors - {id(hidden)}))
        return hidden.add_(0.5)

    blocks = [count_alive] * 3
    generator = torch.Generator().manual_seed(9)
    cache.begin_request(4)
    for step in range(4):
        run_stack(cache.forward_blocks(step, blocks), torch.randn(31, 17, generator=generator).bfloat16(), step)
    gc.collect()
    # Block 0 of FirstBlockCache runs beside head, tail and its input's clone once there is history.
    block_0 = {teacache: 2, first_block_cache: 3}[make]
    assert alive[3:] == [block_0, 2, 2] * 3


@BOTH
def test_an_iteration_closed_before_its_first_block_changes_nothing(make) -> None:
    inputs = make_inputs(9)
    expected = run_request(make(), make_blocks(4), inputs)
    cache = make()
    cache.begin_request(9)
    outputs = []
    for step, hidden in enumerate(inputs):
        iterator = cache.forward_blocks(step, make_blocks(4))
        del iterator
        started = cache.forward_blocks(step, make_blocks(4))
        next(started)
        started.close()  # type: ignore[attr-defined]
        outputs.append(run_stack(cache.forward_blocks(step, make_blocks(4)), hidden.clone(), step).clone())
    assert equal(outputs, expected)


@BOTH
def test_a_computed_forward_that_was_cut_short_leaves_no_history(make) -> None:
    """An old residual beside a new probe must not be reused: the next forward computes."""
    seen: list[Decision] = []
    inputs = make_inputs(12)
    cache = make(on_decision=seen.append)
    cache.begin_request(12)
    for step in range(2):
        run_stack(cache.forward_blocks(step, make_blocks(4)), inputs[step].clone(), step)
    cut = cache.forward_blocks(2, make_blocks(4))
    next(cut)(torch.full_like(inputs[2], 7.0), time=0.02)
    if seen[-1].action == "reuse":  # far from every earlier input, so it has to compute
        pytest.fail("the test's input did not force a compute")
    next(cut)
    cut.close()  # type: ignore[attr-defined]
    output = run_stack(cache.forward_blocks(3, make_blocks(4)), inputs[3].clone(), 3)
    assert (seen[-1].action, seen[-1].reason) == ("compute", "initialize")
    assert equal([output], [run_stack(make_blocks(4), inputs[3].clone(), 3)])


@BOTH
def test_a_block_that_raises_leaves_no_history(make) -> None:
    seen: list[Decision] = []
    inputs = make_inputs(6)
    cache = make(TINY, on_decision=seen.append)
    cache.begin_request(6)
    run_stack(cache.forward_blocks(0, make_blocks(3)), inputs[0].clone(), 0)
    run_stack(cache.forward_blocks(1, make_blocks(3)), inputs[1].clone(), 1)

    def broken(hidden: Tensor, *, time: float) -> Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        run_stack(cache.forward_blocks(2, [*make_blocks(3)[:2], broken]), inputs[2].clone(), 2)
    run_stack(cache.forward_blocks(3, make_blocks(3)), inputs[3].clone(), 3)
    assert seen[-1].reason == "initialize"


@BOTH
def test_misuse_is_refused(make) -> None:
    cache = make()
    with pytest.raises(RuntimeError, match="outside a request"):
        cache.forward_blocks(0, make_blocks(2))
    cache.begin_request(2)
    with pytest.raises(ValueError, match="block stack is empty"):
        cache.forward_blocks(0, [])
    iterator = cache.forward_blocks(0, make_blocks(2))
    next(iterator)
    with pytest.raises(RuntimeError, match="first block of the iteration was not called"):
        next(iterator)
    cache.end_request()
    with pytest.raises(RuntimeError, match="outside a request"):
        cache.forward_blocks(0, make_blocks(2))


@BOTH
def test_activations_that_are_not_finite_end_the_run(make) -> None:
    cache = make()
    inputs = make_inputs(4)
    cache.begin_request(4)
    for step in range(2):
        run_stack(cache.forward_blocks(step, make_blocks(2)), inputs[step], step)
    with pytest.raises(SolError, match="the cache signal of forward 2 is nan"):
        run_stack(cache.forward_blocks(2, make_blocks(2)), torch.full_like(inputs[2], float("nan")), 2)


@BOTH
def test_decisions_are_reported_before_the_remaining_blocks_run(make) -> None:
    order: list[str] = []
    cache = make(on_decision=lambda decision: order.append("decision"))

    def block(name: str) -> Callable[..., Tensor]:
        def run(hidden: Tensor, *, time: float) -> Tensor:
            order.append(name)
            return hidden + 1

        return run

    cache.begin_request(1)
    run_stack(cache.forward_blocks(0, [block("0"), block("1"), block("2")]), make_inputs(1)[0], 0)
    expected = {teacache: ["decision", "0", "1", "2"], first_block_cache: ["0", "decision", "1", "2"]}
    assert order == expected[make]


@BOTH
def test_nothing_runs_under_autograd(make) -> None:
    """The caches write into their own clones with `out=`, which autograd refuses; parameters may ask for it."""
    weight = torch.nn.Parameter(torch.ones(16))
    cache = make()
    cache.begin_request(5)
    for step, hidden in enumerate(make_inputs(5)):
        run_stack(cache.forward_blocks(step, [lambda h, time: h + (h * weight).to(h.dtype)] * 2), hidden, step)
    assert not any(value.requires_grad for value in vars(cache).values() if isinstance(value, Tensor))


# --- one cache each --------------------------------------------------------------------------------------------------


def test_teacache_signals_are_consecutive_differences_also_across_reuses() -> None:
    seen: list[Decision] = []
    inputs = make_inputs(10)
    run_request(teacache(on_decision=seen.append), make_blocks(3), inputs)
    probes = [probe(hidden, time=0.01 * step) for step, hidden in enumerate(inputs)]
    for decision in seen:
        if decision.signal is not None:
            now, before = probes[decision.step], probes[decision.step - 1]
            expected = ((now - before).double().abs().sum() / before.double().abs().sum()).item()
            assert decision.signal == pytest.approx(expected, rel=1e-5)
    assert sum(d.action == "reuse" for d in seen) > 1


def test_teacache_measures_nothing_where_the_decision_is_forced() -> None:
    """A signal is a reduction over the ranks: none may be asked for in the warm-up or the cooldown."""
    reductions: list[Tensor] = []

    def count(sums: Tensor) -> Tensor:
        reductions.append(sums)
        return sums

    seen: list[Decision] = []
    run_request(teacache(1e9, 3, 2, on_decision=seen.append, all_reduce=count), make_blocks(2), make_inputs(8))
    assert [d.reason for d in seen] == ["warmup"] * 3 + ["below_threshold"] * 3 + ["cooldown"] * 2
    assert len(reductions) == 3
    assert all(sums.shape == (2,) and sums.dtype == torch.float32 for sums in reductions)


def test_teacache_refuses_a_probe_of_another_shape() -> None:
    cache = teacache(retain=1)
    cache.begin_request(4)
    run_stack(cache.forward_blocks(0, make_blocks(2)), make_inputs(1)[0], 0)
    with pytest.raises(ValueError, match="shape changed within a request"):
        run_stack(cache.forward_blocks(1, make_blocks(2)), make_inputs(1, rows=5)[0], 1)


def test_firstblockcache_computes_after_a_change_of_shape_and_reuses_again() -> None:
    seen: list[Decision] = []
    cache = first_block_cache(1e9, on_decision=seen.append)
    cache.begin_request(4)
    for step, rows in enumerate([8, 8, 12, 12]):
        run_stack(cache.forward_blocks(step, make_blocks(2)), make_inputs(1, rows=rows)[0], step)
    assert [d.reason for d in seen] == ["initialize", "below_threshold", "shape_change", "below_threshold"]


def test_firstblockcache_compares_with_the_last_computed_forward_not_the_last_one() -> None:
    """A drift in small steps must add up: block 0 here adds its argument's own constant."""
    seen: list[Decision] = []
    cache = first_block_cache(0.30, on_decision=seen.append)

    def head(hidden: Tensor, *, time: float) -> Tensor:
        return hidden + hidden

    cache.begin_request(4)
    for step, value in enumerate([1.0, 1.25, 1.5, 1.75]):
        run_stack(cache.forward_blocks(step, [head, head]), torch.full((4, 4), value).bfloat16(), step)
    assert [(d.action, d.signal) for d in seen] == [
        ("compute", None),
        ("reuse", 0.25),
        ("compute", 0.5),
        ("reuse", pytest.approx(1 / 6)),
    ]


# --- sequence parallelism --------------------------------------------------------------------------------------------


class ThreadRanks:
    """All-reduce between threads: rank r waits for the others' sums, in order of calls."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=30)
        self.parts: list[Tensor] = [torch.zeros(2)] * ranks

    def of_rank(self, rank: int) -> Callable[[Tensor], Tensor]:
        def all_reduce(sums: Tensor) -> Tensor:
            self.parts[rank] = sums
            self.barrier.wait()
            total = torch.stack(self.parts).sum(dim=0)
            self.barrier.wait()
            return total

        return all_reduce


@BOTH
def test_ranks_take_one_branch_though_their_own_rows_disagree(make) -> None:
    """Each rank sees its rows only; alone, a rank whose rows stand still would reuse while the other computes."""
    inputs = make_inputs(14, drift=0.03)
    still = [torch.cat((hidden[:12], inputs[0][12:])) for hidden in inputs]

    def request(hidden: list[Tensor], all_reduce: Callable[[Tensor], Tensor], into: list[Decision]) -> None:
        run_request(make(on_decision=into.append, all_reduce=all_reduce), make_blocks(3), hidden)

    halves = [[hidden[:12] for hidden in still], [hidden[12:] for hidden in still]]
    alone: list[list[Decision]] = [[], []]
    for rank in range(2):
        request(halves[rank], local_sums, alone[rank])
    assert [d.action for d in alone[0]] != [d.action for d in alone[1]], "the ranks would have agreed anyway"

    ranks = ThreadRanks(2)
    together: list[list[Decision]] = [[], []]
    threads = [
        threading.Thread(target=request, args=(halves[rank], ranks.of_rank(rank), together[rank])) for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(together[0]) == 14
    assert together[0] == together[1]

    whole: list[Decision] = []
    request(still, local_sums, whole)
    for one, other in zip(whole, together[0], strict=True):
        assert one.action == other.action
        assert (one.signal is None) == (other.signal is None)
        assert one.signal is None or one.signal == pytest.approx(other.signal, rel=1e-5)


# --- a list in place of the signals ----------------------------------------------------------------------------------


def replaying_teacache(replay: tuple[int, ...], on_decision: Callable[[Decision], None]) -> TeaCache:
    return TeaCache(TeaCachePolicy(0.06, 2, 1, (1.0, 0.0), replay), probe, on_decision=on_decision)


def replaying_first_block(replay: tuple[int, ...], on_decision: Callable[[Decision], None]) -> FirstBlockCache:
    return FirstBlockCache(FirstBlockCachePolicy(0.03, replay), on_decision=on_decision)


@pytest.mark.parametrize(
    ("make", "replaying"), [(teacache, replaying_teacache), (first_block_cache, replaying_first_block)]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_replaying_what_the_signals_decided_gives_the_same_bits_and_signals(
    make: Callable[..., BlockStackCache],
    replaying: Callable[[tuple[int, ...], Callable[[Decision], None]], BlockStackCache],
    in_place: bool,
) -> None:
    inputs = make_inputs(12)
    decided: list[Decision] = []
    expected = run_request(make(on_decision=decided.append), make_blocks(5, in_place=in_place), inputs)
    pattern = tuple(decision.step for decision in decided if decision.action == "compute")
    assert 1 < len(pattern) < 12
    replayed: list[Decision] = []
    blocks = make_blocks(5, in_place=in_place)
    outputs = run_request(replaying(pattern, replayed.append), blocks, inputs)
    assert equal(outputs, expected)
    assert [d.signal for d in replayed] == [d.signal for d in decided]
    assert [d.action for d in replayed] == [d.action for d in decided]
    assert {d.reason for d in replayed} == {"replay"}
    assert [block.calls for block in blocks[1:]] == [len(pattern)] * 4


def test_a_computed_last_forward_runs_every_block() -> None:
    inputs, blocks, seen = make_inputs(4, drift=0.0), make_blocks(5), []
    cache = first_block_cache(0.5, on_decision=seen.append)
    cache.begin_request(4, compute_last=True)
    outputs = [run_stack(cache.forward_blocks(step, blocks), x.clone(), step) for step, x in enumerate(inputs)]
    assert [block.calls for block in blocks] == [4, 2, 2, 2, 2]
    assert [d.reason for d in seen] == ["initialize", "below_threshold", "below_threshold", "warmup_last"]
    assert torch.equal(outputs[3], run_stack(make_blocks(5), inputs[3].clone(), 3))
