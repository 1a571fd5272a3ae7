"""Stand-ins for packages that MiniMax-H3 never uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
from pydantic import create_model

from engine.h3 import unused_packages


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that no machine has, among those that are stood in for."""
    name = "sol_h3_no_such_package"
    before = list(sys.meta_path)
    monkeypatch.setattr(unused_packages, "UNUSED", (name, "json"))
    yield name
    sys.meta_path[:] = before
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def test_only_what_is_absent_is_stood_in_for(absent: str) -> None:
    assert unused_packages.install() == [f"stand_in.{absent}"]
    assert importlib.import_module("json").loads("1") == 1


def test_its_names_import_annotate_and_raise_when_they_are_used(absent: str) -> None:
    unused_packages.install()
    thing = importlib.import_module(f"{absent}.part.deeper").Thing

    annotated = create_model("Annotated", thing=(thing | None, None))
    assert annotated().model_dump() == {"thing": None}
    with pytest.raises(RuntimeError, match=rf"{absent}\.part\.deeper\.Thing was used, but {absent} is not installed"):
        thing()
    with pytest.raises(AttributeError):
        _ = importlib.import_module(absent).__wrapped__
