"""What does not pin is refused; what is pinned stands in one place or is compared with it. No engine is needed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import pytest

from config.lock import read_recipe

ROOT = Path(__file__).resolve().parents[2]
GPU = ("rtx4090", "h100x4", "a100x4", "h200")


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pins = load("scripts/check_pins.py")


def recipe(name: str) -> dict:
    return tomllib.loads((ROOT / "images" / name / "image.toml").read_text("utf-8"))


def blocks(path: Path) -> dict[str, str]:
    """Lines of a lock by name, hashes included."""
    text = path.read_text("utf-8").replace("\\\n", " ")
    return {line.split("==")[0]: " ".join(line.split()) for line in text.splitlines() if not line.startswith("#")}


def test_the_checkout_pins_everything() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/check_pins.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("check", "text", "fault"),
    [
        ("recipe_faults", '[sana]\ncommit = "6fb7eb1"', "40 hex digits"),
        ("recipe_faults", '[base_image]\nname = "nvidia/cuda:12.8.1"', "has no digest"),
        ("recipe_faults", '[base_image]\nname = "x"\ndigest = "sha256:12"\nindex_digest = "12"', "64 hex digits"),
        ("recipe_faults", '[torch]\n[[torch.wheels]]\nfile = "torch-1.whl"', "torch-1.whl has no sha256"),
        ("lock_faults", "numpy==2.4.6\n", "numpy==2.4.6 has no SHA-256"),
        ("lock_faults", "numpy==2.4.6 --hash=md5:00\n", "no SHA-256"),
        ("lock_faults", f"numpy>=2 --hash=sha256:{'0' * 64}\n", "not pinned to one version"),
        ("lock_faults", f"numpy==2.* --hash=sha256:{'0' * 64}\n", "not pinned to one version"),
        ("lock_faults", "numpy @ https://example.org/numpy.whl\n", "not pinned to one version"),
        ("reference_faults", "ARG BASE=debian:bookworm-slim\n", "debian:bookworm-slim has no digest"),
        ("reference_faults", "FROM nvidia/cuda:12.8.1-base AS base\n", "has no digest"),
        ("reference_faults", 'CUDA_BASE: "${CUDA_BASE:-nvidia/cuda:12.8.1@sha256:12}"\n', "has no digest"),
        ("workflow_faults", "- uses: actions/checkout@v4\n", "is not pinned to a commit"),
        ("workflow_faults", "- uses: actions/checkout@11bd719\n", "is not pinned to a commit"),
    ],
)
def test_loose_pins_are_refused(check: str, text: str, fault: str) -> None:
    found: Iterator[str] = getattr(pins, check)(text)
    assert any(fault in line for line in found)


def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    assert "compose.yaml: no such file" in pins.faults(tmp_path)


def test_what_a_source_answers_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = {"file": "torch-2.11.0+cu128-cp312-cp312-manylinux_2_28_x86_64.whl", "sha256": "a" * 64}
    page = f'<a href="/whl/torch-2.11.0%2Bcu128-cp312-cp312-manylinux_2_28_x86_64.whl#sha256={"a" * 64}">x</a>'
    monkeypatch.setattr(pins, "get", lambda url, headers=None: (page.encode(), {}))
    assert pins.ask_index(wheel, "https://example.org/whl") == ""
    assert "has SHA-256" in pins.ask_index({**wheel, "sha256": "b" * 64}, "https://example.org/whl")
    assert "is not in" in pins.ask_index({**wheel, "file": "torch-2.12.0-x.whl"}, "https://example.org/whl")


def test_a_source_that_does_not_answer_confirms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> str:
        raise OSError("no route")

    for name in ("ask_registry", "ask_index", "ask_git"):
        monkeypatch.setattr(pins, name, unreachable)
    asked = pins.online(ROOT)
    assert len(asked) > 10 and all(wrong == "not asked: no route" for _, _, wrong in asked)


@pytest.mark.parametrize("file", ["docker/Dockerfile", "docker/docker-bake.hcl", "compose.yaml"])
def test_base_images_are_those_of_the_recipes(file: str) -> None:
    named = set(re.findall(r"[\w/]+:[\w.-]+@sha256:[0-9a-f]{64}", (ROOT / file).read_text("utf-8")))
    bases = [recipe(name)["base_image"] for name in ("cpu", *GPU)]
    assert named == {f"{base['name']}@{base['index_digest']}" for base in bases}


@pytest.mark.parametrize("file", ["docker/docker-bake.hcl", "compose.yaml"])
def test_dated_archives_are_those_of_the_recipes(file: str) -> None:
    named = set(re.findall(r"\b20\d{6}T\d{6}Z\b", (ROOT / file).read_text("utf-8")))
    assert named == {recipe(name)["base_image"]["apt_snapshot"] for name in ("cpu", *GPU)}


def test_builds_are_dated_with_the_archive_and_not_with_the_commit() -> None:
    """BuildKit rewrites only times later than this one: a layer cached before a commit would keep its own."""
    bake = (ROOT / "docker/docker-bake.hcl").read_text("utf-8")
    (epoch,) = re.findall(r'variable "SOURCE_DATE_EPOCH" \{ default = "(\d+)" \}', bake)
    moment = datetime.fromtimestamp(int(epoch), UTC).strftime("%Y%m%dT%H%M%SZ")
    assert moment == recipe("cpu")["base_image"]["apt_snapshot"]
    assert "SOURCE_DATE_EPOCH" not in (ROOT / "scripts/build_image.py").read_text("utf-8")


def test_smaller_locks_are_line_for_line_those_of_the_cpu() -> None:
    known = {**blocks(ROOT / "images/cpu/requirements.lock"), **blocks(ROOT / "images/cpu/requirements-dev.lock")}
    for path in ("images/verify/requirements.lock", "docker/build.lock"):
        for name, line in blocks(ROOT / path).items():
            assert known[name] == line, f"{path}: {name}"


@pytest.mark.parametrize("name", GPU)
def test_gpu_locks_have_what_the_recipe_names(name: str) -> None:
    pinned = recipe(name)
    locked = blocks(ROOT / "images" / name / "requirements.lock")
    for package, version in pinned["torch"]["nvidia"].items():
        assert locked[package].startswith(f"{package}=={version} ")
    for package, version in pinned.get("sana", recipe("h100x4")["sana"])["needs"].items():
        exact = version if version[0].isdigit() else locked[package].split()[0].split("==")[1]
        assert locked[package].startswith(f"{package}=={exact} ")
    by_url = {wheel["file"].split("-")[0] for wheel in pinned["torch"]["wheels"]}
    cpu = blocks(ROOT / "images/cpu/requirements.lock")
    assert not by_url & locked.keys()
    assert {package: line.split()[0] for package, line in cpu.items() if package not in by_url}.items() <= {
        package: line.split()[0] for package, line in locked.items()
    }.items()


@pytest.mark.parametrize("name", ["cpu", *GPU])
def test_labels_hold_the_recipe_digest_of_the_locks(name: str) -> None:
    """The build computes it without the project's packages; a lock must hold the same."""
    assert load("docker/seal.py").recipe_sha256(ROOT / "images" / name) == read_recipe(name).sha256


