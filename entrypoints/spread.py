"""The part of `sol report` about a replayed list of computed forwards: what another list of that count would take."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError
from rich.console import Console

from config.errors import InvalidRecord
from config.lock import Lock
from config.record import LOCK, Benchmark
from config.replays import format_steps
from entrypoints.console import make_table
from verify.spread import KINDS, Spread, spreads


def print_spreads(console: Console, record: Path, benchmark: Benchmark) -> None:
    """A table for each arm whose cache replayed a list; nothing for a record without a list, or without lock.json.

    Raises:
        InvalidRecord: lock.json is not a lock.
    """
    path = record / LOCK
    if not path.is_file():
        return
    try:
        target = Lock.model_validate_json(path.read_bytes()).resolved
    except (OSError, ValidationError, KeyError, TypeError) as error:
        raise InvalidRecord(f"{path} is not a lock: {str(error).splitlines()[0]}", remedy="`sol verify`") from error
    if not target.cache.replay:
        return
    console.print(
        f"cache.replay: {len(target.cache.replay)} of {target.request.forwards} forwards computed by a list, whatever "
        "their signals said. Another list of as many would take, by this record's own forwards:"
    )
    for spread in spreads(benchmark, target):
        print_spread(console, spread)


def print_spread(console: Console, spread: Spread) -> None:
    """One arm: its median forwards, and the earliest, the run and the latest list."""
    typical = ", ".join(
        f"{kind} {spread.forward_seconds[kind]:.3f} s" if kind in spread.forward_seconds else f"{kind} not measured"
        for kind in KINDS
    )
    console.print(f"{spread.arm}: forwards {typical} (medians); {spread.rest_seconds:.3f} s of its loop beside them")
    table = make_table("list", "computed", *KINDS, "denoise s", "over dense")
    for pattern in spread.patterns:
        table.add_row(
            pattern.name,
            format_steps(pattern.steps),
            *(str(pattern.counts[kind]) for kind in KINDS),
            "not measured" if pattern.seconds is None else f"{pattern.seconds:.2f}",
            "not measured" if pattern.ratio is None else f"{pattern.ratio:.3f}x",
        )
    console.print(table)
