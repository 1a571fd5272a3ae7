"""The rules of the repository itself: pins, locks, the wheel, who may import whom, the commands."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("config", "engine", "verify", "entrypoints")
IMAGES = sorted(path.parent.name for path in ROOT.glob("images/*/image.toml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Modules above 400 lines, each with the reason why it is one module. Nothing else may grow that long.
LONG_MODULES = {
    "config/record.py": "every model of the run record: one published schema, read from top to bottom",
}

HEAVY = {"torch", "triton", "sglang"}
# What plain `pip install .` does not bring: the verifying side must import without it.
NOT_IN_A_PLAIN_INSTALL = HEAVY | {
    *("transformers", "diffusers", "tokenizers", "safetensors", "torchvision", "huggingface_hub"),
    *("av", "imageio", "PIL", "scipy", "pynvml", "psutil", "einops", "tqdm", "yaml", "requests", "packaging"),
}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def image(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "images" / name / "image.toml").read_text(encoding="utf-8"))


def tables(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every table of a TOML document, with its dotted name."""
    if isinstance(node, dict):
        yield path, node
        for key, value in node.items():
            yield from tables(value, f"{path}.{key}".strip("."))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from tables(value, f"{path}[{index}]")


def modules(room: str) -> list[Path]:
    return sorted(path for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts)


def imported(path: Path) -> set[str]:
    """Top-level names of everything that a module imports, anywhere in it; relative imports stay in their own room."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            names.add(str(node.args[0].value).split(".")[0])
    return names


# ---------------------------------------------------------------- who may import whom


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("config", {"engine", "verify", "entrypoints"} | HEAVY),
        ("verify", {"engine", "entrypoints"} | HEAVY),
        ("engine", {"verify", "entrypoints"}),
    ],
)
def test_rooms_keep_their_doors_shut(room: str, forbidden: set[str]) -> None:
    broken = {
        str(path.relative_to(ROOT)): sorted(imported(path) & forbidden)
        for path in modules(room)
        if imported(path) & forbidden
    }
    assert broken == {}


def test_every_import_is_locked() -> None:
    """What works because somebody installed it by hand fails on the next machine."""
    known = {name for path in LOCKS for name in locked(path)}
    owners = importlib.metadata.packages_distributions()
    # torch is pinned in image.toml; sol_attn is there in the GPU images only
    own = {*ROOMS, "tests", "torch", "sol_attn", *sys.stdlib_module_names}
    unlocked = {
        name: str(path.relative_to(ROOT))
        for folder in (*ROOMS, "tests", "scripts")
        for path in modules(folder)
        for name in imported(path) - own
        if not {canonicalize_name(owner) for owner in owners.get(name, [])} & known
        and not (path.parent / f"{name}.py").is_file()  # a script finds the module beside it
        and not (ROOT / "docker" / f"{name}.py").is_file()  # the scripts of a build, which its tests put on the path
    }
    assert unlocked == {}


BLOCKER = """
import importlib.abc, sys
blocked = set(sys.argv[1].split(","))
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not part of a plain install", name=name)
sys.meta_path.insert(0, Blocker())
import importlib
for module in sys.argv[2:]:
    importlib.import_module(module)
print(len(sys.argv[2:]), "imported")
"""


@pytest.mark.parametrize("room", ["config", "verify", "entrypoints"])
def test_plain_install_imports(room: str) -> None:
    """Every module of the verifying side, and the command itself, imports beside nothing but the core dependencies."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in modules(room)
        if room != "entrypoints" or path.name in ("__init__.py", "cli.py")
    ]
    assert names, f"{room} has no modules"
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER, ",".join(sorted(NOT_IN_A_PLAIN_INSTALL)), *names],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{len(names)} imported"


def test_modules_stay_short_or_say_why_not() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for room in ROOMS
        for path in modules(room)
    }
    long = {name: length for name, length in lengths.items() if length > 400}
    unexplained = {name: length for name, length in long.items() if not LONG_MODULES.get(name)}
    assert unexplained == {}, "split it, or give the reason in LONG_MODULES"
    assert sorted(LONG_MODULES) == sorted(long), "LONG_MODULES names a module that is short again or gone"


# ---------------------------------------------------------------- pins