def test_labels_of_a_plain_bake_are_those_of_the_recipes() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/image_labels.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_stale_label_is_noticed(tmp_path: Path) -> None:
    labels = load("scripts/image_labels.py")
    for path in ("docker/docker-bake.hcl", *(f"images/{name}/image.toml" for name in ("cpu", "h200"))):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    for name in ("cpu", "h200"):
        (tmp_path / f"images/{name}/requirements.lock").write_text("")
    before = labels.written(tmp_path)
    (tmp_path / "images/h200/image.toml").write_text((ROOT / "images/h200/image.toml").read_text() + "\n")
    after = labels.written(tmp_path)
    changed = [line for line in after.splitlines() if line not in before.splitlines()]
    assert len(changed) == 1 and "org.sol-h3.recipe.sha256" in changed[0]
    assert "base_name(CUDA_BASE)" in after and "base_digest(DEBIAN_BASE)" in after


def test_h200_has_the_pins_of_h100x4_without_sana() -> None:
    ours, theirs = recipe("h200"), recipe("h100x4")
    assert ours["gpu"] == {"count": 1, "arch_list": "9.0"}
    assert {key for key in theirs if ours.get(key) != theirs[key]} == {"name", "gpu", "sana", "published"}
    assert blocks(ROOT / "images/h200/requirements.lock") == blocks(ROOT / "images/h100x4/requirements.lock")


@pytest.mark.parametrize("name", ["cpu", *GPU])
def test_wheels_that_a_build_without_an_index_needs_are_known(name: str) -> None:
    wheels, pinned = load("scripts/download_wheels.py"), recipe(name)
    found = wheels.torch_wheels(pinned, pinned["python"]["version"], "x86_64")
    names = {wheel["file"].split("-")[0] for wheel in found}
    assert names == ({"torch"} if name == "cpu" else {"torch", "torchvision", "torchaudio", "triton"})
    with pytest.raises(SystemExit, match="no torch wheel is pinned for cp310 on x86_64"):
        wheels.torch_wheels(pinned, "3.10", "x86_64")


def test_torch_comes_by_hash_from_where_the_recipe_says() -> None:
    torch = load("docker/torch_requirement.py")
    wheel = {"file": f"torch-9-cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-manylinux_2_28_x86_64.whl"}
    wheel |= {"sha256": "a" * 64}
    pinned = {"torch": {"index": "https://example.org/whl", "wheels": [wheel]}}
    if torch.platform.machine() != "x86_64":
        pytest.skip("the example is of an x86_64 machine")
    assert torch.lines(pinned, present=True) == [f"torch==9 --hash=sha256:{'a' * 64}"]
    assert torch.lines(pinned, present=False)[0] == "--extra-index-url https://example.org/whl"
    wheel["url"] = "https://example.org/torch.whl"
    assert torch.lines(pinned, present=False)[0] == "--find-links https://example.org/torch.whl"
    with pytest.raises(SystemExit, match="no torch wheel is pinned"):
        torch.lines({"torch": {**pinned["torch"], "wheels": []}}, present=True)
