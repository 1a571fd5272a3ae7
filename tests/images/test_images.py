"""The images, built and run: what they hold, what they refuse, and that they rebuild to the same bytes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.lock import load_target
from verify.keys import keygen

from .conftest import BUDGET_SECONDS, MARKER, ROOT, Docker, Done, differing, layer_files

pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUDGET_SECONDS)]
GPU = ("rtx4090", "h100x4", "a100x4", "h200")
PRIVATE_KEY = re.compile(rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----\r?\n[A-Za-z0-9+/=\r\n]{40,}")


@pytest.fixture(scope="session")
def verify_image(docker: Docker) -> str:
    """sol-verify; its build is given a CA bundle that holds a marker."""
    bundle = docker.scratch / "ca.pem"
    bundle.write_text(f"# {MARKER}\n")
    return docker.image("verify", "--ca-bundle", bundle)


@pytest.fixture(scope="session")
def cpu_image(docker: Docker) -> str:
    return docker.image("cpu")


@pytest.fixture(scope="session")
def volumes(docker: Docker) -> Iterator[tuple[object, ...]]:
    """Options that mount a directory for records and a volume for caches, and the directory."""
    runs = docker.scratch / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    yield ("-v", f"{runs}:/runs", "-v", "sol-test-caches:/caches")
    docker.run("docker", "volume", "rm", "--force", "sol-test-caches")


@pytest.fixture(scope="session")
def signing_key(docker: Docker) -> Path:
    """A key pair; the public half lies beside it."""
    private, _, _ = keygen(docker.scratch / "lab.key")
    os.chown(private, 12345, 12345)  # of the container's user: a key that others may read is refused
    return private


@pytest.fixture(scope="session")
def finished(docker: Docker, cpu_image: str, volumes: tuple[object, ...], signing_key: Path) -> tuple[Done, Path]:
    """The CPU benchmark in a narrow container that was handed secrets, and its record."""
    secrets = ("-v", f"{signing_key}:/run/secrets/signing_key:ro", "-e", f"HF_TOKEN=hf_{MARKER}")
    done = docker.hardened(cpu_image, "benchmark", "--arm", "fullopt", options=(*volumes, *secrets))
    assert done.code == 0, done.output[-4000:]
    (record,) = (path for path in (docker.scratch / "runs").iterdir() if (path / "status").exists())
    return done, record


# ---------------------------------------------------------------- sol-verify


def test_verify_is_small_and_runs_nothing(docker: Docker, verify_image: str) -> None:
    assert docker.uncompressed_bytes(verify_image) <= 500e6
    done = docker.hardened(verify_image, "benchmark", "cpu")
    assert done.code == 10 and "needs the engine part" in done.output


def assert_rebuilds_alike(docker: Docker, target: str) -> None:
    """An archive, from the cache or not, and one without any cache are the same bytes; else the files that differ."""
    archives = docker.archive(target), docker.archive(target, "--no-cache")
    digests = []
    for archive in archives:
        with archive.open("rb") as handle:
            digests.append(hashlib.file_digest(handle, "sha256").hexdigest())
    differences = differing(*archives) if len(set(digests)) > 1 else []
    archives[1].unlink()
    assert differences == []
    assert len(set(digests)) == 1, "the archives differ, and not in a file of a layer"


def test_verify_rebuilds_to_the_same_bytes(docker: Docker, verify_image: str) -> None:
    assert_rebuilds_alike(docker, "verify")


def test_no_secret_in_any_layer_of_verify(docker: Docker, verify_image: str) -> None:
    assert_no_secret(docker, "verify")


def assert_no_secret(docker: Docker, target: str) -> None:
    """Neither the marker of this session's secrets, nor a private key, nor weights, in layers or configuration."""
    found = []
    for name, entry, data in layer_files(docker.archive(target)):
        # GnuTLS carries the keys of its own power-on self test, compressed-tensors a file of Hadamard matrices.
        private = PRIVATE_KEY.search(data) and not Path(entry.name).name.startswith("libgnutls")
        weights = name.endswith(".safetensors") and not name.endswith("/hadamards.safetensors")
        if MARKER.encode() in data or private or weights:
            found.append(name)
    assert found == []
    image = f"sol-{target}"
    inspected = json.dumps(docker.inspect(image))
    history = docker.run("docker", "history", "--no-trunc", image).output
    assert MARKER not in inspected + history
    names = {variable.partition("=")[0] for variable in docker.inspect(image)["Config"]["Env"]}
    assert not {name for name in names if re.search("TOKEN|SECRET|PASSWORD|KEY", name)}