HASHED_KEYS = ("sha256", "files_sha256")
DIGEST_KEYS = ("digest", "index_digest", "container_digest")
COMMIT_KEYS = ("commit", "sglang_commit", "revision")


def test_every_target_has_a_recipe() -> None:
    recipes = {
        tomllib.loads(path.read_text(encoding="utf-8"))["recipe"] for path in (ROOT / "config/targets").glob("*.toml")
    }
    assert recipes == set(IMAGES) == {"rtx4090", "h100x4", "a100x4", "h200", "cpu"}


@pytest.mark.parametrize("name", IMAGES)
def test_pins_are_whole(name: str) -> None:
    document = image(name)
    assert document["schema_version"] == 1 and document["name"] == name
    seen = 0
    for path, table in tables(document):
        for key, value in table.items():
            if key in HASHED_KEYS:
                assert re.fullmatch(r"[0-9a-f]{64}", value), f"{path}.{key}"
            elif key in DIGEST_KEYS:
                assert re.fullmatch(r"sha256:[0-9a-f]{64}", value), f"{path}.{key}"
            elif key in COMMIT_KEYS:
                assert re.fullmatch(r"[0-9a-f]{40}", value), f"{path}.{key}"
            else:
                continue
            seen += 1
            assert table.get("status") in ("confirmed", "unconfirmed"), f"[{path}] says not whether it was checked"
            origin = table.get("source") or table.get("repository", "")
            assert origin.startswith("https://"), f"[{path}] has no public source"
    assert seen >= 2


@pytest.mark.parametrize("name", IMAGES)
def test_no_short_commit_anywhere(name: str) -> None:
    """Servers refuse to fetch a short SHA, and it names more than one commit sooner or later."""
    text = (ROOT / "images" / name / "image.toml").read_text(encoding="utf-8")
    # The published container's tag carries one in its name; its digest stands beside it.
    text = re.sub(r'^container = "[^"]*"', "", text, flags=re.MULTILINE)
    short = [
        word
        for word in re.findall(r"(?<![0-9A-Za-z])[0-9a-f]{7,63}(?![0-9A-Za-z])", text)
        if len(word) != 40 and re.search(r"[a-f]", word) and re.search(r"[0-9]", word)
    ]
    assert short == []


@pytest.mark.parametrize("name", IMAGES)
def test_sglang_sources_are_pinned_by_hash(name: str) -> None:
    pins = image(name)["sglang"]
    listed = (ROOT / "images" / pins["files"]).read_bytes()
    assert hashlib.sha256(listed).hexdigest() == pins["files_sha256"]
    sums = dict(reversed(line.split("  ")) for line in listed.decode().splitlines())
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in sums.values())
    assert list(sums) == sorted(sums) and len(sums) > 50
    for path, digest in pins["guarded"]["files"].items():
        assert sums[path] == digest, path


def test_installed_sglang_is_the_pinned_one() -> None:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed here")
    pins = image("cpu")["sglang"]
    assert importlib.metadata.version("sglang") == Requirement(pins["distribution"]).specifier.__str__().lstrip("=")
    package = Path(spec.submodule_search_locations[0])
    changed = []
    for line in (ROOT / "images" / pins["files"]).read_text(encoding="utf-8").splitlines():
        digest, path = line.split("  ")
        if hashlib.sha256((package / path).read_bytes()).hexdigest() != digest:
            changed.append(path)
    assert changed == []


@pytest.mark.parametrize("name", [name for name in IMAGES if name != "cpu"])
def test_recipe_agrees_with_its_target(name: str) -> None:
    document = image(name)
    hardware = tomllib.loads((ROOT / "config/targets" / f"{name}.toml").read_text(encoding="utf-8"))["hardware"]
    assert document["gpu"]["count"] == hardware["gpu_count"]
    assert document["gpu"]["arch_list"] == hardware["compute_capability"]
    assert document["cuda"]["driver_floor"] == hardware["driver_floor"]


def test_torch_pin_of_the_cpu_covers_what_the_project_supports() -> None:
    torch = image("cpu")["torch"]
    assert torch["version"].endswith("+cpu") and torch["index"] == "https://download.pytorch.org/whl/cpu"
    files = {wheel["file"] for wheel in torch["wheels"]}
    assert files == {
        f"torch-{torch['version']}-cp{python}-cp{python}-manylinux_2_28_{machine}.whl"
        for python in (311, 312, 313)
        for machine in ("x86_64", "aarch64")
    }
    assert len({wheel["sha256"] for wheel in torch["wheels"]}) == len(files)


