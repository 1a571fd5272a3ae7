"""`sol keygen` and `sol sign`: a record is checked, closed and signed as what it is, good or bad."""

from __future__ import annotations

import shlex
from pathlib import Path

from config.errors import EnvironmentRefused, Exit, InvalidRecord, SolError, UsageError
from config.hold import hold
from config.record import ATTESTATION, STATUS
from entrypoints.console import make_console
from verify.attestation import sign, sign_ephemeral
from verify.files import Files
from verify.findings import Finding, worst
from verify.findings import Status as Outcome
from verify.keys import keygen, load_signer
from verify.reader import read_status
from verify.report import check_record


def make_key(path: Path) -> None:
    """Make a key pair and say what to do with the two files.

    Raises:
        UsageError: a file exists already or cannot be written.
    """
    private, public, keyid = keygen(path)
    console = make_console()
    console.print(f"private key {private} (keep it to yourself)", markup=False, soft_wrap=True)
    console.print(f"public key {public}, key id {keyid}", markup=False, soft_wrap=True)
    console.print("whoever trusts it names it in a trust file:\n", markup=False)
    console.print(f'[[keys]]\nname = "{private.stem}"\npem = "{public}"', markup=False, soft_wrap=True)


def sign_record(record: Path, key: Path | None) -> Exit:
    """Check and sign a record that was left open or cut; returns whether what was signed had passed.

    Raises:
        UsageError: it is signed already, or its run is still going on.
        InvalidRecord: it cannot be read.
    """
    if not record.is_dir():
        raise UsageError(f"{record} is not a directory", remedy="name a run record")
    close_if_cut(record)  # looks whether anybody holds the record: before we do
    with hold(record) as free:
        if not free:
            raise UsageError(f"{record} is still being written", remedy="wait for the run's end")
        findings = close_and_sign(record, key)
    outcome = worst(findings)
    console = make_console()
    console.print(
        f"{record / ATTESTATION} signs {len(findings)} findings, worst: {outcome}", markup=False, soft_wrap=True
    )
    if outcome is Outcome.INVALID:
        return Exit.INVALID_RECORD
    return Exit.FAILED if outcome is Outcome.FAIL else Exit.PASSED


def close_and_sign(record: Path, key: Path | None) -> list[Finding]:
    """Put every check to a record, and sign it with what they found. Without a key, with one that is then forgotten.

    Raises:
        UsageError: it is signed already, still being written, or the key cannot be used.
        InvalidRecord: it cannot be read.
        EnvironmentRefused: the signature cannot be written.
    """
    signer = load_signer(key) if key else None
    close_if_cut(record)
    try:
        findings = check_record(record)
    except InvalidRecord as error:
        findings = [Finding("record-readable", Outcome.INVALID, error.found, error.remedy)]
    try:
        if signer is None:
            sign_ephemeral(record, findings)
        else:
            sign(record, signer, findings)
    except OSError as error:
        raise EnvironmentRefused(
            f"{record} is closed, and could not be signed: {error.strerror or error}",
            needed="free space for some 100 KB, and write access",
            remedy=f"mend that and type `{shlex.join(['sol', 'sign', str(record)])}`: nothing of the record is lost",
        ) from error
    return findings


def close_if_cut(record: Path) -> None:
    """Write into `status` what a reader finds out: a run that says running, and whose process is gone, was aborted."""
    try:
        found = read_status(Files(record))
    except SolError:
        return  # the checks will say what is wrong with it
    if found.state == "aborted" and b'"running"' in (record / STATUS).read_bytes():
        size = (record / STATUS).stat().st_size
        line = found.model_dump_json().encode().ljust(size - 1) + b"\n"
        (record / STATUS).write_bytes(line)
