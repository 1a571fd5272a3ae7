"""The envelope, the statement and the keys, against vectors of their specifications."""

from __future__ import annotations

import base64
import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from config.canonical import sha256_bytes
from config.errors import EnvironmentRefused, InvalidRecord, SolError, UsageError
from config.record import PAYLOAD_TYPE, Signer
from entrypoints.signing import close_and_sign
from tests.verify.builder import edit
from tests.verify.conftest import Signed, make_key
from verify import attestation
from verify.attestation import parse_envelope, read_attestation, sign, sign_ephemeral
from verify.files import Files
from verify.findings import Finding, Status
from verify.keys import as_signer_json, from_signer_json, keygen, load_public, load_signer, public_from_hex
from verify.report import verify_record

# RFC 8032, section 7.1, TEST 2 and TEST 3.
RFC_8032 = [
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]


def test_pre_authentication_encoding_of_the_dsse_specification() -> None:
    """The example of https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md, byte for byte."""
    envelope = Envelope(b"hello world", "http://example.com/HelloWorld", {})
    assert envelope.pae() == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


@pytest.mark.parametrize(("private", "public", "message", "signature"), RFC_8032)
def test_ed25519_vectors_through_our_signer(private: str, public: str, message: str, signature: str) -> None:
    signer = CryptoSigner(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private)))
    assert as_signer_json(signer.public_key).public == public
    assert signer.sign(bytes.fromhex(message)).signature == signature
    public_from_hex(public).verify_signature(signer.sign(bytes.fromhex(message)), bytes.fromhex(message))


def test_attestation_is_signed_over_the_pre_authentication_encoding(signed: Signed) -> None:
    value = json.loads((signed.record / "attestation.json").read_bytes())
    payload = base64.b64decode(value["payload"])
    signature = base64.b64decode(value["signatures"][0]["sig"])
    signer = json.loads((signed.record / "signer.json").read_bytes())
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    encoded = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer["public"])).verify(signature, encoded)


def test_statement_has_every_other_file_as_subject(signed: Signed) -> None:
    value = json.loads((signed.record / "attestation.json").read_bytes())
    statement = json.loads(base64.b64decode(value["payload"]))
    paths = [path for path in signed.record.rglob("*") if path.is_file() and path.name != "attestation.json"]
    found = {entry["name"]: entry["digest"] for entry in statement["subject"]}
    assert found == {
        path.relative_to(signed.record).as_posix(): {"sha256": sha256_bytes(path.read_bytes())} for path in paths
    }
    assert {"signer.json", "status", "lock.json", "benchmark.json"} <= set(found)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    predicate = statement["predicate"]
    assert predicate["result"] == "PASSED" and predicate["failedTests"] == predicate["warnedTests"] == []
    assert "gate-exact" in predicate["passedTests"] and "cache-ranks" not in predicate["passedTests"]
    lock = sha256_bytes((signed.record / "lock.json").read_bytes())
    assert predicate["configuration"] == [{"name": "lock.json", "digest": {"sha256": lock}}]


@pytest.mark.parametrize(
    ("statuses", "result"),
    [
        (["ok"], "PASSED"),
        (["ok", "skipped"], "PASSED"),
        (["ok", "warn"], "WARNED"),
        (["warn", "fail"], "FAILED"),
        (["ok", "invalid"], "FAILED"),
        ([], "FAILED"),
        (["skipped"], "FAILED"),
    ],
)
def test_result_follows_from_the_findings(fresh, statuses: list[str], result: str) -> None:  # type: ignore[no-untyped-def]
    record = fresh()
    findings = [Finding(f"check-{n}", Status(status), "x") for n, status in enumerate(statuses)]
    sign_ephemeral(record, findings)
    attestation = read_attestation(Files(record))
    assert attestation is not None
    assert attestation.statement.predicate.result == result


def rewrite(record: Path, change) -> None:  # type: ignore[no-untyped-def]
    path = record / "attestation.json"
    path.write_bytes(change(path.read_bytes()))


