"""The command line: what it teaches, what it refuses, with which code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from config.lock import resolve, target_names

VERBS = ("print", "doctor", "synth", "benchmark", "keygen", "sign", "verify", "report", "roofline")


def sol(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "entrypoints.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_help_names_every_verb_and_the_exit_codes() -> None:
    finished = sol("--help")
    assert finished.returncode == 0
    for verb in VERBS:
        assert verb in finished.stdout
    assert "13 invalid record" in " ".join(finished.stdout.split())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    assert sol(verb, "--help").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("print", "rtx4900"), "did you mean 'rtx4090'?"),
        (("print", "cpu", "--set", "sol_attn.tao=1"), "did you mean 'tau'?"),
        (("print", "cpu", "--set", "sol_attn.tau=high"), "sol_attn.tau"),
        (("print", "cpu", "--set", "tau"), "section.key=value"),
        (("benchmark", "cpu", "--arm", "dens"), "did you mean 'dense'?"),
        (("benchmark", "cpu", "--arm", "native"), "no arm 'native'"),
        (("benchmark", "cpu", "--samples", "0"), "--samples"),
        (("synth", "rtx4090"), "published checkpoint"),
        (("benchmark", "cpu", "--no-sign", "--key", "/nowhere"), "--key beside --no-sign"),
        (("bench", "cpu"), "No such command"),
        (("sign", "/nowhere"), "/nowhere"),
    ],
)
def test_wrong_words_exit_2_with_one_message(arguments: tuple[str, ...], text: str) -> None:
    finished = sol(*arguments)
    assert finished.returncode == 2, finished.stderr
    assert text in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_gpu_target_without_a_gpu_exits_10_and_says_what_is_missing() -> None:
    finished = sol("doctor", "h100x4")
    assert finished.returncode == 10
    assert "needed: gpu: 4x NVIDIA H100 80GB HBM3" in finished.stderr
    assert finished.stdout.count("error") >= 1


def test_print_gives_the_lock_as_json() -> None:
    finished = sol("print", "cpu", "--json")
    assert json.loads(finished.stdout)["digest"] == resolve("cpu").digest


def test_print_all_lists_every_target() -> None:
    finished = sol("print", "all")
    for name in target_names():
        assert name in finished.stdout


def test_a_directory_that_is_no_record_exits_13(tmp_path: Path) -> None:
    for verb in ("verify", "report"):
        finished = sol(verb, tmp_path)
        assert finished.returncode == 13, finished.stderr
        assert "Traceback" not in finished.stderr


def test_keygen_writes_a_private_key_that_only_its_owner_reads_and_never_overwrites(tmp_path: Path) -> None:
    key = tmp_path / "mine.pem"
    first = sol("keygen", key)
    assert first.returncode == 0, first.stderr
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_bytes()
    second = sol("keygen", key)
    assert second.returncode == 2
    assert key.read_bytes() == before


def test_a_verb_whose_part_is_missing_says_how_to_get_it(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['sglang'] = None; "
        "sys.argv = ['sol', 'benchmark', 'cpu']; from entrypoints.cli import main; main()"
    )
    own = {**os.environ, "SOL_CACHE": str(tmp_path)}  # not the user's, where a checkpoint may be damaged
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=own)
    assert finished.returncode == 10, finished.stderr
    assert "make demo" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("words", [("benchmark", "cpu"), ("doctor", "cpu"), ("fetch", "rtx4090")])
def test_a_verb_without_its_part_says_which_and_how_to_get_it(words: tuple[str, ...]) -> None:
    """sol-verify printed a traceback: the packages of the engine were missed before the message was in place."""
    script = (
        "import sys; sys.modules['packaging'] = sys.modules['torch'] = sys.modules['httpx'] = None\n"
        "sys.modules['huggingface_hub'] = sys.modules['tqdm'] = None\n"
        "from entrypoints.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert done.returncode == 10, done.stderr
    assert "this verb needs the engine part" in done.stderr and "Traceback" not in done.stderr


def test_synthetic_weights_stand_for_overrides_and_make_the_run_open() -> None:
    from entrypoints.cli import Weights, weights_overrides

    lock = resolve("rtx4090", weights_overrides("rtx4090", Weights.SYNTHETIC))
    assert {override.key for override in lock.overrides} == {
        f"checkpoint.{x}" for x in ("kind", "repo", "revision", "preset")
    }
    assert (lock.resolved.checkpoint.kind, lock.resolved.checkpoint.preset) == ("synthetic", "full")
    assert weights_overrides("rtx4090", None) == weights_overrides("h200", Weights.SYNTHETIC) == []
    finished = sol("benchmark", "h200", "--weights", "real")
    assert finished.returncode == 2 and "'real' is not one of 'synthetic'" in finished.stderr
