"""Lists of forwards for `cache.replay`: the short form `0-4,9,14`, and the named lists of replays.toml."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from config.errors import UsageError
from config.schema import Model, Name

FILE = Path(__file__).resolve().parent / "replays.toml"
MOST = 10_000
"""More forwards than any request has: a range cannot make its reader count without end."""
_RANGES = re.compile(r"\s*\d{1,9}\s*(-\s*\d{1,9}\s*)?(,\s*\d{1,9}\s*(-\s*\d{1,9}\s*)?)*", re.ASCII)


class NamedList(Model):
    """A list of computed forwards that ships, for one cache and one number of forwards."""

    name: Name
    cache: Literal["teacache", "firstblockcache"]
    forwards: int = Field(ge=1)
    steps: str
    count: int = Field(ge=1, description="computed forwards")
    source: str = Field(min_length=1)

    @property
    def listed(self) -> tuple[int, ...]:
        """The computed forwards."""
        return parse_steps(self.steps)

    @model_validator(mode="after")
    def _counted(self) -> NamedList:
        if len(set(self.listed)) != self.count or max(self.listed) >= self.forwards:
            raise ValueError(f"{self.name} for {self.cache} is not {self.count} of {self.forwards} forwards")
        return self


class NamedLists(Model):
    """replays.toml."""

    schema_version: Literal[1]
    lists: tuple[NamedList, ...] = Field(strict=False, min_length=1)


@cache
def named_lists() -> tuple[NamedList, ...]:
    """Every list that ships."""
    return NamedLists.model_validate(tomllib.loads(FILE.read_text("utf-8"))).lists


def parse_steps(text: str) -> tuple[int, ...]:
    """Forwards of the short form: numbers and inclusive ranges, with commas; spaces do not matter.

    Raises:
        UsageError: the text is not of that form, or a range runs backwards or beyond any request.
    """
    if not _RANGES.fullmatch(text):
        raise UsageError(f"{text!r} is no list of forwards", remedy="--set cache.replay=0-4,9,14 or =[0, 1, 9]")
    steps: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not low <= high < MOST:
            raise UsageError(
                f"{part.strip()!r} is no range of forwards", needed=f"rising, and below {MOST}", remedy="0-4 or 9"
            )
        steps += range(low, high + 1)
    return tuple(steps)


def format_steps(steps: tuple[int, ...]) -> str:
    """The short form of rising forwards: three or more in a row become a range."""
    parts: list[str] = []
    at = 0
    while at < len(steps):
        end = at
        while end + 1 < len(steps) and steps[end + 1] == steps[end] + 1:
            end += 1
        if end - at >= 2:
            parts.append(f"{steps[at]}-{steps[end]}")
        else:
            parts += [str(step) for step in steps[at : end + 1]]
        at = end + 1
    return ",".join(parts)


def expand(value: str, kind: str) -> tuple[int, ...]:
    """What a text means as `cache.replay` of a cache of this kind: a named list, or the short form; empty: no list.

    Raises:
        UsageError: it is neither.
    """
    if not value.strip():
        return ()
    if value.strip()[0].isdecimal():
        return parse_steps(value)
    for entry in named_lists():
        if (entry.name, entry.cache) == (value.strip(), kind):
            return entry.listed
    known = sorted({entry.name for entry in named_lists() if entry.cache == kind})
    raise UsageError(
        f"cache.replay: no list {value!r} for {kind or 'this cache'}",
        needed=f"{', '.join(known) or 'no list is named for it'}; or forwards",
        remedy="--set cache.replay=published-count, or =0-4,9,14",
    )
