"""The Real-QKV gate, judged again: its limits, its verdict, and, from the stored slice, its outputs in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from config.errors import InvalidRecord
from config.record import ArmEnd, Attention, ErrorStats, GateDone, GateReport, Layout
from verify.derive import of_sample
from verify.findings import AS_WRITTEN, Scribe
from verify.reader import ArmEvidence, Record
from verify.solattn import BLOCK, BlockRoute, Head, Options, exact_softmax
from verify.tensors import F64, Array, read_safetensors, to_f64

RED = "do not use timings of this arm; the kernel is wrong on this machine"
LONGER = (
    "run again with a warm-up that has a computed forward after sol_attn.dense_steps; warmup.compute_last=true does"
)
MAX_SCALE = 1e6  # beyond any softmax's; its square is still a number
ROUNDING = 1e-6  # relative: the run may have summed its statistics in float32


def _reports(record: Record) -> Iterator[tuple[ArmEvidence, str, GateReport]]:
    for arm in record.arms.values():
        for name, report in arm.gates.items():
            yield arm, name, report


def happened(record: Record, say: Scribe) -> None:
    """Each process of a sparse arm was gated on every rank at its first sparse call, inside its warm-up; no other arm
    was.
    """
    sparse = record.sparse_arms()
    for arm in record.arms.values():
        calls = {rank: [e for e in arm.of(rank, Attention) if e.mode == "sparse"] for rank in arm.events}
        if arm not in sparse:
            if arm.gates or any(calls.values()):
                say.fail("sparse calls or a gate in an arm without Sol-Attn", "run the arm again", arm.folder)
            continue
        for session in arm.sessions:
            samples = _samples(session)
            finished = sorted(samples & set(arm.timings))
            if samples and (finished or arm.complete) and not _cut(arm, session):
                _session(say, arm, min(samples), finished)
    if not sparse:
        say.skip("no arm has Sol-Attn")
    say.conclude("gated at the first sparse call of each warm-up")


def _samples(session: list[Any]) -> set[int]:
    """The requests of which a process of an arm told something."""
    return {event.sample for event in session if hasattr(event, "sample")}


def _cut(arm: ArmEvidence, session: list[Any]) -> bool:
    """Whether a process of the arm was killed or broke before it had finished a request, so that it left nothing that
    counts.

    A process that was added later may then complete the arm. A red gate is never passed over so.
    """
    samples, last = _samples(session), session[-1]
    if samples & set(arm.timings) or (isinstance(last, ArmEnd) and last.outcome not in ("aborted", "error")):
        return False
    gates = [gate for rank in arm.events for gate in arm.of(rank, GateDone) if gate.sample in samples]
    reports = [report for report in arm.gates.values() if report.sample in samples]
    return all(gate.passed for gate in [*gates, *reports])


def _session(say: Scribe, arm: ArmEvidence, warmup: int, samples: list[int]) -> None:
    for rank in arm.events:
        where = f"{arm.folder}events-rank{rank}.jsonl"
        done = of_sample(arm, rank, warmup, GateDone)
        calls = [event for event in of_sample(arm, rank, warmup, Attention) if event.mode == "sparse"]
        reports = [report for report in arm.gates.values() if (report.rank, report.sample) == (rank, warmup)]
        if not (done or reports or calls):
            say.invalid(
                f"warm-up {warmup} held no sparse call, so no gate ran, and nothing of this process counts",
                LONGER,
                where,
            )
            continue
        if len(done) != 1 or len(reports) != 1:
            say.invalid(
                f"{len(done)} gate events and {len(reports)} gate reports for warm-up {warmup}",
                "run the arm again",
                where,
            )
            continue
        event, report = done[0], reports[0]
        if (report.step, report.layer, report.passed) != (event.step, event.layer, event.passed):
            say.invalid("the gate's event and its report differ", AS_WRITTEN, where)
        if not report.passed:
            continue  # the arm ended here
        if not calls:
            say.invalid(
                f"warm-up {warmup} has no sparse call: what was measured afterwards was never gated", "run again", where
            )
        elif (calls[0].step, calls[0].layers, calls[0].seq > event.seq) != (event.step, (event.layer,), True):
            say.invalid(f"the gate of warm-up {warmup} did not stand before its first sparse call", "run again", where)
        elif calls[0].backend != report.backend:
            say.invalid(f"gated {report.backend}, then ran {calls[0].backend}", "run the arm again", where)


def configured(record: Record, say: Scribe) -> None:
    """The gate ran with the lock's limits and tau, and on the document and the options of the arm's own calls."""
    target = record.target
    gate, sol = target.gate, target.sol_attn
    for arm, name, report in _reports(record):
        layout = next(iter(of_sample(arm, report.rank, report.sample, Layout)), None)
        wanted = {
            "limits": {"max_abs": gate.max_abs, "mean_abs": gate.mean_abs, "rel_l2": gate.rel_l2},
            "gate_tau": gate.tau,
            "tau": sol.tau,
            "thresh_type": sol.thresh_type,
            "scale": report.shape[3] ** -0.5 if report.shape[3] > 0 else math.nan,
            "tokens": layout.live_tokens if layout else None,
            "sink": layout.sink if layout else None,
            "dense_rows": layout.dense_rows if layout else None,
        }
        found = {**report.model_dump(), "tokens": report.shape[1], "limits": report.limits.model_dump()}
        for key, value in wanted.items():
            same = math.isclose(found[key], value, rel_tol=1e-6) if isinstance(value, float) else found[key] == value
            if not same:
                say.invalid(f"{key} is {found[key]}; needed: {value}", "run the arm with the lock's gate", name)
        if min(report.shape) < 1 or report.shape[0] != 1:
            say.invalid(f"shape {report.shape}; needed: [1, T, H, D]", AS_WRITTEN, name)
    if not any(True for _ in _reports(record)):
        say.skip("there is no gate")
    say.conclude("the lock's limits, tau, threshold, sink and dense rows")


def verdict(record: Record, say: Scribe) -> None:
    """The verdict follows from the statistics and the limits; a red gate is a failed result."""
    reports = list(_reports(record))
    for arm, name, report in reports:
        stats, limits = report.against_sdpa, report.limits
        beyond = stats.max_abs > limits.max_abs
        if beyond != (report.rejudged_rows > 0) or not 0 <= report.rejudged_failed <= report.rejudged_rows:
            again = f"{report.rejudged_failed} of {report.rejudged_rows} rows judged again"
            say.invalid(f"max_abs {stats.max_abs:.3g} and {again} do not fit", AS_WRITTEN, name)
        within = stats.mean_abs <= limits.mean_abs and stats.rel_l2 <= limits.rel_l2
        green = report.finite and within and report.rejudged_failed == 0
        if green != report.passed:
            say.invalid(f"passed is {report.passed}; statistics and limits say {green}", AS_WRITTEN, name)
        if not green:
            say.fail(f"the gate is red: {_shown(stats)}", RED, name)
        if arm.complete and not report.passed:
            say.invalid("the arm went on to its end with a red gate", AS_WRITTEN, name)
    if not reports:
        say.skip("there is no gate")
    worst = max((report.against_sdpa.rel_l2 for _, _, report in reports), default=0.0)
    say.conclude(f"{len(reports)} gates green, relative L2 at most {worst:.3g}")


def _shown(stats: ErrorStats) -> str:
    return f"max_abs {stats.max_abs:.3g}, mean_abs {stats.mean_abs:.3g}, rel_l2 {stats.rel_l2:.3g}"


@dataclass(frozen=True)
class Slice:
    """The stored part of a gated call, bounds checked; arrays are float64 but for the two of integers."""

    report: GateReport
    name: str
    head: Head
    q: F64
    all_exact: F64
    sdpa: F64
    real_tau: F64
    route_counts: Array

    def blocks(self) -> Iterator[tuple[int, slice]]:
        """Each stored query block with its place among the stored rows."""
        first = 0
        for block in self.report.slice.blocks:
            rows = self.head.rows(block)
            yield block, slice(first, first + rows.stop - rows.start)
            first += rows.stop - rows.start


def _slices(record: Record, say: Scribe) -> Iterator[Slice]:
    seen = False
    for _, report_name, report in _reports(record):
        seen = True
        name = report_name.removesuffix(".json") + ".safetensors"
        if name in record.withheld:
            say.skip("withheld: its digest is attested, its content was not seen", name)
        elif not report.finite:
            say.skip("an output was not finite, as the report says: there is nothing to compute again", name)
        elif name in record.files:
            yield _load(record, name, report)
        else:
            say.invalid("the gate's slice is missing, and no attestation lists it", AS_WRITTEN, name)
    if not seen:
        say.skip("there is no gate")


def _load(record: Record, name: str, report: GateReport) -> Slice:
    tensors = read_safetensors(record.files.read(name), name)
    _, tokens, heads, dim = report.shape
    blocks = report.slice.blocks
    count = -(-tokens // BLOCK)
    if (
        not blocks
        or list(blocks) != sorted({b for b in blocks if 0 <= b < count})
        or not 0 <= report.slice.head < heads
    ):
        raise InvalidRecord(f"{name}: the slice has no block, or a block or head that the call does not have")
    rows = np.concatenate([np.arange(b * BLOCK, min((b + 1) * BLOCK, tokens)) for b in blocks])
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        **dict.fromkeys(("k", "v"), ((tokens, dim), "bfloat16")),
        **dict.fromkeys(("q", "all_exact", "sdpa", "real_tau"), ((len(rows), dim), "bfloat16")),
        "rows": ((len(rows),), "int64"),
        "route_counts": ((count, heads), "int32"),
    }
    for key, (shape, dtype) in shapes.items():
        if key not in tensors or tensors[key].shape != shape or tensors[key].dtype.name != dtype:
            found = f"{tensors[key].dtype.name} {list(tensors[key].shape)}" if key in tensors else "missing"
            raise InvalidRecord(f"{name}: tensor {key} is {found}; needed: {dtype} {list(shape)}")
    if set(tensors) != set(shapes) or not np.array_equal(tensors["rows"], rows):
        raise InvalidRecord(f"{name}: it holds other tensors or rows than its report says")
    data = {key: to_f64(tensors[key]) for key in ("q", "k", "v", "all_exact", "sdpa", "real_tau")}
    if not all(np.isfinite(array).all() for array in data.values()):
        raise InvalidRecord(f"{name}: a stored value is not finite")
    if not 0 < report.scale < MAX_SCALE:
        raise InvalidRecord(f"{name}: a scale of {report.scale:g}; needed: one that a softmax can have")
    options = Options(report.scale, report.tau, report.thresh_type, report.sink, report.dense_rows)
    head = Head(data.pop("k"), data.pop("v"), options)
    return Slice(report, name, head, route_counts=tensors["route_counts"], **data)


def _statistics(output: F64, reference: F64) -> ErrorStats:
    error = np.abs(output - reference)
    norm = max(float(np.linalg.norm(reference)), 1e-12)
    return ErrorStats(
        max_abs=float(error.max()), mean_abs=float(error.mean()), rel_l2=float(np.linalg.norm(error)) / norm
    )


def _beyond(stats: ErrorStats, reference: F64, report: GateReport) -> bool:
    """Whether an output is too far from float64: beyond the gate's limits and beyond what BF16 does to numbers of
    this size.

    The limits in absolute terms were published for values near one. An output that was rounded to BF16, of
    probabilities that were rounded to BF16, is off by some units of 2**-9 of its size, which larger values carry past
    them.
    """
    limits, size = report.limits, np.abs(reference)
    return (
        stats.rel_l2 > limits.rel_l2
        or stats.max_abs > max(limits.max_abs, float(size.max()) * 2**-6)
        or stats.mean_abs > max(limits.mean_abs, float(size.mean()) * 2**-7)
    )


def exact(record: Record, say: Scribe) -> None:
    """The slice's all-exact and SDPA outputs are attention of its Q, K, V, by a float64 softmax; no error exceeds the
    reported.
    """
    for part in _slices(record, say):
        report = part.report
        reference = exact_softmax(part.q, part.head.k, part.head.v, report.scale)
        slack = float(np.abs(reference).max()) * 1e-5  # between float64 here and float32 there
        for what, output, against, reported, allowance in (
            ("all-exact output against SDPA", part.all_exact, part.sdpa, report.against_sdpa, 0.0),
            ("all-exact output against a float64 softmax", part.all_exact, reference, report.against_fp32, slack),
            ("SDPA output against a float64 softmax", part.sdpa, reference, report.sdpa_against_fp32, slack),
        ):
            stats = _statistics(output, against)
            if report.passed and _beyond(stats, against, report):
                say.fail(f"{what}: {_shown(stats)}", RED, part.name)
            if stats.max_abs > reported.max_abs * (1 + ROUNDING) + allowance:
                found = f"max_abs {stats.max_abs:.3g} in the slice, {reported.max_abs:.3g} reported of the whole call"
                say.invalid(f"{what}: {found}", AS_WRITTEN, part.name)
            whole = (reported.mean_abs * (1 + ROUNDING) + allowance) * math.prod(report.shape)
            if stats.mean_abs * output.size > whole:
                say.invalid(
                    f"{what}: the slice alone has more error than is reported of the whole call", AS_WRITTEN, part.name
                )
        mine = _statistics(part.all_exact, reference)
        say.conclude(f"{len(part.q)} rows against a float64 softmax: {_shown(mine)}", part.name)


def sparse(record: Record, say: Scribe) -> None:
    """The slice's real-tau output is Sol-Attn of its Q, K, V, by a float64 form of our own, within limits."""
    for part in _slices(record, say):
        rows = [np.empty((0, part.q.shape[1]))]
        for block, at in part.blocks():
            q, found = part.q[at], part.real_tau[at]
            route = part.head.route(block, q)
            count = int(part.route_counts[block, part.report.slice.head])
            rows.append(_closest(part.head, route, q, found, count))
        reference = np.concatenate(rows)
        stats = _statistics(part.real_tau, reference)
        if _beyond(stats, reference, part.report):
            say.fail(f"the output is not Sol-Attn of the stored Q, K, V: {_shown(stats)}", RED, part.name)
        say.conclude(f"{len(part.q)} rows against Sol-Attn in float64: {_shown(stats)}", part.name)