def test_differing_files_are_named(docker: Docker, tmp_path: Path) -> None:
    """What assert_rebuilds_alike would say: two archives of one layer each, of which a file has another time."""

    def archive(time: int) -> Path:
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            entry = tarfile.TarInfo("usr/x")
            entry.mtime = time
            tar.addfile(entry)
        blobs = {"layer": layer.getvalue()}

        def descriptor(name: str) -> dict[str, str]:
            return {"digest": f"sha256:{hashlib.sha256(blobs[name]).hexdigest()}"}

        blobs["manifest"] = json.dumps({"layers": [descriptor("layer")] * 4}).encode()
        files = {f"blobs/sha256/{hashlib.sha256(data).hexdigest()}": data for data in blobs.values()}
        files["index.json"] = json.dumps({"manifests": [descriptor("manifest")]}).encode()
        with tarfile.open(tmp_path / str(time), mode="w") as tar:
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        return tmp_path / str(time)

    assert differing(archive(1), archive(2)) == [f"layer {number}: usr/x: mtime 1 2" for number in range(4)]
    assert differing(archive(1), archive(1)) == []


# ---------------------------------------------------------------- sol-cpu


def test_cpu_is_small_enough(docker: Docker, cpu_image: str) -> None:
    assert docker.uncompressed_bytes(cpu_image) <= 3.6e9


def test_the_benchmark_passes_in_a_narrow_container_and_verify_agrees(
    docker: Docker, verify_image: str, finished: tuple[Done, Path], volumes: tuple[object, ...]
) -> None:
    _, record = finished
    assert record.stat().st_uid == 12345
    judged = docker.hardened(verify_image, "verify", f"/runs/{record.name}", "--json", options=volumes)
    assert judged.code == 14, judged.output  # signed with a key that nobody was told to trust
    assert "PASSED" in judged.output


def test_the_record_names_the_image_and_what_is_in_it(
    docker: Docker, cpu_image: str, finished: tuple[Done, Path]
) -> None:
    environment = json.loads((finished[1] / "environment.json").read_text())
    sealed = docker.hardened(cpu_image, "-c", "cat /opt/sol/image/image.json", options=("--entrypoint", "/bin/sh"))
    labels = json.loads(sealed.output)["labels"]
    assert environment["image_digest"] == f"sha256:{hashlib.sha256(sealed.output.encode()).hexdigest()}"
    assert environment["image_labels"] == labels and environment["differences"] == []
    inspected = docker.inspect(cpu_image)["Config"]["Labels"]
    kernels = {"org.sol-h3.kernels"}  # what a build could make is known after it
    assert {name: inspected.get(name) for name in labels.keys() - kernels} == {
        name: labels[name] for name in labels.keys() - kernels
    }
    assert re.fullmatch(r"[0-9a-f]{40}\+?", labels["org.opencontainers.image.revision"])
    assert inspected["org.opencontainers.image.base.name"] == "local/debian:bookworm"
    assert environment["source_revision"] == labels["org.opencontainers.image.revision"]
    assert {"torch", "sglang", "sol-h3"} <= {package["name"] for package in environment["packages"]}
    assert all(package["record_sha256"] for package in environment["packages"])


def test_no_secret_in_the_record(finished: tuple[Done, Path], signing_key: Path) -> None:
    done, record = finished
    secret = signing_key.read_bytes()
    assert PRIVATE_KEY.search(secret)
    contents = {str(path.relative_to(record)): path.read_bytes() for path in record.rglob("*") if path.is_file()}
    assert len(contents) > 5
    contents["output"] = done.output.encode()
    body = secret.splitlines()[1]
    found = [name for name, data in contents.items() if MARKER.encode() in data or body in data]
    assert found == []


