"""What scripts/bootstrap.sh decides, in a sandbox: a PATH of its own, a pip that only writes down what it is asked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PINS = tomllib.loads((ROOT / "images/cpu/image.toml").read_text(encoding="utf-8"))["torch"]
CODES = {"environment": 10, "interrupted": 130}
TOOLS = (
    "bash cat cut dirname env find flock grep kill ls mkdir mv rm sha256sum sleep tail uname".split()
)  # everything else is missing until a test adds it

FAKE_PIP = '''\
"""Stands in for pip: writes its arguments down; environment variables say how it behaves."""
import json, os, pathlib, sys, sysconfig, time
arguments = sys.argv[1:]
asked = " ".join(arguments)
with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    log.write(json.dumps(arguments) + "\\n")
site = pathlib.Path(sysconfig.get_paths()["purelib"])
hang = os.environ.get("FAKE_PIP_HANG")
if hang and hang in asked:
    (site / "half_installed.py").write_text("")
    time.sleep(120)
failing = os.environ.get("FAKE_PIP_FAIL")
if failing and failing.split(":")[0] in asked:
    count = pathlib.Path(os.environ["FAKE_PIP_LOG"] + ".failures")
    before = int(count.read_text()) if count.exists() else 0
    if before < int(failing.split(":")[1]):
        count.write_text(str(before + 1))
        sys.exit("ERROR: Connection broken: IncompleteRead")
if "torch.txt" in asked:
    if os.environ.get("FAKE_PIP_TORCH_ELSEWHERE") and "--index-url" not in asked:
        sys.exit("ERROR: No matching distribution found for torch==2.13.0+cpu")
    (site / "torch.py").write_text(
        "class version:\\n    cuda = %r\\n" % os.environ.get("FAKE_PIP_CUDA"))
'''


class Sandbox:
    """A checkout, a PATH and a pip of its own."""

    def __init__(self, folder: Path) -> None:
        self.repo = folder / "checkout"
        self.bin = folder / "bin"
        self.log = folder / "pip.log"
        self.venv = self.repo / ".venv"
        (self.repo / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts/bootstrap.sh", self.repo / "scripts")
        shutil.copytree(ROOT / "images/cpu", self.repo / "images/cpu")
        shutil.copy(ROOT / "pyproject.toml", self.repo)
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"{tool} is needed to run this test"
            (self.bin / tool).symlink_to(found)
        self.script("id", "echo 1000")  # nobody in particular: no package manager may be used
        real_sleep = shutil.which("sleep")
        (self.bin / "sleep").unlink()
        self.script("sleep", f'[ "$1" -le 3 ] || exec {real_sleep} "$@"')  # no waiting between attempts
        self.ffmpeg(libx264=True)
        self.python("python3.11")

    def script(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!{shutil.which('bash')}\n{body}\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def ffmpeg(self, *, libx264: bool) -> None:
        self.script("ffmpeg", f"echo ' V....D {'libx264' if libx264 else 'libopenh264'} H.264'")
        self.script("ffprobe", "exit 0")

    def python(self, name: str, *, ensurepip: bool = True) -> None:
        """A Python under this name, whose environments get the fake pip."""
        pip = self.bin.parent / "pip"
        pip.mkdir(exist_ok=True)
        (pip / "__main__.py").write_text(FAKE_PIP, encoding="utf-8")
        refuse = "" if ensurepip else 'case "$*" in *ensurepip*) exit 1 ;; esac\n'
        self.script(
            name,
            f'{refuse}if [ "$1 $2" = "-m venv" ]; then\n'
            f'  {sys.executable} -m venv --without-pip "$3" || exit 1\n'
            f'  for site in "$3"/lib/python*/site-packages; do {shutil.which("cp")} -r {pip} "$site/pip"; done\n'
            f'else exec {sys.executable} "$@"; fi',
        )

    def environment(self, **extra: str) -> dict[str, str]:
        return {"PATH": str(self.bin), "HOME": str(self.bin.parent), "FAKE_PIP_LOG": str(self.log), **extra}

    def start(self, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "scripts/bootstrap.sh"],
            cwd=self.repo,
            env=self.environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A script's background jobs are begun with SIGINT ignored, and bash cannot trap a signal that is.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, **extra: str) -> subprocess.CompletedProcess[str]:
        process = self.start(**extra)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self) -> list[list[str]]:
        """What pip was asked since the last look."""
        if not self.log.exists():
            return []
        lines = self.log.read_text(encoding="utf-8").splitlines()
        self.log.unlink()
        return [json.loads(line) for line in lines]

    def hang_in(self, step: str) -> subprocess.Popen[str]:
        """Start a set-up and come back while pip is in the middle of `step`."""
        process = self.start(FAKE_PIP_HANG=step)
        deadline = time.monotonic() + 60
        while not list(self.venv.glob("lib/python*/site-packages/half_installed.py")):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.02)
        return process


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def step_of(call: list[str]) -> str:
    asked = " ".join(call)
    for word in ("torch.txt", "requirements-dev.lock", "requirements.lock", "--editable"):
        if word in asked:
            return word
    return asked


EVERYTHING = ["torch.txt", "requirements.lock", "requirements-dev.lock", "--editable"]


def test_fresh_setup_installs_everything_by_hash_and_without_a_resolver(sandbox: Sandbox) -> None:
    done = sandbox.run()
    assert done.returncode == 0, done.stderr
    calls = sandbox.calls()
    assert [step_of(call) for call in calls] == EVERYTHING
    for call in calls:
        assert call[0] == "install" and "--no-deps" in call
    for call in calls[:3]:
        assert "--require-hashes" in call and call[call.index("--only-binary") + 1] == ":all:"
    assert "--no-build-isolation" in calls[3]
    tag = f"cp3{sys.version_info.minor}"
    expected = [
        w["sha256"] for w in PINS["wheels"] if tag in w["file"] and w["file"].endswith(f"{os.uname().machine}.whl")
    ]
    asked = (sandbox.venv / ".setup/torch.txt").read_text(encoding="utf-8").split()
    assert asked == [f"torch=={PINS['version']}", f"--hash=sha256:{expected[0]}"]
    assert "[setup 0:" in done.stdout and "ready" in done.stdout


def test_second_setup_does_nothing(sandbox: Sandbox) -> None:
    assert sandbox.run().returncode == 0
    sandbox.calls()
    assert sandbox.run().returncode == 0
    assert sandbox.calls() == []


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("images/cpu/requirements.lock", EVERYTHING),
        ("images/cpu/requirements-dev.lock", ["requirements-dev.lock"]),
        ("pyproject.toml", ["--editable"]),
    ],
)
def test_only_what_changed_is_installed_again(sandbox: Sandbox, changed: str, again: list[str]) -> None:
    assert sandbox.run().returncode == 0
    sandbox.calls()
    with (sandbox.repo / changed).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert sandbox.run().returncode == 0
    assert [step_of(call) for call in sandbox.calls()] == again


def test_another_torch_pin_rebuilds(sandbox: Sandbox) -> None:
    assert sandbox.run().returncode == 0
    sandbox.calls()
    image = sandbox.repo / "images/cpu/image.toml"
    image.write_text(image.read_text(encoding="utf-8").replace(PINS["version"], "2.13.1+cpu"), encoding="utf-8")
    assert sandbox.run().returncode == 0
    assert [step_of(call) for call in sandbox.calls()] == EVERYTHING


def test_moved_checkout_rebuilds(sandbox: Sandbox) -> None:
    assert sandbox.run().returncode == 0
    sandbox.calls()
    moved = sandbox.repo.with_name("elsewhere")
    sandbox.repo.rename(moved)
    sandbox.repo, sandbox.venv = moved, moved / ".venv"
    assert sandbox.run().returncode == 0
    assert [step_of(call) for call in sandbox.calls()] == EVERYTHING


def test_torch_comes_from_pytorch_where_pip_knows_no_cpu_build(sandbox: Sandbox) -> None:
    done = sandbox.run(FAKE_PIP_TORCH_ELSEWHERE="1")
    assert done.returncode == 0, done.stderr
    first, second = [call for call in sandbox.calls() if step_of(call) == "torch.txt"]
    assert "--index-url" not in first
    assert second[second.index("--index-url") + 1] == "https://download.pytorch.org/whl/cpu"
    assert "--require-hashes" in second


def test_cuda_build_of_torch_is_refused_and_not_taken_for_finished(sandbox: Sandbox) -> None:
    done = sandbox.run(FAKE_PIP_CUDA="13.0")
    assert done.returncode == CODES["environment"]
    assert "built for CUDA 13.0" in done.stderr and PINS["version"] in done.stderr
    sandbox.calls()
    assert sandbox.run().returncode == 0
    assert [step_of(call) for call in sandbox.calls()] == EVERYTHING


def test_no_torch_wheel_for_this_machine_is_said_before_anything_is_downloaded(sandbox: Sandbox) -> None:
    image = sandbox.repo / "images/cpu/image.toml"
    image.write_text(image.read_text(encoding="utf-8").replace("manylinux_2_28", "plan9"), encoding="utf-8")
    done = sandbox.run()
    assert done.returncode == CODES["environment"]
    assert "no CPU build" in done.stderr and sandbox.calls() == []


def test_cut_download_is_tried_again(sandbox: Sandbox) -> None:
    done = sandbox.run(FAKE_PIP_FAIL="requirements.lock:2")
    assert done.returncode == 0, done.stderr
    assert [step_of(call) for call in sandbox.calls()].count("requirements.lock") == 3
    assert "attempt 3 of 3" in done.stdout


def test_download_that_stays_cut_is_one_message_and_the_next_run_goes_on(sandbox: Sandbox) -> None:
    done = sandbox.run(FAKE_PIP_FAIL="requirements.lock:9")
    assert done.returncode == CODES["environment"]
    assert "IncompleteRead" in done.stderr and "network" in done.stderr and "Traceback" not in done.stderr
    assert sandbox.run().returncode == 0


@pytest.mark.parametrize("step", ["torch.txt", "requirements.lock", "requirements-dev.lock", "--editable"])
def test_setup_killed_in_any_step_is_finished_by_the_next(sandbox: Sandbox, step: str) -> None:
    process = sandbox.hang_in(step)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    sandbox.calls()
    done = sandbox.run()
    assert done.returncode == 0, done.stderr
    assert [step_of(call) for call in sandbox.calls()] == EVERYTHING
    assert not list(sandbox.venv.glob("lib/python*/site-packages/half_installed.py")), "half an installation survived"


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_setup_takes_pip_with_it(sandbox: Sandbox, sent: signal.Signals, code: int) -> None:
    process = sandbox.hang_in("requirements.lock")
    process.send_signal(sent)
    process.communicate(timeout=30)
    assert process.returncode == code
    # pip held the lock: a run that gets it within its time limit shows that pip is gone
    assert sandbox.run().returncode == 0


def test_two_setups_at_once_install_once(sandbox: Sandbox) -> None:
    both = [sandbox.start(), sandbox.start()]
    texts = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    assert sorted(step_of(call) for call in sandbox.calls()) == sorted(EVERYTHING)


def test_folder_that_somebody_else_made_is_left_alone(sandbox: Sandbox) -> None:
    precious = sandbox.repo / "mine"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work", encoding="utf-8")
    done = sandbox.run(SOL_VENV=str(precious))
    assert done.returncode == CODES["environment"]
    assert "not made by this script" in done.stderr
    assert (precious / "thesis.txt").read_text(encoding="utf-8") == "years of work"
    assert sorted(path.name for path in precious.iterdir()) == ["thesis.txt"]


def test_sol_venv_says_where(sandbox: Sandbox, tmp_path: Path) -> None:
    done = sandbox.run(SOL_VENV=str(tmp_path / "deep/er"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "deep/er/bin/python").exists() and not sandbox.venv.exists()


def test_name_on_path_that_refuses_to_run_is_passed_over(sandbox: Sandbox) -> None:
    sandbox.script("python3.11", "echo 'python3.11: command not found' >&2; exit 127")  # a version manager's shim
    sandbox.python("python3.13")
    assert sandbox.run().returncode == 0


def test_no_python_names_the_package(sandbox: Sandbox) -> None:
    (sandbox.bin / "python3.11").unlink()
    done = sandbox.run()
    assert done.returncode == CODES["environment"]
    assert "No CPython 3.11, 3.12 or 3.13" in done.stderr
    assert "sudo apt-get install -y python3.1" in done.stderr and "-venv" in done.stderr


def test_unfit_sol_python_is_refused(sandbox: Sandbox) -> None:
    done = sandbox.run(SOL_PYTHON="no-such-python")
    assert done.returncode == CODES["environment"] and "SOL_PYTHON=no-such-python" in done.stderr


def test_python_without_ensurepip_names_the_package(sandbox: Sandbox) -> None:
    sandbox.python("python3.11", ensurepip=False)
    done = sandbox.run()
    assert done.returncode == CODES["environment"]
    assert f"apt-get install -y --no-install-recommends python3.{sys.version_info.minor}-venv" in done.stderr
    assert sandbox.calls() == []


@pytest.mark.parametrize("missing", ["ffmpeg", "ffprobe", "libx264"])
def test_missing_ffmpeg_is_one_message_before_any_download(sandbox: Sandbox, missing: str) -> None:
    if missing == "libx264":
        sandbox.ffmpeg(libx264=False)
    else:
        (sandbox.bin / missing).unlink()
    done = sandbox.run()
    assert done.returncode == CODES["environment"]
    assert "sudo apt-get update && sudo apt-get install -y --no-install-recommends ffmpeg" in done.stderr
    assert sandbox.calls() == []


@pytest.mark.parametrize("who", ["root", "passwordless sudo"])
def test_missing_ffmpeg_is_installed_by_who_may(sandbox: Sandbox, who: str, tmp_path: Path) -> None:
    for name in ("ffmpeg", "ffprobe"):
        (sandbox.bin / name).rename(tmp_path / name)
    copy = shutil.which("cp")
    sandbox.script(
        "apt-get",
        f'echo "$*" >> {tmp_path}/apt.log; case "$*" in *install*) {copy} {tmp_path}/ff* {sandbox.bin} ;; esac',
    )
    if who == "root":
        sandbox.script("id", "echo 0")
    else:
        sandbox.script("sudo", '[ "$1" = -n ] && shift && exec "$@"')
        sandbox.script("true", "exit 0")
    done = sandbox.run()
    assert done.returncode == 0, done.stderr
    update, install = (tmp_path / "apt.log").read_text(encoding="utf-8").splitlines()
    assert update.endswith("update") and install.endswith("install -y --no-install-recommends ffmpeg")


def test_ffmpeg_that_hides_the_installed_one_is_named(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.ffmpeg(libx264=False)
    sandbox.script("id", "echo 0")
    sandbox.script("apt-get", "exit 0")
    done = sandbox.run()
    assert done.returncode == CODES["environment"]
    assert str(sandbox.bin / "ffmpeg") in done.stderr and "PATH" in done.stderr
