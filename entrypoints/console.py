"""Where the verbs print, and tables that lose no word there."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from verify.findings import plain

LOG_WIDTH = 120
"""Columns of a log or a pipe. Rich's own 80 would cut words of the tables, and nobody can widen a log afterwards."""


class PlainConsole(Console):
    """Shows a text as it is. Much of what is printed is from records, trust files and the machine: `[x]` is no markup,
    `:x:` no picture, and a control character cannot steer the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as rich would lay it out, each line without what does not print."""
        return super().render_str("\n".join(map(plain, text.split("\n"))), **options)

    def on_broken_pipe(self) -> None:
        """Leave it to the verb; rich would end the process with 1, which says that a record failed."""
        self.quiet = True
        raise BrokenPipeError


def discard_output() -> None:
    """Nobody takes what is printed from here on: Python's own flush at the end must not fail over it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; elsewhere as `COLUMNS` says, or `LOG_WIDTH`."""
    console = PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = LOG_WIDTH
    return console


def make_table(*heads: str | Column, **options: Any) -> Table:
    """A rich table; a word that is too long for its column goes on in the next line, where rich would cut it."""
    table = Table(*heads, **options)
    for column in table.columns:
        column.overflow = "fold"
    return table
