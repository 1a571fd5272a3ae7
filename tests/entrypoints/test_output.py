"""What the verbs print: texts of others as they are, and a clear end where nothing can be written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config.record import BENCHMARK
from tests.verify.builder import Builder, edit
from verify.keys import keygen

ROOT = Path(__file__).resolve().parents[2]
RECORD = min((ROOT / "benchmarks/records").glob("2*"))
SOL = [sys.executable, "-m", "entrypoints.cli"]


def sol(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*SOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("arguments", [("verify", RECORD, "--json"), ("print", "cpu", "--json"), ("print", "cpu")])
def test_where_nothing_can_be_printed_the_exit_code_is_the_environments(arguments: tuple[object, ...]) -> None:
    """`sol verify RUN --json > verdict.json` on a full disk is no failed record."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([*SOL, *map(str, arguments)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 10, done.stderr
    assert "No space left on device" in done.stderr and "Traceback" not in done.stderr


def test_a_reader_that_had_enough_changes_no_verdict() -> None:
    process = subprocess.Popen([*SOL, "verify", str(RECORD)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 14


@pytest.mark.parametrize("name", ["[/bold]", "a[b]:smile:", "\\u001b[2Jx"])
def test_a_name_in_a_trust_file_is_no_markup_and_cannot_steer_a_terminal(tmp_path: Path, name: str) -> None:
    keygen(tmp_path / "key")
    trust = tmp_path / "trust.toml"
    trust.write_text(f'[[keys]]\nname = "{name}"\npem = "key.pub"\n')
    done = sol("verify", RECORD, "--trust", trust)
    assert done.returncode == 14, done.stderr
    shown = name.replace("\\u001b", "\N{REPLACEMENT CHARACTER}")
    assert f"not signed by {shown}" in done.stdout and "\x1b" not in done.stdout


@pytest.mark.parametrize("target", ["[/x]", "\x1b]0;pwn\x1b\\\x1b[2Jh200", ":smile:"])
def test_a_target_in_a_record_is_no_markup_and_cannot_steer_a_terminal(tmp_path: Path, target: str) -> None:
    record = Builder(arms=("dense",)).build(tmp_path / "record")
    edit(record / BENCHMARK, lambda value: value.update(target=target))
    done = sol("report", record)
    assert done.returncode == 0, done.stderr
    assert f"target {target}".replace("\x1b", "\N{REPLACEMENT CHARACTER}") in done.stdout


@pytest.mark.parametrize("value", ["[/x]", "a[b]c"])
def test_a_value_of_the_users_is_no_markup(value: str) -> None:
    done = sol("print", "cpu", "--set", f"env.X={value}")
    assert done.returncode == 0, done.stderr
    assert json.dumps(value) in done.stdout


def test_a_record_of_a_target_that_this_release_does_not_know_has_one_verdict(tmp_path: Path) -> None:
    """The table ended with exit code 2 and no verdict, JSON with 13."""
    record = Builder(arms=("dense",)).build(tmp_path / "record")
    edit(record / "lock.json", lambda value: value.update(target="rtx6000"))
    table, data = sol("verify", record), sol("verify", record, "--json")
    assert table.returncode == data.returncode == 13
    assert "INVALID" in table.stdout and json.loads(data.stdout)["result"] == "INVALID"


def test_all_targets_as_json() -> None:
    found = json.loads(sol("print", "all", "--json").stdout)
    assert {"cpu", "rtx4090", "h100x4", "a100x4"} <= found.keys()
    assert all(len(entry["digest"]) == 64 and entry["title"] for entry in found.values())
    refused = sol("print", "all", "--set", "sol_attn.tau=1")
    assert refused.returncode == 2 and "name the target" in refused.stderr


def test_the_doctor_names_a_variable_that_a_run_refuses() -> None:
    done = sol("doctor", "cpu", env={**os.environ, "SGLANG_FOO": "secret"})
    assert done.returncode == 10
    assert "SGLANG_FOO" in done.stdout and "secret" not in done.stdout + done.stderr


def test_a_report_of_what_is_no_file_ends(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    os.mkfifo(tmp_path / "record/benchmark.json")
    done = sol("report", tmp_path / "record", timeout=60)
    assert done.returncode == 13 and "benchmark.json" in done.stderr
    assert sol("report", tmp_path / "nothing").returncode == 2


def test_a_report_of_a_number_beyond_all_is_refused(tmp_path: Path) -> None:
    record = Builder(arms=("dense",)).build(tmp_path / "record")
    text = (record / BENCHMARK).read_text()
    start = text.index('"median":') + len('"median":')
    end = min(text.index(",", start), text.index("}", start))
    (record / BENCHMARK).write_text(text[:start] + "1e999" + text[end:])
    done = sol("report", record)
    assert done.returncode == 13 and "inf" not in done.stdout


@pytest.mark.parametrize("name", [".", "", "/"])
def test_a_key_needs_a_files_name(name: str) -> None:
    done = sol("keygen", name)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_key_that_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    """An empty file stood in the way of the next try: keys are never overwritten."""
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("a full disk is mounted here, which needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", disk], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with (disk / "filler").open("wb") as file:
            try:
                file.write(bytes(1 << 16))
                file.flush()
            except OSError:
                pass
        done = sol("keygen", disk / "key")
        assert done.returncode == 2 and "No space left" in done.stderr
        assert sorted(path.name for path in disk.iterdir()) == ["filler"]
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_run_has_its_handlers_is_an_interrupt(number: signal.Signals) -> None:
    script = "import time, entrypoints.cli as c\nc.app = lambda **_: time.sleep(60)\nprint('up', flush=True)\nc.main()"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", script], **pipes, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in errors
