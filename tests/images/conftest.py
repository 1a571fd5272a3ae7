"""A real engine, a base made here, and the images built on it: once a session, and within a budget of time.

Everything is skipped, with the engine's own reason, where none can be started. Nothing is pulled and no index is asked
from within a build: the wheels are downloaded here, by hash, with pip as this machine has it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUDGET_SECONDS = int(os.environ.get("SOL_IMAGE_TESTS_SECONDS", 35 * 60))
"""For all tests of this folder together, from nothing; then they fail. The variable is for busy machines."""
DISK_BYTES = 32 * 10**9
"""Free space that these tests need for the engine's store and pytest's folder together; 28.8 GB were seen in use."""
MARKER = "sol-test-" + uuid.uuid4().hex
"""Stands in every secret that a test hands to a build or a run, and must stand nowhere else."""


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    output: str
    seconds: float


@dataclass
class Docker:
    """The engine, the wheels, a snapshot of the checkout, and what is left of the budget."""

    environment: dict[str, str]
    scratch: Path
    tree: Path
    wheels: Path
    deadline: float
    built: set[str] = field(default_factory=set)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def run(self, *words: object, cwd: Path | None = None, **environment: str) -> Done:
        """Run a command to its end, its standard error joined to its output."""
        if self.left() < 5:
            pytest.fail(f"the {BUDGET_SECONDS} s for all image tests are used up")
        begun = time.monotonic()
        done = subprocess.run(
            [str(word) for word in words],
            cwd=cwd or self.tree,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.left(),
        )
        return Done(done.returncode, done.stdout, time.monotonic() - begun)

    def build(self, target: str, *options: object, root: Path | None = None) -> Done:
        """Build one image with the project's own script, on the base that was made here."""
        script = [sys.executable, ROOT / "scripts/build_image.py", target, "--root", root or self.tree]
        done = self.run(*script, "--local-base", "--wheels", self.wheels, "--progress", "plain", *options)
        assert done.code == 0, done.output[-4000:]
        return done

    def image(self, target: str, *options: object, root: Path | None = None) -> str:
        """The name of an image in the engine; built on first use."""
        if target not in self.built:
            self.build(target, *options, root=root)
            self.built.add(target)
        return f"sol-{target}"

    def uncompressed_bytes(self, image: str) -> int:
        """What the files of an image take on a disk."""
        options = ("--rm", "--user", "0", "--network", "none", "--entrypoint", "du")
        return 1024 * int(self.run("docker", "run", *options, image, "-sxk", "/").output.split()[-2])

    def archive(self, target: str, *options: object) -> Path:
        """An OCI archive of an image that was built, from the cache unless an option says otherwise."""
        archive = self.scratch / f"{target}{''.join(map(str, options))}.tar"
        if not archive.exists():
            self.build(target, "--oci", archive, *options)
        return archive

    def hardened(self, image: str, *words: object, options: tuple[object, ...] = ()) -> Done:
        """`docker run` as the compose file does it: a user of no name, nothing writable but volumes, no network."""
        narrow = ["--rm", "--read-only", "--cap-drop", "ALL", "--network", "none", "--user", "12345:12345"]
        return self.run("docker", "run", *narrow, "--security-opt", "no-new-privileges", *options, image, *words)

    def inspect(self, image: str) -> dict[str, Any]:
        done = self.run("docker", "image", "inspect", image)
        assert done.code == 0, done.output
        (document,) = json.loads(done.output)
        return document


def layer_files(archive: Path) -> Iterator[tuple[str, tarfile.TarInfo, bytes]]:
    """Every entry of every layer of an OCI archive: layer number and path, what tar says of it, its bytes."""
    with tarfile.open(archive) as outer:

        def blob(descriptor: dict[str, Any]) -> Any:
            handle = outer.extractfile(f"blobs/{descriptor['digest'].replace(':', '/')}")
            assert handle is not None
            return handle

        index = outer.extractfile("index.json")
        assert index is not None
        (described,) = json.load(index)["manifests"]
        layers = json.load(blob(described))["layers"]
        assert len(layers) > 3
        for number, layer in enumerate(layers):
            with tarfile.open(fileobj=blob(layer), mode="r:") as inner:
                for entry in inner:
                    data = inner.extractfile(entry) if entry.isfile() else None
                    yield f"layer {number}: {entry.name}", entry, data.read() if data else b""