# ---------------------------------------------------------------- locks

LOCKS = sorted(ROOT.glob("images/*/requirements*.lock"))


def locked(path: Path) -> dict[str, tuple[Requirement, list[str]]]:
    """Requirement and hashes of every line; pip's own reading of the format, less its options."""
    found: dict[str, tuple[Requirement, list[str]]] = {}
    for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            continue
        head, *hashes = re.split(r"\s+--hash=", line)
        requirement = Requirement(head)
        name = canonicalize_name(requirement.name)
        assert name not in found, f"{path.name}: {name} twice"
        found[name] = requirement, [digest.strip() for digest in hashes]
    return found


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_line_of_a_lock_is_exact_and_hashed(path: Path) -> None:
    lines = locked(path)
    assert lines
    for name, (requirement, hashes) in lines.items():
        assert re.fullmatch(r"==[^*=]+", str(requirement.specifier)), f"{name} is not pinned exactly"
        assert not requirement.url and not requirement.extras, name
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in hashes), name
        assert len(set(hashes)) == len(hashes), name


def test_gpu_recipes_have_a_lock_or_say_that_they_have_none() -> None:
    for name in IMAGES:
        text = (ROOT / "images" / name / "image.toml").read_text(encoding="utf-8")
        has_lock = (ROOT / "images" / name / "requirements.lock").exists()
        assert has_lock != ("no requirements.lock" in text), name


@pytest.mark.parametrize("stem", ["requirements", "requirements-dev"])
def test_lock_is_its_in_file(stem: str) -> None:
    lines = [
        line
        for line in (ROOT / f"images/cpu/{stem}.in").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    lock = locked(ROOT / f"images/cpu/{stem}.lock")
    names = set()
    for line in lines:
        text, _, reason = line.partition("#")
        assert reason.strip(), f"{text.strip()}: no reason"
        wanted = Requirement(text)
        name = canonicalize_name(wanted.name)
        names.add(name)
        (pinned,) = lock[name][0].specifier
        assert wanted.specifier.contains(pinned.version), line
    assert names == set(lock)


def test_locks_do_not_overlap_and_leave_torch_out() -> None:
    run, dev = locked(ROOT / "images/cpu/requirements.lock"), locked(ROOT / "images/cpu/requirements-dev.lock")
    assert not run.keys() & dev.keys()
    assert "torch" not in run.keys() | dev.keys()


def test_locks_serve_the_project_itself() -> None:
    """One environment does both sides: what pyproject.toml asks for is in the locks, in a version that it admits."""
    run, dev = locked(ROOT / "images/cpu/requirements.lock"), locked(ROOT / "images/cpu/requirements-dev.lock")
    extras = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *extras["media"]]:
        wanted = Requirement(text)
        (pinned,) = run[canonicalize_name(wanted.name)][0].specifier
        assert wanted.specifier.contains(pinned.version), text
    for text in [*extras["dev"], *PROJECT["build-system"]["requires"]]:
        wanted = Requirement(text)
        (pinned,) = dev[canonicalize_name(wanted.name)][0].specifier
        assert wanted.specifier.contains(pinned.version), text
    assert "cryptography" in run, "securesystemslib[crypto]"


def test_tools_and_verifying_side_have_all_that_they_ask_for() -> None:
    """No resolver runs, so nothing else would notice that a new release of a tool needs one more distribution."""
    run, dev = locked(ROOT / "images/cpu/requirements.lock"), locked(ROOT / "images/cpu/requirements-dev.lock")
    core = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    todo = sorted(dev) + [canonicalize_name(wanted.name) for wanted in core] + ["cryptography"]
    missing: dict[str, str] = {}
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            asked = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed here")
        for wanted in map(Requirement, asked):
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                needed = canonicalize_name(wanted.name)
                if needed not in run.keys() | dev.keys():
                    missing[needed] = name
                else:
                    todo.append(needed)
    assert missing == {}


refresh_lock = load(ROOT / "scripts/refresh_lock.py")


