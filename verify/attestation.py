"""Signing a record, and checking that a signed one is what was signed.

`attestation.json` is a DSSE envelope (https://github.com/secure-systems-lab/dsse, v1.0.2) around an in-toto Statement
v1 whose subjects are the SHA-256 of every other file of the record, and whose predicate is test-result v0.1.

It has one canonical byte form: RFC 8785 JSON of the envelope, without white space, around RFC 8785 JSON of the
statement, in standard base64. Any other form of the same content is refused, so that no bit of the file is without
effect.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import rfc8785
from pydantic import Field
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from config.canonical import canonical_json
from config.errors import InvalidRecord, UsageError
from config.record import ATTESTATION, LOCK, PAYLOAD_TYPE, PREDICATE_TYPE, SIGNER, STATEMENT_TYPE, Signer
from config.schema import Model, Sha256
from verify.files import Files, is_detachable
from verify.findings import Finding, Status, names_by_outcome, worst
from verify.keys import as_signer_json, from_signer_json
from verify.reader import read_status
from verify.strictjson import parse, parse_model

AS_SIGNED = "take the record as it was signed"
Result = Literal["PASSED", "WARNED", "FAILED"]
Names = Annotated[tuple[str, ...], Field(strict=False)]


class Digest(Model):
    """A DigestSet with SHA-256 alone."""

    sha256: Sha256


class Resource(Model):
    """A ResourceDescriptor: a file by name, relative to the record, and digest."""

    name: str
    digest: Digest


class TestResult(Model):
    """Predicate https://in-toto.io/attestation/test-result/v0.1. A test is one of our checks."""

    __test__ = False  # not a test case, whatever pytest thinks of the name

    result: Result
    configuration: tuple[Resource, ...] = Field(strict=False)
    passedTests: Names
    warnedTests: Names
    failedTests: Names