def differing(one: Path, other: Path) -> list[str]:
    """Which files of two archives differ, with what differs; at most 20."""
    found = []
    for (name, a, x), (other_name, b, y) in zip(layer_files(one), layer_files(other), strict=False):
        if name != other_name:
            return [*found, f"{name} stands where {other_name} does"]
        fields = ("size", "mtime", "mode", "uid", "gid", "linkname")
        what = [
            f"{field} {getattr(a, field)} {getattr(b, field)}"
            for field in fields
            if getattr(a, field) != getattr(b, field)
        ]
        if what or x != y:
            found.append(f"{name}: {', '.join(what) or 'content'}")
    return found[:20]


def engine_lines() -> str:
    """What makes a shell talk to the engine that scripts/docker_engine.sh started; empty where it runs none."""
    done = subprocess.run([ROOT / "scripts/docker_engine.sh", "env"], capture_output=True, text=True, check=True)
    return done.stdout


def start_engine() -> dict[str, str]:
    """The environment in which `docker` talks to an engine that works."""
    started = subprocess.run([ROOT / "scripts/docker_engine.sh", "start"], capture_output=True, text=True)
    if started.returncode == 10:
        pytest.skip(f"no Docker engine can be started here: {started.stderr.strip().splitlines()[-1]}")
    assert started.returncode == 0, started.stderr
    environment = dict(os.environ)
    for word in shlex.split(engine_lines().replace('"$PATH"', shlex.quote(environment["PATH"]))):
        name, equals, value = word.partition("=")
        if equals:
            environment[name] = value
    return environment


def require_space(environment: dict[str, str], scratch: Path) -> None:
    """Skip where a build would end in the middle, on a full disk."""
    asked = ["docker", "info", "--format", "{{.DockerRootDir}}"]
    store = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    for place in filter(Path.exists, (scratch, Path(store))):
        free = shutil.disk_usage(place).free
        if free < DISK_BYTES:
            needed = f"needed: {DISK_BYTES / 1e9:.0f} GB; make room, or name other places by SOL_ENGINE_DIR and TMPDIR"
            pytest.skip(f"image tests: {place} has {free / 1e9:.1f} GB free; {needed}")


def snapshot(destination: Path) -> None:
    """A clone with the working tree's files, so that all builds see one state whatever happens meanwhile."""
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, destination], check=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, destination / name)
        else:
            (destination / name).unlink(missing_ok=True)


def download_wheels(folder: Path) -> None:
    """Every wheel of the CPU images for the base's Python, checked by hash."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/download_wheels.py", "cpu", folder], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Engine:
    """How to talk to it, and when the budget ends, which its start belongs to."""

    environment: dict[str, str]
    deadline: float


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    deadline = time.monotonic() + BUDGET_SECONDS
    mine = not engine_lines()  # one that ran before stays, with what it holds
    yield Engine(start_engine(), deadline)
    if mine:
        subprocess.run([ROOT / "scripts/docker_engine.sh", "stop", "--purge"])


@pytest.fixture(scope="session")
def docker(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: an image names the commit it is built from")
    scratch = tmp_path_factory.mktemp("images")
    require_space(engine.environment, scratch)
    try:
        based = subprocess.run([ROOT / "scripts/docker_engine.sh", "base"], capture_output=True, text=True)
        if based.returncode == 10:
            pytest.skip(f"no base image can be made here: {based.stderr.strip().splitlines()[-1]}")
        assert based.returncode == 0, based.stderr
        snapshot(scratch / "tree")
        download_wheels(scratch / "wheels")
        yield Docker(engine.environment, scratch, scratch / "tree", scratch / "wheels", engine.deadline)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # gigabytes, which pytest would keep for three sessions