@pytest.mark.parametrize(
    ("wheel", "serves"),
    [
        ("a-1-py3-none-any.whl", {(p, m) for p in (311, 312, 313) for m in ("x86_64", "aarch64")}),
        ("a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", {(311, "x86_64")}),
        ("a-1-cp39-abi3-manylinux_2_28_aarch64.whl", {(311, "aarch64"), (312, "aarch64"), (313, "aarch64")}),
        ("a-1-cp312-abi3-manylinux_2_28_x86_64.whl", {(312, "x86_64"), (313, "x86_64")}),
        ("a-1-cp313-cp313t-manylinux_2_28_x86_64.whl", set()),  # free-threaded
        ("a-1-cp310-cp310-manylinux_2_28_x86_64.whl", set()),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", set()),
        ("a-1-cp311-cp311-macosx_11_0_arm64.whl", set()),
        ("a-1-cp311-cp311-win_amd64.whl", set()),
        ("a-1-cp311-cp311-manylinux_2_39_x86_64.whl", set()),  # newer than any glibc that is supported
        ("a-1-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl", set()),
        ("a-1-py3-none-manylinux2014_x86_64.whl", {(p, "x86_64") for p in (311, 312, 313)}),
    ],
)
def test_refresh_keeps_the_wheels_that_pip_may_choose(wheel: str, serves: set[tuple[int, str]]) -> None:
    assert refresh_lock.serves(wheel) == serves


def test_refresh_agrees_with_pip_on_this_machine() -> None:
    """Every tag by which pip, through `packaging.tags`, would choose a wheel here serves this Python and machine."""
    from packaging.tags import sys_tags

    if os.uname().machine not in ("x86_64", "aarch64") or sys.version_info[:2] > (3, 13):
        pytest.skip("not a machine that the lock is for")
    pair = (300 + sys.version_info.minor, os.uname().machine)
    for tag in sys_tags():
        glibc = re.match(r"manylinux_(\d+)_(\d+)_", tag.platform)
        if glibc and (int(glibc[1]), int(glibc[2])) > refresh_lock.MAX_GLIBC:
            continue
        if tag.interpreter.startswith(("py3", "cp3")) and not re.fullmatch(r"py3\d+", tag.interpreter):
            assert pair in refresh_lock.serves(f"a-1-{tag}.whl"), tag


def test_refresh_refuses_a_distribution_without_a_wheel_for_every_machine(tmp_path: Path) -> None:
    wheel = {"url": "https://example.org/a-1-cp311-cp311-manylinux_2_28_x86_64.whl", "hashes": {"sha256": "0" * 64}}
    with pytest.raises(SystemExit, match=r"a 1: no wheel for .*aarch64"):
        refresh_lock.render({"packages": [{"name": "a", "version": "1", "wheels": [wheel]}]}, tmp_path / "x.in")


versions = st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){0,2}", fullmatch=True)
digests = st.frozensets(st.binary(min_size=32, max_size=32).map(bytes.hex), min_size=1, max_size=4)
names = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)


@given(content=st.dictionaries(names, st.tuples(versions, digests), min_size=1, max_size=6))
def test_refresh_reads_what_it_writes(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]) -> None:
    packages = [
        {
            "name": name,
            "version": version,
            "wheels": [
                {"name": f"{name}-{version}-{build}-py3-none-any.whl", "hashes": {"sha256": digest}}
                for build, digest in enumerate(hashes)
            ],
        }
        for name, (version, hashes) in content.items()
    ]
    lock = tmp_path_factory.mktemp("lock") / "x.lock"
    lock.write_text(refresh_lock.render({"packages": packages}, lock.with_suffix(".in")), encoding="utf-8")
    assert refresh_lock.read_lock(lock) == content
    assert refresh_lock.describe(content, content) == []
    assert len(refresh_lock.describe({}, content)) == len(content)


# ---------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling, the build backend, is not installed here")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*ROOMS, "images"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_rooms_and_the_recipes_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == "sol_h3-0.1.0-py3-none-any.whl"
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = wheel.parent / "source"
    wanted = {str(path.relative_to(source)) for room in ROOMS for path in (source / room).rglob("*") if path.is_file()}
    recipes = {
        f"config/_recipes/{path.relative_to(source / 'images')}"
        for path in (source / "images").rglob("*")
        if path.is_file()
    }
    assert held == wanted | recipes
    assert {"config/_recipes/cpu/image.toml", "config/_recipes/cpu/requirements.lock"} <= recipes


