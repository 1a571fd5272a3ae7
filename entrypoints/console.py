"""Where the verbs print, and tables that lose no word there."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.table import Column, Table

LOG_WIDTH = 120
"""Columns of a log or a pipe. Rich's own 80 would cut words of the tables, and nobody can widen a log afterwards."""


def make_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; elsewhere as `COLUMNS` says, or `LOG_WIDTH`."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = LOG_WIDTH
    return console


def make_table(*heads: str | Column, **options: Any) -> Table:
    """A rich table; a word that is too long for its column goes on in the next line, where rich would cut it."""
    table = Table(*heads, **options)
    for column in table.columns:
        column.overflow = "fold"
    return table