def test_the_key_that_was_mounted_signed_the_record(
    docker: Docker, verify_image: str, finished: tuple[Done, Path], signing_key: Path, volumes: tuple[object, ...]
) -> None:
    trust = docker.scratch / "trust.toml"
    trust.write_text('[[keys]]\nname = "lab"\npem = "lab.key.pub"\n')
    mounts = ("-v", f"{trust}:/trust/trust.toml:ro", "-v", f"{signing_key}.pub:/trust/lab.key.pub:ro")
    words = ("verify", f"/runs/{finished[1].name}", "--trust", "/trust/trust.toml")
    judged = docker.hardened(verify_image, *words, options=(*volumes, *mounts))
    assert judged.code == 0, judged.output


def compose(docker: Docker, *words: object, **variables: str) -> Done:
    """`docker compose run` with nothing of the caller's settings and this session's places."""
    here = {
        "SOL_RUNS": str(docker.scratch / "runs"),
        "SOL_CACHES": "sol-test-caches",
        "SOL_UID": "12345",
        "SOL_GID": "0",
    }
    plain = ["docker", "compose", "--env-file", "/dev/null", "run", "--rm", "-T"]
    return docker.run(*plain, *words, **{**here, **variables})


def test_compose_starts_the_service_of_an_image(
    docker: Docker, cpu_image: str, verify_image: str, volumes: tuple[object, ...]
) -> None:
    shown = compose(docker, "cpu", "print", "--json")
    assert shown.code == 0, shown.output
    assert json.loads(shown.output[shown.output.index("{") :])["target"] == "cpu"
    assert compose(docker, "verify", "verify", "--help").code == 0


def test_compose_with_a_wrong_user_gives_one_clear_line(
    docker: Docker, verify_image: str, volumes: tuple[object, ...]
) -> None:
    done = compose(docker, "verify", "--help", SOL_UID="nobody-here")
    assert done.code != 0
    assert "nobody-here" in done.output.strip().splitlines()[-1]


def test_a_changed_file_is_named_by_doctor(docker: Docker, cpu_image: str) -> None:
    change = "echo '# changed' >>/opt/sol/venv/lib/python3.11/site-packages/config/errors.py"
    options = ("--rm", "--network", "none", "--user", "0", "--entrypoint", "/bin/sh")
    script = f"{change}; exec /opt/sol/bin/container.sh doctor --json"
    done = docker.run("docker", "run", *options, cpu_image, "-c", script)
    (check,) = (check for check in json.loads(done.output[done.output.index("[") :]) if check["name"] == "image files")
    assert check["severity"] == "warning"
    assert check["found"].startswith("1 differ, first /opt/sol/venv/") and "config/errors.py" in check["found"]


def test_a_changed_file_stands_in_the_record(
    docker: Docker, cpu_image: str, volumes: tuple[object, ...], finished: tuple[Done, Path]
) -> None:
    change = "echo '# changed' >>/opt/sol/venv/lib/python3.11/site-packages/config/errors.py"
    name, before = f"{MARKER}-changed", set((docker.scratch / "runs").iterdir())
    options = (
        "--detach",
        "--rm",
        "--name",
        name,
        "--network",
        "none",
        "--user",
        "0",
        "--entrypoint",
        "/bin/sh",
        *volumes,
    )
    script = f"{change}; exec /opt/sol/bin/container.sh benchmark --arm dense"
    started = docker.run("docker", "run", *options, cpu_image, "-c", script)
    assert started.code == 0, started.output
    written: list[Path] = []
    while not written and docker.left() > 60:
        time.sleep(1)
        written = [path / "environment.json" for path in set((docker.scratch / "runs").iterdir()) - before]
        written = [path for path in written if path.exists()]
    docker.run("docker", "kill", name)
    (path,) = written
    (difference,) = json.loads(path.read_text())["differences"]
    assert difference.startswith("1 files of the image were changed since its build, first /opt/sol/venv/")
    assert difference.endswith("config/errors.py")


def test_without_a_volume_for_caches_it_says_which(docker: Docker, cpu_image: str) -> None:
    done = docker.hardened(cpu_image)
    assert done.code == 10
    assert "-v sol-caches:/caches" in done.output


