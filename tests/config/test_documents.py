"""README and docs/ say what the code and the data say; the commands for checking a record by hand are run."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from config.ceilings import ceilings_of, ceilings_table
from config.errors import Exit
from config.lock import lock_json, resolve, target_names
from config.published import arithmetic_table, claims_table, published
from config.record import PAYLOAD_TYPE, STATEMENT_TYPE
from config.schema import ARMS
from tests.verify.builder import Builder
from verify.roofline.plan import plan_of
from verify.roofline.work import floor

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
CLAIMS = (ROOT / "docs/published-claims.md").read_text("utf-8")
RUN_RECORD = (ROOT / "docs/run-record.md").read_text("utf-8")
ROOFLINE = (ROOT / "docs/roofline.md").read_text("utf-8")


def test_readme_names_every_target_arm_and_exit_code() -> None:
    assert all(f"| `{name}` |" in README for name in (*target_names(), *ARMS))
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)}
    assert codes == {int(code) for code in Exit}


@pytest.mark.parametrize("target", ["rtx4090", "h100x4", "a100x4"])
def test_readme_prints_the_published_times(target: str) -> None:
    (row,) = [line for line in README.splitlines() if line.startswith(f"| `{target}` |") and " s |" in line]
    for claim in published().for_target(target):
        if claim.metric in ("seconds", "ratio:fullopt/dense", "peak_memory_mib") or claim.kind == "density":
            assert f" {claim.printed} |" in row, claim.id


def test_claims_page_has_the_tables_and_remarks_of_the_data() -> None:
    """`python -m config.published` prints the tables."""
    for target in ("rtx4090", "h100x4", "a100x4"):
        assert claims_table(target) in CLAIMS
    assert arithmetic_table() in CLAIMS
    for remark in published().remarks:
        assert f"**{remark.id}**" in CLAIMS and remark.text in CLAIMS and remark.consequence in CLAIMS


@pytest.mark.parametrize(
    "text", [README, CLAIMS, RUN_RECORD, ROOFLINE], ids=["README", "claims", "run-record", "roofline"]
)
def test_links_lead_somewhere(text: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if not target.startswith("https://"):
            page = (ROOT / target).read_text("utf-8") if anchor and target else text
            titles = re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)
            assert (ROOT / target).exists(), target
            assert not anchor or anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def make_signed(folder: Path) -> None:
    """A signed directory in the form of a record, made without any code of `verify`."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    (folder / "arms/dense/sample-1").mkdir(parents=True)
    (folder / "arms/dense/sample-1/out.mp4").write_bytes(b"not a video")
    (folder / "lock.json").write_bytes(lock_json(resolve("cpu")))
    (folder / "signer.json").write_text(json.dumps({"public": key.public_key().public_bytes_raw().hex()}))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    subjects = [
        {"name": str(path.relative_to(folder)), "digest": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}}
        for path in files
    ]
    payload = json.dumps({"_type": STATEMENT_TYPE, "subject": subjects}).encode()
    signed = b"DSSEv1 28 application/vnd.in-toto+json %d " % len(payload) + payload
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": "", "sig": base64.b64encode(key.sign(signed)).decode()}],
    }
    (folder / "attestation.json").write_text(json.dumps(envelope))


def run_block(number: int, folder: Path) -> subprocess.CompletedProcess[str]:
    block = re.findall(r"```sh\n(.*?)```", RUN_RECORD, flags=re.DOTALL)[number]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", block], cwd=folder, capture_output=True, text=True, env={**os.environ, "PATH": path}
    )


def damage_nothing(folder: Path) -> None:
    pass


def damage_file(folder: Path) -> None:
    (folder / "arms/dense/sample-1/out.mp4").write_bytes(b"not a videO")


def damage_signature(folder: Path) -> None:
    envelope = json.loads((folder / "attestation.json").read_text())
    payload = bytearray(base64.b64decode(envelope["payload"]))
    payload[-3] ^= 1
    envelope["payload"] = base64.b64encode(payload).decode()
    (folder / "attestation.json").write_text(json.dumps(envelope))


def damage_add(folder: Path) -> None:
    (folder / "arms/dense/extra").write_text("")


def damage_remove(folder: Path) -> None:
    (folder / "lock.json").unlink()


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
@pytest.mark.parametrize("damage", [damage_nothing, damage_file, damage_signature, damage_add, damage_remove])
def test_checking_by_hand(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    make_signed(tmp_path)
    damage(tmp_path)
    done = run_block(1, tmp_path)
    if damage is damage_nothing:
        assert done.returncode == 0, done.stderr
        assert "Signature Verified Successfully" in done.stdout
        assert "signature and digests hold for 3 files" in done.stdout
    else:
        assert done.returncode != 0 and "hold for" not in done.stdout


def test_digest_of_a_lock_by_hand(tmp_path: Path) -> None:
    make_signed(tmp_path)
    assert run_block(0, tmp_path).stdout.strip() == resolve("cpu").digest


def test_distance_of_latents_by_hand(tmp_path: Path) -> None:
    """The block's figures are those of benchmark.json."""
    record = Builder(arms=("dense", "fullopt")).build(tmp_path / "record")
    (found,) = json.loads((record / "benchmark.json").read_bytes())["latents"]
    done = run_block(2, record)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [(name, equal) for name, equal, _ in lines] == [("video", "False"), ("audio", "False")]
    for name, _, error in lines:
        assert math.isclose(float(error), found[name]["rel_l2"], rel_tol=1e-12)


def floors() -> dict[str, str]:
    """The rows of docs/roofline.md by target."""
    rows = {}
    for name in ("rtx4090", "h100x4", "a100x4", "h200"):
        plan = plan_of(resolve(name).resolved)
        assert plan.ceilings is not None and plan.density is not None
        seconds = {stage.name: floor(stage, plan.ceilings).seconds for stage in plan.stages()}
        dense, sparse, tea, first, video = (
            next(value for stage, value in seconds.items() if stage.startswith(kind) and "streamed" not in stage)
            for kind in ("forward, dense", "forward, sparse", "forward, reused by T", "forward, reused by F", "video")
        )
        cells = [f"{dense:.2f} s", f"{sparse:.2f} s", f"{plan.density.value:.2%}", f"{tea * 1e3:.1f} ms"]
        rows[name] = f"| `{name}` | " + " | ".join([*cells, f"{first:.3f} s", f"{video:.2f} s"]) + " |"
    return rows


def test_roofline_page_has_the_ceilings_and_floors_of_the_data() -> None:
    """`python -m config.ceilings` prints the table of ceilings; the floors are those of `sol roofline`."""
    assert ceilings_table() in ROOFLINE
    for row in floors().values():
        assert row in ROOFLINE
    machine = ceilings_of("NVIDIA H200").machine  # type: ignore[union-attr]
    assert machine is not None and f"driver {machine.driver}" in ROOFLINE and machine.date in ROOFLINE
