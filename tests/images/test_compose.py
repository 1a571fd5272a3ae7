"""compose.yaml as `docker compose` reads it, with the plugin that comes with the engine."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from .conftest import ROOT, Engine

pytestmark = pytest.mark.docker  # an engine is started, whose compose plugin this is
SERVICES = ("rtx4090", "h100x4", "a100x4", "h200", "cpu", "verify")


@pytest.fixture(scope="module")
def environment(engine: Engine) -> dict[str, str]:
    """Variables under which `docker compose` exists; nothing of the caller's own settings."""
    return {name: value for name, value in engine.environment.items() if not name.startswith("SOL_")}


def config(
    environment: dict[str, str], *words: str, env_file: Path = Path("/dev/null")
) -> subprocess.CompletedProcess[str]:
    command = ["docker", "compose", "--env-file", str(env_file), "config", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_is_valid_without_a_dot_env(environment: dict[str, str], service: str) -> None:
    done = config(environment, "--quiet", service)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_service_is_narrow_and_reserves_its_gpus(environment: dict[str, str]) -> None:
    services = json.loads(config(environment, "--format", "json").stdout)["services"]
    assert sorted(services) == sorted(SERVICES)
    for name, service in services.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["user"] == "1000:1000" and service["image"] == f"sol-{name}", name
        reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        target = Path(ROOT / "config/targets" / f"{name}.toml")
        count = tomllib.loads(target.read_text())["hardware"].get("gpu_count", 0) if target.exists() else 0
        assert [(device["count"], device["capabilities"]) for device in reserved] == (
            [(count, ["gpu"])] if count else []
        )
        if count:
            assert int(service["shm_size"]) == 32 * 2**30
            assert service["ulimits"]["memlock"] == -1
            assert {volume["target"] for volume in service["volumes"]} == {"/runs", "/weights", "/caches"}
        else:
            assert service["network_mode"] == "none", name


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SOL_WEIGHTS", "weights", "undefined volume weights"),
        ("SOL_RUNS", "/runs:/x:/y:/z", "/runs:/x:/y:/z"),
        ("SOL_RUNS", "${SOL_RUNS", "SOL_RUNS"),
    ],
)
def test_a_wrong_value_in_dot_env_gives_one_clear_line(
    environment: dict[str, str], tmp_path: Path, name: str, value: str, says: str
) -> None:
    (tmp_path / ".env").write_text(f"{name}={value}\n")
    done = config(environment, "--quiet", env_file=tmp_path / ".env")
    assert done.returncode != 0
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_what_a_download_needs_is_passed_on_only_where_it_is_set(environment: dict[str, str], tmp_path: Path) -> None:
    """An empty HF_ENDPOINT would be no address; the CPU and verifying services get none of them."""
    names = {"SOL_ACCEPT_LICENCE": "yes", "HF_ENDPOINT": "https://hub.example.org", "HF_HUB_DISABLE_XET": "1"}
    unset = json.loads(config(environment, "--format", "json").stdout)["services"]
    assert all(unset["h100x4"]["environment"][name] is None for name in names)
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in names.items()))
    done = config(environment, "--format", "json", env_file=tmp_path / ".env")
    services = json.loads(done.stdout)["services"]
    for service in SERVICES:
        given = {name: value for name, value in services[service]["environment"].items() if name in names}
        assert given == (names if service not in ("cpu", "verify") else {}), service
