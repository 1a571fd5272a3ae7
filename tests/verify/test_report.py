"""Verdicts, exit codes and forms of a report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.verify.builder import edit
from tests.verify.conftest import Signed, make_key, sign_with
from verify.attestation import sign, sign_ephemeral
from verify.findings import Finding, Status
from verify.keys import load_signer
from verify.report import check_record, verify_record


def test_signed_by_a_trusted_key(signed: Signed) -> None:
    report = verify_record(signed.record, signed.trust)
    assert (report.verdict, report.result, report.trust) == ("PASSED", "PASSED", "trusted")
    assert int(report.exit_code) == int(report.result_exit_code) == 0


def test_signed_by_a_key_of_its_own(fresh: Callable[..., Path]) -> None:
    """Without a key `sol benchmark` ends with 0 where only trust is missing, `sol verify` of that record with 14."""
    record = fresh()
    sign_ephemeral(record, check_record(record))
    report = verify_record(record)
    assert (report.verdict, int(report.exit_code), int(report.result_exit_code)) == ("UNTRUSTED", 14, 0)
    assert "no trust file" in report.trust_reason


def test_unsigned(fresh: Callable[..., Path]) -> None:
    report = verify_record(fresh())
    assert (report.verdict, int(report.exit_code), report.signer) == ("UNSIGNED", 14, "")


def test_red_gate_is_signed_as_failed_and_verifies_as_failed(fresh: Callable[..., Path], tmp_path: Path) -> None:
    record = fresh(red=("fullopt",))
    key, trust = make_key(tmp_path, "lab")
    sign_with(record, key)
    for report in (verify_record(record, trust), verify_record(record)):
        assert (report.verdict, int(report.exit_code), int(report.result_exit_code)) == ("FAILED", 1, 1)
    assert any(f.check == "attestation-result" and "FAILED" in f.message for f in report.findings)


def test_open_run_may_pass_and_says_open(fresh: Callable[..., Path], tmp_path: Path) -> None:
    record = fresh(overrides=("sol_attn.tau=0.5",))
    key, trust = make_key(tmp_path, "lab")
    sign_with(record, key)
    report = verify_record(record, trust)
    assert report.verdict == "PASSED" and report.as_json()["open"] is True
    assert any("sol_attn.tau" in finding.message for finding in report.findings if finding.status == "warn")


def test_aborted_run_is_invalid_even_when_signed(fresh: Callable[..., Path], tmp_path: Path) -> None:
    record = fresh()
    (record / "status").write_text('{"state":"aborted","reason":"Ctrl-C"}\n')
    key, trust = make_key(tmp_path, "lab")
    sign_with(record, key)
    report = verify_record(record, trust)
    assert (report.verdict, int(report.exit_code)) == ("INVALID", 13)


def test_signers_own_objection_is_believed(signed: Signed) -> None:
    (signed.record / "attestation.json").unlink()
    sign(signed.record, load_signer(signed.key), [Finding("seen-on-site", Status.FAIL, "the fan stood still")])
    report = verify_record(signed.record, signed.trust)
    assert (report.verdict, int(report.exit_code)) == ("FAILED", 1)
    assert any("seen-on-site" in finding.message for finding in report.findings)


def test_result_is_partial_when_the_video_cannot_be_decoded_here(
    signed: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    report = verify_record(signed.record, signed.trust)
    assert (report.verdict, int(report.exit_code)) == ("PASSED (partial)", 0)
    assert any("pip install" in finding.message for finding in report.findings)


def test_json_form(signed: Signed) -> None:
    value = json.loads(json.dumps(verify_record(signed.record, signed.trust).as_json(), allow_nan=False))
    assert value["verdict"] == "PASSED" and value["exit_code"] == 0 and value["target"] == "cpu"
    assert value["benchmark"] == json.loads((signed.record / "benchmark.json").read_bytes())
    assert {finding["check"] for finding in value["findings"]} > {"gate-exact", "attestation-trust", "record-readable"}
    assert all(finding["message"] for finding in value["findings"])


def test_json_of_what_could_not_be_read(tmp_path: Path) -> None:
    value = verify_record(tmp_path).as_json()
    assert (value["verdict"], value["exit_code"], value["benchmark"], value["target"]) == ("INVALID", 13, None, None)


def test_text_of_a_record_cannot_steer_the_terminal(fresh: Callable[..., Path]) -> None:
    record = fresh()
    edit(record / "environment.json", lambda v: v.update(differences=["\x1b]0;owned\x07 \x1b[2J\n\r\u202e"]))
    found = [finding.message for finding in verify_record(record).findings if "owned" in finding.message]
    assert found and all(message.isprintable() for message in found)


def test_judging_needs_neither_torch_nor_pyav_nor_the_engine() -> None:
    code = (
        "import sys, verify.report, verify.attestation, verify.policy, verify.claims; "
        "print([name for name in ('av', 'torch', 'engine', 'sglang', 'safetensors') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert out.stdout.strip() == "[]"


def test_nothing_here_imports_the_side_that_ran() -> None:
    import ast

    root = Path(__file__).resolve().parents[2] / "verify"
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("engine", "torch", "sglang")], path
