"""Nothing about a signed record can change unnoticed: one bit, one file more, one file less."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify.builder import edit, summarise
from tests.verify.conftest import Signed, make_key, sign_with
from verify.report import Report, verify_record

DETACHABLE = (".mp4", ".safetensors")


def files(record: Path) -> list[str]:
    return sorted(path.relative_to(record).as_posix() for path in record.rglob("*") if path.is_file())


def messages(report: Report) -> str:
    return "\n".join(f"{finding.where} {finding.message}" for finding in report.findings if finding.status == "invalid")


def test_untouched_record_passes(sealed: Signed) -> None:
    report = verify_record(sealed.record, sealed.trust)
    assert (report.verdict, int(report.exit_code)) == ("PASSED", 0), messages(report)


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found_and_its_file_named(sealed: Signed, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(files(sealed.record)))
    path = sealed.record / name
    before = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(before) - 1))
    after = bytearray(before)
    after[bit // 8] ^= 1 << bit % 8
    try:
        path.write_bytes(after)
        report = verify_record(sealed.record, sealed.trust)
    finally:
        path.write_bytes(before)
    assert int(report.exit_code) == 13
    assert name in messages(report)


def bits_of(path: Path) -> Iterator[bytes]:
    before = path.read_bytes()
    for index in range(8 * len(before)):
        after = bytearray(before)
        after[index // 8] ^= 1 << index % 8
        yield bytes(after)


def test_every_single_bit_of_the_signature_and_the_signer(sealed: Signed) -> None:
    """Exhaustive where sampling would be thin: the envelope's last 400 bytes hold key id and signature."""
    from config.errors import InvalidRecord
    from verify.attestation import read_attestation
    from verify.files import Files

    for name in ("signer.json", "attestation.json"):
        before = (sealed.record / name).read_bytes()
        for number, after in enumerate(bits_of(sealed.record / name)):
            if number // 8 < len(before) - 400:
                continue
            listed = Files(sealed.record)
            listed._bytes[name] = after
            with pytest.raises(InvalidRecord, match=name):
                read_attestation(listed)


def test_any_deleted_file_is_found_and_named(sealed: Signed) -> None:
    for name in files(sealed.record):
        path = sealed.record / name
        before = path.read_bytes()
        path.unlink()
        try:
            report = verify_record(sealed.record, sealed.trust)
        finally:
            path.write_bytes(before)
        if name.endswith(DETACHABLE):
            assert (report.verdict, int(report.exit_code)) == ("PASSED (partial)", 0)
            assert report.record is not None and report.record.withheld == {name}
            assert report.as_json()["withheld"] == [name]
            assert any(name in finding.message for finding in report.findings)
        else:
            assert int(report.exit_code) == 13 and name in messages(report), name


@pytest.mark.parametrize(
    "name", ["note.txt", ".hidden", "arms/dense/events-rank1.jsonl", "arms/sol/sample-0/out.mp4", "arms/x/y"]
)
def test_any_added_file_is_found_and_named(signed: Signed, name: str) -> None:
    (signed.record / name).parent.mkdir(parents=True, exist_ok=True)
    (signed.record / name).write_bytes(b"")
    report = verify_record(signed.record, signed.trust)
    assert int(report.exit_code) == 13 and f"{name} was added" in messages(report)


def test_swapped_files_are_found(signed: Signed) -> None:
    one, other = (signed.record / f"arms/dense/sample-{n}/out.mp4" for n in (0, 1))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    report = verify_record(signed.record, signed.trust)
    assert int(report.exit_code) == 13 and "sample-0/out.mp4 was changed" in messages(report)


def test_without_both_signature_files_it_is_unsigned(signed: Signed) -> None:
    (signed.record / "attestation.json").unlink()
    (signed.record / "signer.json").unlink()
    report = verify_record(signed.record, signed.trust)
    assert (report.verdict, int(report.exit_code), report.result) == ("UNSIGNED", 14, "PASSED")


def faster(record: Path) -> None:
    """Take a second from the measured time of `fullopt` wherever it is written, and derive benchmark.json again."""
    import json

    timing = record / "arms/fullopt/sample-1/timing.json"
    seconds = json.loads(timing.read_bytes())["seconds"] - 1.0
    edit(timing, lambda value: value.update(seconds=seconds, sglang_total_ms=1000 * seconds))
    events = record / "arms/fullopt/events-rank0.jsonl"
    lines = [json.loads(line) for line in events.read_bytes().splitlines()]
    for line in lines:
        if (line["event"], line["source"], line.get("sample")) == ("request_end", "driver", 1):
            line.update(seconds=seconds, t=line["t"] - 1.0)
    events.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    summarise(record)


def test_consistent_forgery_with_another_key_is_untrusted(signed: Signed, tmp_path: Path) -> None:
    faster(signed.record)
    key, theirs = make_key(tmp_path, "mallory")
    sign_with(signed.record, key)
    report = verify_record(signed.record, signed.trust)
    assert (report.verdict, int(report.exit_code)) == ("UNTRUSTED", 14)
    assert "lab" in report.trust_reason
    assert verify_record(signed.record, theirs).verdict == "PASSED"


def test_summary_changed_by_the_trusted_key_is_found_by_deriving_it_again(signed: Signed) -> None:
    def better(value):  # type: ignore[no-untyped-def]
        value["arms"]["fullopt"]["samples"][0]["density"]["mean"] = 0.1

    edit(signed.record / "benchmark.json", better)
    sign_with(signed.record, signed.key)
    report = verify_record(signed.record, signed.trust)
    assert (report.verdict, int(report.exit_code)) == ("INVALID", 13)
    assert "benchmark.json" in messages(report) and "density.mean" in messages(report)


def test_signed_as_passed_by_the_trusted_key_though_a_check_fails(signed: Signed) -> None:
    """A signer's own word does not count: benchmark.json is changed and the attestation lists only passed tests."""
    from verify.attestation import sign
    from verify.findings import Finding, Status
    from verify.keys import load_signer

    edit(signed.record / "benchmark.json", lambda value: value.update(weights="hub"))
    (signed.record / "attestation.json").unlink()
    sign(signed.record, load_signer(signed.key), [Finding("benchmark-derived", Status.OK, "well")])
    report = verify_record(signed.record, signed.trust)
    assert int(report.exit_code) == 13
    assert any(f.check == "attestation-result" and f.status == "invalid" for f in report.findings)
