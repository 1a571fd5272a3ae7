"""SGLang's modules inside a test's own process, for the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

import pytest

from engine.h3.cpu import declare_torchvision_operators


def module(name: str) -> ModuleType:
    """A module of SGLang (about 15 s in a fresh process); the test is skipped where SGLang is not installed.

    The variable that it leaves ends with the test module (tests/conftest.py).
    """
    if importlib.util.find_spec("sglang") is None:
        pytest.skip(f"SGLang is not installed: {name} is what this test compares with")
    os.environ["SGLANG_DIFFUSION_PLATFORM_OVERRIDE"] = "cpu"
    declare_torchvision_operators()
    return importlib.import_module(name)
