"""`sol doctor`: the table of checks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from config.env import refuse_influences
from config.errors import UsageError
from config.lock import Lock, load_target, resolve
from engine.doctor import Check, Severity, examine, require_healthy
from entrypoints.console import make_console, make_table

COLOURS = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "red"}


def report_health(target: str, overrides: list[str], out: Path, *, as_json: bool, fix_hints: bool = False) -> None:
    """Examine and print; `fix_hints` adds what to type for each check that is not ok.

    Raises:
        EnvironmentRefused: a check is an error.
    """
    checks = [*examine(load_target(target, overrides), out), variables(resolve(target, overrides))]
    console = make_console()
    if as_json:
        console.file.write(json.dumps([check.model_dump(mode="json") for check in checks], indent=1) + "\n")
    else:
        console.print(table_of(checks))
        print_remedies(console, checks, commands=fix_hints)
    require_healthy(checks)


def variables(lock: Lock) -> Check:
    """Environment variables that a run would refuse."""
    needed = "none that would change what the lock fixes"
    try:
        refuse_influences(os.environ, lock)
    except UsageError as error:
        found = "; ".join(line.strip() for line in error.found.splitlines()[1:])
        return Check(name="variables", severity=Severity.ERROR, found=found, needed=needed, remedy=error.remedy)
    return Check(name="variables", severity=Severity.OK, found="none", needed=needed)


def table_of(checks: Sequence[Check]) -> Table:
    """The checks as a table. Texts of the machine's are shown as they are, not as markup."""
    table = make_table("check", "", "found", "needed")
    for check in checks:
        state = Text(str(check.severity), style=COLOURS[check.severity])
        table.add_row(check.name, state, Text(check.found), Text(check.needed))
    return table


def print_remedies(console: Console, checks: Sequence[Check], *, commands: bool) -> None:
    """What to do about each check that is not ok; its commands on lines of their own, to copy."""
    for check in checks:
        if check.severity is not Severity.OK:
            console.print(f"{check.severity}: {check.name}: {check.remedy}", markup=False, soft_wrap=True)
            for command in check.fix if commands else ():
                console.print(f"    {command}", markup=False, soft_wrap=True)