def test_installed_wheel_knows_the_same_recipes(wheel: Path, tmp_path: Path) -> None:
    """The verifying side has no checkout: the digests that it computes from the wheel are those of the checkout."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = f"from config.lock import read_recipe; print(*(read_recipe(name).sha256 for name in {IMAGES}))"
    results = [
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, "PYTHONPATH": str(place)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for place in (tmp_path, ROOT)
    ]
    assert results[0] == results[1] and len(results[0].split()) == len(IMAGES)


def test_wheel_brings_the_command_and_asks_for_the_verifying_side_only(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    assert "sol = entrypoints.cli:main" in archive.read("sol_h3-0.1.0.dist-info/entry_points.txt").decode()
    metadata = archive.read("sol_h3-0.1.0.dist-info/METADATA").decode()
    core = {
        canonicalize_name(Requirement(line.split(": ", 1)[1]).name)
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert core == {"ml-dtypes", "numpy", "pydantic", "rfc8785", "rich", "securesystemslib", "typer"}
    assert "License-Expression: Apache-2.0" in metadata
    assert "sol_h3-0.1.0.dist-info/licenses/LICENSE" in archive.namelist()


# ---------------------------------------------------------------- commands


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed here")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "SOL_")) and key != "MFLAGS"}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, check=True
    )


def test_make_without_a_target_lists_the_targets() -> None:
    out = make().stdout
    names = {"help", "demo", "test", "test-fast", "test-images", "lint", "setup", "images", "figures", "clean"}
    assert {line.split()[1] for line in out.splitlines()} == names


def test_make_demo_sets_up_and_runs_the_published_arms() -> None:
    lines = make("-n", "demo").stdout.splitlines()
    assert lines == ["scripts/bootstrap.sh", ".venv/bin/sol benchmark cpu --arm dense --arm fullopt"]


def test_make_test_sets_up_and_checks_everything() -> None:
    out = make("-n", "test").stdout
    assert out.startswith("scripts/bootstrap.sh") and out.count("scripts/bootstrap.sh") == 1
    for command in ("ruff check .", "ruff format --check .", "mypy", "pytest"):
        assert f"-m {command}" in out
    assert "-m pytest ||" in out  # and no selection of tests
    fast = make("-n", "test-fast").stdout
    assert '-m pytest -m "not docker" ||' in fast and "not run here: the image tests" in fast
    assert make("-n", "test-images").stdout.rstrip().endswith("-m pytest -m docker")


def test_make_uses_the_environment_that_sol_venv_names() -> None:
    assert "/elsewhere/env/bin/sol benchmark" in make("-n", "demo", SOL_VENV="/elsewhere/env").stdout


def test_ci_runs_make_test_without_input_and_hands_on_its_exit_code(tmp_path: Path) -> None:
    fake = tmp_path / "make"
    fake.write_text('#!/bin/sh\necho "asked: $*, CI=$CI, read: $(cat)"\nexit 7\n', encoding="utf-8")
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / ".ci/run")],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        input="never read",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert done.stdout == "asked: test, CI=true, read: \n"


def test_hosted_ci_pins_its_actions_and_runs_the_same_script() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    uses = re.findall(r"uses: (\S+)", text)
    assert uses and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in uses)
    assert "run: bash .ci/run" in text
    assert re.search(r'python: \["3\.11", "3\.12", "3\.13"\]', text)
    assert PROJECT["project"]["requires-python"] == ">=3.11,<3.14"


# ---------------------------------------------------------------- words


def test_nothing_names_a_place_outside_the_repository() -> None:
    """A path of somebody's machine, or of a folder beside the checkout, means nothing to the next reader."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    place = re.compile(r"(?<![\w.~-])/(?:root|work|home/\w+|Users/\w+|opt/(?:pypi|wheels)|tmp/\w+)/|\.\./" + "shared")
    found = []
    for name in filter(None, tracked.split("\0")):
        path = ROOT / name
        if not path.is_file() or path == Path(__file__):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}:{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if place.search(line)]
    assert found == []


def test_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text and len(text) > 10_000
