"""Were the cache's decisions the ones that its rules give for the recorded signals?"""

from __future__ import annotations

from config.record import CacheDecision
from verify.cachesim import replay
from verify.derive import of_sample
from verify.findings import Scribe
from verify.reader import Record

SHOWN = 3


def decisions(record: Record, say: Scribe) -> None:
    """Replay every request's decisions from its signals, or from the lock's list; an arm without cache has none."""
    replayed = 0
    for arm in record.arms.values():
        cached = record.lookup(arm).cache
        for rank in arm.events:
            where = f"{arm.folder}events-rank{rank}.jsonl"
            if not cached:
                if arm.of(rank, CacheDecision):
                    say.fail("a cache decided in an arm that has none", "run the arm again", where)
                continue
            for sample, timing in arm.timings.items():
                found = of_sample(arm, rank, sample, CacheDecision)
                last = timing.phase == "warmup" and record.target.warmup.compute_last
                faults = replay(record.target.cache, timing.num_inference_steps - 1, found, compute_last=last)
                replayed += 1
                for fault in faults[:SHOWN]:
                    say.fail(
                        f"sample {sample}, {fault}", "the cache did not follow its rules: do not use this arm", where
                    )
    if not any(record.lookup(arm).cache for arm in record.arms.values()):
        say.skip("no arm has a cache")
    if record.target.cache.replay:
        say.conclude(f"{replayed} requests computed the forwards that the lock lists, and reused all others")
    else:
        say.conclude(
            f"{replayed} requests replayed from their signals; the signals themselves cannot be derived from a record"
        )


def ranks(record: Record, say: Scribe) -> None:
    """All ranks saw one signal and took one branch: the signal is summed over them."""
    arms = [arm for arm in record.arms.values() if record.lookup(arm).cache and len(arm.events) > 1]
    if not arms:
        say.skip("no arm with a cache ran on several ranks")
    for arm in arms:
        first = [_plain(event) for event in arm.of(0, CacheDecision)]
        for rank in arm.events:
            if [_plain(event) for event in arm.of(rank, CacheDecision)] != first:
                say.fail(
                    "its decisions differ from rank 0's", "run the arm again", f"{arm.folder}events-rank{rank}.jsonl"
                )
        say.conclude(f"{len(arm.events)} ranks decided alike", arm.folder)


def _plain(event: CacheDecision) -> tuple[object, ...]:
    return (event.sample, event.step, event.action, event.reason, event.signal, event.accumulator)