def test_a_stopped_container_leaves_a_record_that_another_one_ends(
    docker: Docker, cpu_image: str, volumes: tuple[object, ...], finished: tuple[Done, Path]
) -> None:
    name = f"{MARKER}-stopped"
    before = set((docker.scratch / "runs").iterdir())
    narrow = ("--read-only", "--cap-drop", "ALL", "--network", "none", "--user", "12345:12345", *volumes)
    words = ("benchmark", "--arm", "fullopt")
    started = docker.run("docker", "run", "--detach", "--rm", "--name", name, *narrow, cpu_image, *words)
    assert started.code == 0, started.output
    records: list[Path] = []
    while not records and docker.left() > 60:
        time.sleep(1)
        records = [path for path in set((docker.scratch / "runs").iterdir()) - before if (path / "status").exists()]
    assert docker.run("docker", "stop", "--time", "60", name).code == 0
    (record,) = records
    status = json.loads((record / "status").read_text())
    assert status["state"] == "aborted" and "SIGTERM" in status["reason"]
    assert not (record / "attestation.json").exists()  # a signed record is closed

    done = docker.hardened(cpu_image, *words, "--resume", f"/runs/{record.name}", options=volumes)
    assert done.code == 0, done.output[-4000:]
    assert "PASSED" in done.output
    assert (record / "attestation.json").exists()
    assert json.loads((record / "status").read_text())["state"] == "complete"


def test_sbom_lists_what_is_installed(docker: Docker, cpu_image: str) -> None:
    done = docker.hardened(cpu_image, "-c", "cat /opt/sol/image/sbom.cdx.json", options=("--entrypoint", "/bin/sh"))
    document = json.loads(done.output)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    urls = {component["purl"] for component in document["components"]}
    assert any(url.startswith("pkg:deb/debian/ffmpeg@") for url in urls)
    lock = (ROOT / "images/cpu/requirements.lock").read_text()
    pinned = set(re.findall(r"^([\w.-]+)==([\w.+-]+)", lock, flags=re.MULTILINE))
    assert len(pinned) > 80
    assert {f"pkg:pypi/{name.lower().replace('_', '-')}@{version}" for name, version in pinned} <= urls


def test_no_secret_in_any_layer_of_cpu(docker: Docker, cpu_image: str) -> None:
    assert_no_secret(docker, "cpu")


# ---------------------------------------------------------------- the GPU images, with substitutes