def _closest(head: Head, route: BlockRoute, q: F64, found: F64, count: int) -> F64:
    """Our output of a block; of the routes that rounding could explain with this count, the one whose output is
    nearest.
    """
    best = head.attend(route.block, q, route.exact)
    if not route.close.any():
        return best
    for exact in route.with_count(count):
        candidate = best if np.array_equal(exact, route.exact) else head.attend(route.block, q, exact)
        if np.linalg.norm(candidate - found) <= np.linalg.norm(best - found):
            best = candidate
        if np.abs(candidate - found).max() <= 0.01 * max(float(np.abs(found).max()), 1e-12):
            return candidate
    return best


def routes(record: Record, say: Scribe) -> None:
    """Route counts: those of the stored blocks derived again, all within bounds, and their sums those of the call's
    event.
    """
    for part in _slices(record, say):
        report, counts = part.report, part.route_counts
        ties = 0
        for block, at in part.blocks():
            route = part.head.route(block, part.q[at])
            count = int(counts[block, report.slice.head])
            ties += int(route.close.sum())
            if not route.fewest <= count <= route.most:
                say.fail(
                    f"query block {block}: {count} exact blocks; float64 finds {int(route.exact.sum())}, "
                    f"and rounding allows {route.fewest} to {route.most}",
                    RED,
                    part.name,
                )
        least = np.array([int(part.head.forced(i).sum()) for i in range(part.head.blocks)])
        if (counts < least[:, None]).any() or (counts > part.head.blocks).any():
            say.invalid(
                "a query block counts fewer blocks than the forced ones, or more than there are", AS_WRITTEN, part.name
            )
        _event(record, say, part)
        say.conclude(
            f"{len(report.slice.blocks)} query blocks routed again; {ties} scores close to their threshold", part.name
        )


def _event(record: Record, say: Scribe, part: Slice) -> None:
    report = part.report
    arm = next(arm for arm in record.arms.values() if part.name.startswith(arm.folder))
    for call in of_sample(arm, report.rank, report.sample, Attention):
        if (call.mode, call.step, call.layers) == ("sparse", report.step, (report.layer,)):
            if call.routed != tuple(part.route_counts.sum(axis=0, dtype=np.int64).tolist()):
                say.invalid("the route counts do not add up to those of the call's event", AS_WRITTEN, part.name)
            return
    cut = any(report.sample in _samples(session) and _cut(arm, session) for session in arm.sessions)
    if report.passed and not cut:
        say.invalid("no event tells of the gated call", AS_WRITTEN, part.name)
