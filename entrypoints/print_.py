"""`sol print`: what a target runs."""

from __future__ import annotations

import json
from typing import Any

from config.errors import UsageError
from config.lock import load_target, lock_json, resolve, shipped_locks, target_names
from entrypoints.console import make_console, make_table


def show(target: str, overrides: list[str], *, as_json: bool) -> None:
    """Print one target's lock, or all targets' titles.

    Raises:
        UsageError: no such target, key or value, or values to set for all targets.
    """
    console = make_console()
    if target == "all":
        if overrides:
            raise UsageError("--set for all targets", needed="one target", remedy="name the target that it is for")
        if as_json:
            found = {
                name: {"title": load_target(name).title, "digest": resolve(name).digest} for name in target_names()
            }
            console.file.write(json.dumps(found, indent=1) + "\n")
            return
        table = make_table("target", "what it is", "lock")
        for name in target_names():
            table.add_row(name, load_target(name).title, resolve(name).digest[:12])
        console.print(table)
        return
    lock = resolve(target, overrides)
    if as_json:
        console.file.write(lock_json(lock).decode())
        return
    loaded = load_target(target, overrides)
    console.print(f"{target}: {loaded.title}", style="bold")
    shipped = "shipped with this release" if lock.digest in shipped_locks() else "not shipped: a run of it is open"
    console.print(f"lock {lock.digest} ({shipped})")
    for override in lock.overrides:
        console.print(f"  changed: {override.key} = {override.value!r} (locked {override.locked!r})")
    table = make_table("key", "value")
    for key, value in flatten(lock.values):
        table.add_row(key, value if len(value) <= 100 else f"{value[:97]}…")
    console.print(table)
    for note in loaded.notes:
        console.print(f"note: {note}")


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys with their JSON values."""
    if isinstance(value, dict) and value:
        return [pair for key in value for pair in flatten(value[key], f"{prefix}.{key}" if prefix else key)]
    return [(prefix, json.dumps(value, ensure_ascii=False))]