class Statement(Model):
    """in-toto Statement v1."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: tuple[Resource, ...] = Field(strict=False, min_length=1)
    predicateType: Literal["https://in-toto.io/attestation/test-result/v0.1"]
    predicate: TestResult


@dataclass(frozen=True)
class Attestation:
    """A checked attestation: who signed, what they said, and which detachable files are withheld."""

    signer: Signer
    statement: Statement
    withheld: frozenset[str] = field(default=frozenset())


def sign(record: Path, signer: CryptoSigner, findings: Iterable[Finding]) -> Path:
    """Write signer.json and attestation.json, which says what the findings say. Returns the attestation's path.

    A finding that fails or invalidates makes the result FAILED: a record is signed as what it is.

    Raises:
        UsageError: the record is signed already, or still running.
        InvalidRecord: it cannot be read.
        OSError: it cannot be written.
    """
    findings = list(findings)
    files = Files(record)
    if ATTESTATION in files:
        raise UsageError(f"{record} is signed already", remedy="verify it; a signed record is not changed")
    if read_status(files).state == "running":
        raise UsageError(f"{record} is still being written", remedy="wait for the run's end")
    _replace(record / SIGNER, canonical_json(as_signer_json(signer.public_key).model_dump()) + b"\n")
    try:
        files = Files(record)
        payload = canonical_json(_statement(files, findings))
        envelope = Envelope(payload, PAYLOAD_TYPE, {})
        envelope.sign(signer)
        _replace(record / ATTESTATION, canonical_json(envelope.to_dict()))
    except BaseException:
        (record / SIGNER).unlink(missing_ok=True)  # alone it would say that an attestation was taken away
        raise
    return record / ATTESTATION


def sign_ephemeral(record: Path, findings: Iterable[Finding]) -> Path:
    """Sign with a key made for this record alone and then forgotten: it can be checked, and nobody has a reason to
    trust it.

    Raises:
        UsageError, InvalidRecord, OSError: as `sign`.
    """
    return sign(record, CryptoSigner.generate_ed25519(), findings)


def _statement(files: Files, findings: list[Finding]) -> dict[str, Any]:
    subject = [_resource(files, name) for name in files if name != ATTESTATION]
    result: Result = "PASSED"
    match worst(findings):
        case Status.FAIL | Status.INVALID:
            result = "FAILED"
        case Status.WARN:
            result = "WARNED"
    configuration = [_resource(files, LOCK)] if LOCK in files else []
    predicate = {"result": result, "configuration": configuration, **names_by_outcome(findings)}
    return {"_type": STATEMENT_TYPE, "subject": subject, "predicateType": PREDICATE_TYPE, "predicate": predicate}


def _resource(files: Files, name: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": files.sha256(name)}}


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_attestation(files: Files) -> Attestation | None:
    """Check the envelope, its signature by the key of signer.json, and every subject; None for an unsigned record.

    Whether that key is to be trusted is another question: see `verify.policy`.

    Raises:
        InvalidRecord: anything is not as it was signed; the error names the file, or the files.
    """
    if ATTESTATION not in files:
        if SIGNER in files:
            raise InvalidRecord(
                f"{ATTESTATION} is missing, and {SIGNER} is there: it was removed, or signing was cut short",
                remedy="ask for the whole record; its owner may sign again",
            )
        return None
    envelope = parse_envelope(files.read(ATTESTATION))
    if SIGNER not in files:
        raise InvalidRecord(f"{SIGNER} is missing", remedy="ask for the whole record")
    signer: Signer = parse_model(Signer, files.read(SIGNER), SIGNER)
    key = from_signer_json(signer)
    statement = _checked(envelope, key)
    return Attestation(signer, statement, _withheld(files, statement))


def parse_envelope(data: bytes) -> Envelope:
    """The envelope in the canonical bytes of an attestation.

    Raises:
        InvalidRecord: they are not one envelope with one signature, or not in canonical form.
    """
    value = parse(data, ATTESTATION)
    shape = isinstance(value, dict) and set(value) == {"payload", "payloadType", "signatures"}
    signatures = value["signatures"] if shape else None
    if not (
        isinstance(signatures, list)
        and len(signatures) == 1
        and isinstance(signatures[0], dict)
        and set(signatures[0]) == {"keyid", "sig"}
        and all(isinstance(text, str) for text in (value["payload"], value["payloadType"], *signatures[0].values()))
    ):
        raise InvalidRecord(f"{ATTESTATION} is not a DSSE envelope with one signature", remedy=AS_SIGNED)
    try:
        envelope = Envelope.from_dict(copy.deepcopy(value))
        canonical = canonical_json(envelope.to_dict())
    except (ValueError, TypeError, KeyError, rfc8785.CanonicalizationError) as error:
        raise InvalidRecord(f"{ATTESTATION} is not a DSSE envelope: {error}", remedy=AS_SIGNED) from None
    if canonical != data:
        raise InvalidRecord(f"{ATTESTATION} is not in its one canonical form", remedy=AS_SIGNED)
    return envelope


def _checked(envelope: Envelope, key: SSlibKey) -> Statement:
    keyid = next(iter(envelope.signatures))
    if keyid != key.keyid:
        raise InvalidRecord(f"{ATTESTATION} names key {keyid[:16]}, {SIGNER} has {key.keyid[:16]}", remedy=AS_SIGNED)
    if envelope.payload_type != PAYLOAD_TYPE:
        raise InvalidRecord(f"{ATTESTATION} has payload type {envelope.payload_type!r}", needed=PAYLOAD_TYPE)
    try:
        envelope.verify([key], 1)
    except VerificationError:
        raise InvalidRecord(
            f"{ATTESTATION}: the signature is not one by the key of {SIGNER} over this content", remedy=AS_SIGNED
        ) from None
    where = f"{ATTESTATION}, payload"
    value = parse(envelope.payload, where)
    try:
        canonical = canonical_json(value)
    except rfc8785.CanonicalizationError as error:
        raise InvalidRecord(f"{where} has no canonical form: {error}", remedy=AS_SIGNED) from None
    if canonical != envelope.payload:
        raise InvalidRecord(f"{where} is not canonical JSON", remedy=AS_SIGNED)
    statement: Statement = parse_model(Statement, envelope.payload, where)
    return statement


def _withheld(files: Files, statement: Statement) -> frozenset[str]:
    attested = {resource.name: resource.digest.sha256 for resource in statement.subject}
    if list(attested) != sorted(attested) or len(attested) != len(statement.subject):
        raise InvalidRecord(f"{ATTESTATION}: subjects are not sorted and unique", remedy=AS_SIGNED)
    present = {name for name in files if name != ATTESTATION}
    withheld = {name for name in set(attested) - present if is_detachable(name)}
    faults = [f"{name} was added" for name in sorted(present - set(attested))]
    faults += [f"{name} is missing" for name in sorted(set(attested) - present - withheld)]
    faults += [
        f"{name} was changed" for name in sorted(present & set(attested)) if files.sha256(name) != attested[name]
    ]
    if faults:
        raise InvalidRecord(f"not as it was signed: {'; '.join(faults)}", remedy=AS_SIGNED)
    configuration = {resource.name: resource.digest.sha256 for resource in statement.predicate.configuration}
    if configuration != {LOCK: attested.get(LOCK)} and LOCK in attested:
        raise InvalidRecord(f"{ATTESTATION}: the configuration is not this record's {LOCK}", remedy=AS_SIGNED)
    return frozenset(withheld)
