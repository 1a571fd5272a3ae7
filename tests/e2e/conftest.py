"""Runs of the real thing: `sol` in a process of its own, SGLang's whole pipeline behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SHORT = (
    "--set",
    "request.num_inference_steps=5",
    "--set",
    "warmup.num_inference_steps=5",
    "--set",
    "sol_attn.dense_steps=1",
    "--set",
    "cache.retain_steps=2",
    "--set",
    "request.prompt=flamenco",
)
"""An open run of four forwards and a short prompt, for tests that only need a run to happen."""


@dataclass(frozen=True)
class Finished:
    """A `sol` that ended."""

    code: int
    output: str

    def record(self, out: Path) -> Path:
        """The only record under `out`."""
        (path,) = (path for path in out.iterdir() if (path / "status").exists())
        return path


class Sol:
    """Starts `sol` with a cache shared by all tests of the session."""

    def __init__(self, cache: Path) -> None:
        self.environment = {**os.environ, "SOL_CACHE": str(cache), "COLUMNS": "200"}

    def start(self, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "entrypoints.cli", *map(str, arguments)],
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *arguments: object, timeout: float = 800, **environment: str) -> Finished:
        process = self.start(*arguments, **environment)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Finished(process.returncode, output)


@pytest.fixture(scope="session")
def sol(tmp_path_factory: pytest.TempPathFactory) -> Sol:
    cache = tmp_path_factory.mktemp("cache")
    runner = Sol(cache)
    finished = runner("synth", "cpu")
    assert finished.code == 0, finished.output
    return runner


@pytest.fixture(scope="session")
def locked_run(sol: Sol, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """`sol benchmark cpu --arm all`, as a user types it."""
    out = tmp_path_factory.mktemp("locked")
    finished = sol("benchmark", "cpu", "--arm", "all", "--out", out, timeout=1500)
    return Finished(finished.code, finished.output + f"\nOUT={out}")


@pytest.fixture(scope="session")
def locked_record(locked_run: Finished) -> Path:
    assert locked_run.code == 0, locked_run.output
    return locked_run.record(Path(locked_run.output.rsplit("OUT=", 1)[1]))


def events(record: Path, arm: str, *kinds: str) -> Iterator[dict[str, Any]]:
    """Events of an arm, optionally of some kinds."""
    for line in (record / "arms" / arm / "events-rank0.jsonl").read_text().splitlines():
        event = json.loads(line)
        if not kinds or event["event"] in kinds:
            yield event


def benchmark(record: Path) -> dict[str, Any]:
    """benchmark.json."""
    return json.loads((record / "benchmark.json").read_text())
