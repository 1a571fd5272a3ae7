"""`sol doctor`: the table of checks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from config.lock import load_target
from engine.doctor import Check, Severity, examine, require_healthy

COLOURS = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "red"}


def report_health(target: str, overrides: list[str], out: Path, *, as_json: bool) -> None:
    """Examine and print.

    Raises:
        EnvironmentRefused: a check is an error.
    """
    checks = examine(load_target(target, overrides), out)
    console = Console(highlight=False)
    if as_json:
        console.file.write(json.dumps([check.model_dump(mode="json") for check in checks], indent=1) + "\n")
    else:
        console.print(table_of(checks))
    require_healthy(checks)


def table_of(checks: Sequence[Check]) -> Table:
    """The checks as a table."""
    table = Table("check", "", "found", "needed", "remedy")
    for check in checks:
        colour = COLOURS[check.severity]
        table.add_row(check.name, f"[{colour}]{check.severity}[/{colour}]", check.found, check.needed, check.remedy)
    return table