@pytest.fixture(scope="session")
def substitutes(docker: Docker) -> tuple[Path, Path]:
    """A checkout whose GPU recipes name what can be had here, and the git repositories that they name.

    Replaced: torch by the CPU build, the lock by the CPU target's, Sana by a local repository with a package
    `sol_attn`. The base image is a build argument. Everything else, the Dockerfile above all, is the released one.
    """
    trees = docker.scratch / "git-trees"
    repository = trees / "sana"
    package = repository / "techniques/sparse_backends/sol_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("SUBSTITUTE = True\n")
    git = ["git", "-C", str(repository), "-c", "user.name=test", "-c", "user.email=test@example.org"]
    dated = {**os.environ, "GIT_AUTHOR_DATE": "@0 +0000", "GIT_COMMITTER_DATE": "@0 +0000"}  # the same commit each time
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "x"]):
        subprocess.run([*git, *words], check=True, env=dated)
    subprocess.run([*git, "config", "uploadpack.allowAnySHA1InWant", "true"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()

    tree = docker.scratch / "substitutes"
    shutil.copytree(docker.tree, tree, symlinks=True)
    wheels = tomllib.loads((tree / "images/cpu/image.toml").read_text())["torch"]["wheels"]
    for name in GPU:
        folder = tree / "images" / name
        pinned = tomllib.loads((folder / "image.toml").read_text())
        text = (folder / "image.toml").read_text()
        if "sana" in pinned:
            text = text.replace(pinned["sana"]["commit"], commit)
        head, _, rest = text.partition("[torch]")
        tables = "".join(
            f'[[torch.wheels]]\nfile = "{wheel["file"]}"\nsha256 = "{wheel["sha256"]}"\nstatus = "confirmed"\n'
            for wheel in wheels
        )
        torch = '[torch]\nversion = "2.13.0+cpu"\nindex = "https://download.pytorch.org/whl/cpu"\n'
        (folder / "image.toml").write_text(head + torch + tables + "[sglang]" + rest.partition("[sglang]")[2])
        shutil.copy(tree / "images/cpu/requirements.lock", folder / "requirements.lock")
    return tree, trees


@pytest.mark.parametrize("name", GPU)
def test_a_gpu_image_started_without_a_gpu_says_so_before_any_download(
    docker: Docker, substitutes: tuple[Path, Path], volumes: tuple[object, ...], name: str
) -> None:
    tree, trees = substitutes
    image = docker.image(name, "--git-trees", trees, root=tree)
    weights = ("--tmpfs", "/weights:mode=1777")
    done = docker.hardened(image, options=(*volumes, *weights))
    assert done.code == 10, done.output
    assert f"target {name}" in done.output
    assert "--gpus all" in done.output and "NVIDIA container toolkit" in done.output
    assert "record /runs" not in done.output
    if name != "h200":  # its recipe names no Sana
        words = ("shell", "-c", "python -c 'import sol_attn; print(sol_attn.SUBSTITUTE)'")
        assert docker.hardened(image, *words, options=volumes).output.strip() == "True"


@pytest.mark.parametrize("name", GPU)
def test_our_kernels_were_compiled_for_the_gpu_that_the_image_is_for(
    docker: Docker, substitutes: tuple[Path, Path], volumes: tuple[object, ...], name: str
) -> None:
    """In the container, with what its start put where Triton looks; for another architecture nothing is found."""
    tree, trees = substitutes
    image = docker.image(name, "--git-trees", trees, root=tree)
    sealed = docker.hardened(image, "shell", "-c", "cat /opt/sol/image/image.json", options=volumes).output
    assert json.loads(sealed)["labels"]["org.sol-h3.kernels"] == "triton"
    listed = docker.hardened(image, "shell", "-c", "cat /opt/sol/kernels/kernels.json", options=volumes).output
    mounts = (
        *volumes,
        "-v",
        f"{tree}/docker:/build:ro",
        "-v",
        f"{tree}/tests/images:/tests:ro",
        "-e",
        "PYTHONPATH=/build",
    )
    target = load_target(name)
    capability = int(target.hardware.compute_capability.replace(".", ""))
    rest = f"{56 // target.hardware.gpu_count} {target.sol_attn.thresh_type} {target.checkpoint.kind == 'synthetic'}"
    cached = docker.hardened(
        image, "shell", "-c", f"python /tests/cached_kernels.py {capability} {rest}", options=mounts
    )
    assert cached.code == 0, cached.output
    assert json.loads(cached.output.splitlines()[-1]) == json.loads(listed)["kernels"]["triton"]
    other = docker.hardened(image, "shell", "-c", f"python /tests/cached_kernels.py 86 {rest}", options=mounts)
    assert other.code == 1 and "not in the cache" in other.output


def test_compose_without_nvidias_toolkit_says_what_the_readme_explains(
    docker: Docker, substitutes: tuple[Path, Path]
) -> None:
    docker.image("rtx4090", "--git-trees", substitutes[1], root=substitutes[0])
    if "nvidia" in docker.run("docker", "info", "--format", "{{json .Runtimes}}").output:
        pytest.skip("this engine has NVIDIA's container toolkit")
    done = compose(docker, "rtx4090", "doctor", SOL_WEIGHTS=str(docker.scratch))
    assert done.code != 0
    message = 'could not select device driver "nvidia" with capabilities: [[gpu]]'
    assert message in done.output.strip().splitlines()[-1]
    assert message in (ROOT / "README.md").read_text()


def test_a_commit_that_a_repository_does_not_have_ends_the_build(
    docker: Docker, substitutes: tuple[Path, Path]
) -> None:
    tree, trees = substitutes
    recipe = tree / "images/rtx4090/image.toml"
    kept = recipe.read_text()
    commit = tomllib.loads(kept)["sana"]["commit"]
    recipe.write_text(kept.replace(commit, "0" * 39 + "1"))
    try:
        with pytest.raises(AssertionError, match="0000000001 could not be had from"):
            docker.build("rtx4090", "--git-trees", trees, root=tree)
    finally:
        recipe.write_text(kept)


# ---------------------------------------------------------------- last, because it takes longest


def test_cpu_rebuilds_to_the_same_bytes(docker: Docker, cpu_image: str) -> None:
    assert_rebuilds_alike(docker, "cpu")
