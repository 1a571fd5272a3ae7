"""What holds for every test module."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _environment_ends_with_the_module() -> Iterator[None]:
    """A module that imports SGLang in this process, for a CPU, leaves no variable to what later tests start.

    `sol` refuses such variables by name, so a leak made tests fail only when they ran after those modules.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