OTHER_FORMS = {
    "newline": lambda data: data + b"\n",
    "space": lambda data: data.replace(b'":"', b'": "', 1),
    "indented": lambda data: json.dumps(json.loads(data), indent=1).encode(),
    "order": lambda data: json.dumps(dict(reversed(json.loads(data).items())), separators=(",", ":")).encode(),
    "escape": lambda data: data.replace(b"payloadType", b"\\u0070ayloadType"),
    "extra key": lambda data: data[:-1] + b',"x":1}',
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "second key": lambda data: data[:-1] + b',"payload":""}',
    "no signature": lambda data: json.dumps({**json.loads(data), "signatures": []}, separators=(",", ":")).encode(),
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_any_other_form_of_the_same_content_is_refused(signed: Signed, name: str) -> None:
    rewrite(signed.record, OTHER_FORMS[name])
    report = verify_record(signed.record, signed.trust)
    assert int(report.exit_code) == 13 and "attestation.json" in report.findings[0].message


def test_url_safe_base64_is_refused(signed: Signed) -> None:
    def other(data: bytes) -> bytes:
        value = json.loads(data)
        value["payload"] = value["payload"].replace("+", "-").replace("/", "_")
        if value["payload"] == json.loads(data)["payload"]:
            value["payload"] = value["payload"].rstrip("=") + "===="
        return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()

    rewrite(signed.record, other)
    assert int(verify_record(signed.record, signed.trust).exit_code) == 13


def test_bits_after_the_last_base64_digit_have_to_be_zero() -> None:
    good = {"payload": "YQ==", "payloadType": "t", "signatures": [{"keyid": "k", "sig": "YWI="}]}
    for payload, fine in (("YQ==", True), ("YR==", False), ("YQ=", False), ("YQ", False)):
        data = json.dumps({**good, "payload": payload}, separators=(",", ":"), sort_keys=True).encode()
        if fine:
            assert parse_envelope(data).payload == b"a"
        else:
            with pytest.raises(InvalidRecord):
                parse_envelope(data)


def test_key_of_the_envelope_has_to_be_the_signers(signed: Signed, tmp_path: Path) -> None:
    other, _ = make_key(tmp_path, "other")
    edit(signed.record / "signer.json", lambda v: v.update(as_signer_json(load_signer(other).public_key).model_dump()))
    report = verify_record(signed.record, signed.trust)
    assert int(report.exit_code) == 13 and "signer.json" in report.findings[0].message


def test_nobody_can_give_a_key_another_ones_id() -> None:
    ours, theirs = (as_signer_json(CryptoSigner.generate_ed25519().public_key) for _ in range(2))
    assert from_signer_json(ours).keyid == ours.keyid
    with pytest.raises(InvalidRecord, match="its own is"):
        from_signer_json(Signer(**{**theirs.model_dump(), "keyid": ours.keyid}))


def test_signed_record_is_not_signed_again(signed: Signed) -> None:
    with pytest.raises(UsageError, match="signed already"):
        sign_ephemeral(signed.record, [])


def test_running_record_is_not_signed(fresh) -> None:  # type: ignore[no-untyped-def]
    from verify.reader import boot_hash

    record = fresh()
    status = {"state": "running", "reason": "", "pid": os.getpid(), "host_hash": boot_hash()}
    (record / "status").write_text(json.dumps(status) + "\n")
    with pytest.raises(UsageError, match="still being written"):
        sign_ephemeral(record, [])
    assert not (record / "signer.json").exists()


def test_signing_that_was_cut_short_can_be_repeated(signed: Signed) -> None:
    (signed.record / "attestation.json").unlink()
    assert int(verify_record(signed.record, signed.trust).exit_code) == 13
    sign(signed.record, load_signer(signed.key), [Finding("a", Status.OK, "b")])
    assert verify_record(signed.record, signed.trust).verdict == "PASSED"


def test_signing_that_found_no_space_leaves_an_unsigned_record(
    fresh: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """signer.json was left alone, and `sol verify` said that somebody took the attestation away."""
    record = fresh()
    write = attestation._replace

    def full(path: Path, data: bytes) -> None:
        if path.name == "attestation.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(attestation, "_replace", full)
    with pytest.raises(EnvironmentRefused, match="could not be signed: No space left") as caught:
        close_and_sign(record, None)
    assert caught.value.exit_code == 10 and f"sol sign {record}" in caught.value.remedy
    assert not (record / "signer.json").exists()
    assert verify_record(record, None).verdict == "UNSIGNED"
    monkeypatch.undo()
    close_and_sign(record, None)
    assert verify_record(record, None).verdict == "UNTRUSTED"


def test_keys_have_their_modes_and_are_never_overwritten(tmp_path: Path) -> None:
    private, public, keyid = keygen(tmp_path / "k")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert private.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
    assert load_public(public).keyid == keyid == load_signer(private).public_key.keyid
    before = private.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        keygen(tmp_path / "k")
    private.unlink()
    with pytest.raises(UsageError, match="exists"):
        keygen(tmp_path / "k")
    assert not private.exists() and before


def test_key_id_is_the_hash_of_the_canonical_key() -> None:
    key = public_from_hex(RFC_8032[0][1])
    text = '{"keytype":"ed25519","keyval":{"public":"PUBLIC"},"scheme":"ed25519"}'.replace("PUBLIC", RFC_8032[0][1])
    assert key.keyid == sha256_bytes(text.encode())


def test_private_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    private, _, _ = keygen(tmp_path / "k")
    private.chmod(0o640)
    with pytest.raises(UsageError, match="can be read by others"):
        load_signer(private)


@pytest.mark.parametrize("data", [b"", b"nonsense", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_what_is_no_key_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "k"
    path.write_bytes(data)
    path.chmod(0o600)
    for load in (load_signer, load_public):
        with pytest.raises(UsageError):
            load(path)
        with pytest.raises(UsageError):
            load(tmp_path / "absent")


def test_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    signer = CryptoSigner.generate_ecdsa()
    path = tmp_path / "k"
    path.write_bytes(signer.private_bytes)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="not an Ed25519 key"):
        load_signer(path)


@given(st.text(max_size=80))
def test_public_keys_in_hex(text: str) -> None:
    try:
        assert public_from_hex(text).keyval["public"] == text
    except SolError:
        pass


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=200), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["payload", "payloadType", "signatures", "keyid", "sig", "x"]), inner, max_size=4),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode())))  # fmt: skip
def test_envelope_parser_ends_in_an_envelope_or_a_clear_error(data: bytes) -> None:
    try:
        parse_envelope(data)
    except SolError:
        pass
