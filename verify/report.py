"""The verdict on a record: integrity, checks, trust and published claims in one report.

Order of the verdicts, the heaviest first: INVALID (13), FAILED (1), UNSIGNED and UNTRUSTED (14), PASSED and PASSED
(partial) (0). What is wrong with the record itself is said before who signed it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from config.errors import Exit, InvalidRecord, UsageError
from config.record import ATTESTATION, Benchmark
from verify.attestation import Attestation, read_attestation
from verify.checks import run_checks
from verify.claims import ClaimVerdict, judge_claims
from verify.derive import derive
from verify.files import ELSEWHERE, Files
from verify.findings import Finding, Status, worst
from verify.policy import Evidence, Policy, load_policy
from verify.reader import Record, read_record, read_status

Result = Literal["PASSED", "PASSED (partial)", "FAILED", "INVALID"]
Trust = Literal["trusted", "untrusted", "unsigned"]
READABLE, INTEGRITY, SAID, TRUST = "record-readable", "attestation-integrity", "attestation-result", "attestation-trust"


@dataclass(frozen=True)
class Report:
    """What `sol verify` says about a record.

    result: the verdict without the question of trust. signer: id of the key that signed, empty when unsigned. record
    and benchmark are None where the record could not be read; benchmark is derived again, never read from
    benchmark.json.
    """

    path: Path
    findings: tuple[Finding, ...]
    result: Result
    trust: Trust
    trust_reason: str
    signer: str
    record: Record | None
    benchmark: Benchmark | None
    claims: tuple[ClaimVerdict, ...]

    @property
    def verdict(self) -> str:
        """PASSED, PASSED (partial), FAILED, INVALID, UNSIGNED or UNTRUSTED."""
        if self.result in ("INVALID", "FAILED") or self.trust == "trusted":
            return self.result
        return self.trust.upper()

    @property
    def exit_code(self) -> Exit:
        """Exit code of `sol verify`."""
        codes = {"INVALID": Exit.INVALID_RECORD, "FAILED": Exit.FAILED}
        return codes.get(self.result, Exit.PASSED if self.trust == "trusted" else Exit.UNTRUSTED)

    @property
    def result_exit_code(self) -> Exit:
        """Exit code with the question of trust left out: what `sol benchmark` ends with after it signed with a key of
        its own.
        """
        return {"INVALID": Exit.INVALID_RECORD, "FAILED": Exit.FAILED}.get(self.result, Exit.PASSED)

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        record = self.record
        return {
            "schema_version": 1,
            "record": self.path.name,
            "verdict": self.verdict,
            "exit_code": int(self.exit_code),
            "result": self.result,
            "trust": self.trust,
            "trust_reason": self.trust_reason,
            "signer": self.signer,
            "target": record.lock.target if record else None,
            "lock_digest": record.lock.digest if record else None,
            "open": record.open if record else None,
            "withheld": sorted(record.withheld) if record else [],
            "findings": [finding.as_json() for finding in self.findings],
            "claims": [claim.as_json() for claim in self.claims],
            "benchmark": self.benchmark.model_dump(mode="json") if self.benchmark else None,
        }


def verify_record(path: Path, trust: Path | None = None) -> Report:
    """Judge a record.

    Args:
        path: the record's directory.
        trust: a trust file (see `verify.policy`); without one nobody is trusted, and the best verdict is UNTRUSTED.

    Raises:
        UsageError: `path` is no directory, or the trust file is not one. Nothing in the record raises.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory", needed="a run record", remedy="name a folder below runs/")
    policy = load_policy(trust) if trust is not None else None
    try:
        return _judge(path, policy)
    except MemoryError:
        error = InvalidRecord("its files do not fit into this machine's memory", remedy=ELSEWHERE)
        return _unreadable(path, _finding(READABLE, error))


def _judge(path: Path, policy: Policy | None) -> Report:
    try:
        files = Files(path)
    except InvalidRecord as error:
        return _unreadable(path, _finding(READABLE, error))
    try:
        attestation = read_attestation(files)
    except InvalidRecord as error:
        return _unreadable(path, _finding(INTEGRITY, error))
    findings = [_integrity(attestation)]
    signer = attestation.signer.keyid if attestation else ""
    try:
        record = read_record(path, attestation.withheld if attestation else frozenset(), files)
    except InvalidRecord as error:
        return _unreadable(path, *_aborted(files), _finding(READABLE, error), signer=signer)
    findings.append(Finding(READABLE, Status.OK, "every file fits its schema"))
    findings += run_checks(record)
    findings.append(_said(attestation, findings))
    trusted, reason = _trust(attestation, record, policy)
    findings.append(_trust_finding(trusted, reason))
    result = _result(record, findings)
    benchmark = _derive(record)
    claims = judge_claims(record, benchmark, result in ("PASSED", "PASSED (partial)")) if benchmark else []
    return Report(path, tuple(findings), result, trusted, reason, signer, record, benchmark, tuple(claims))


def check_record(path: Path) -> list[Finding]:
    """Put every check to a record that is not signed yet: what an attestation is to say.

    Raises:
        InvalidRecord: it cannot be read at all; such a record is not signed.
    """
    record = read_record(path)
    return [Finding(READABLE, Status.OK, "every file fits its schema"), *run_checks(record)]


def _finding(check: str, error: InvalidRecord) -> Finding:
    message = f"{error.found}; needed: {error.needed}" if error.needed else error.found
    return Finding(check, Status.INVALID, message, error.remedy or "ask for the record as it was written")


def _aborted(files: Files) -> list[Finding]:
    """A record that cannot be read because its run was cut short says so first."""
    try:
        status = read_status(files)
    except InvalidRecord:
        return []
    if status.state == "complete":
        return []
    reason = status.reason or "no reason given"
    remedy = "`sol benchmark --resume` adds what is missing"
    return [Finding("record-status", Status.INVALID, f"the run is {status.state}: {reason}", remedy)]


def _unreadable(path: Path, *findings: Finding, signer: str = "") -> Report:
    trust: Trust = "untrusted" if signer else "unsigned"
    return Report(path, findings, "INVALID", trust, "the record could not be judged", signer, None, None, ())


def _integrity(attestation: Attestation | None) -> Finding:
    if attestation is None:
        return Finding(INTEGRITY, Status.SKIPPED, "the record is not signed", "`sol sign` it")
    count = len(attestation.statement.subject) - len(attestation.withheld)
    message = f"{count} files are as {attestation.signer.keyid[:16]} signed them"
    if attestation.withheld:
        message += f"; withheld: {', '.join(sorted(attestation.withheld))}"
    return Finding(INTEGRITY, Status.OK, message)


def _said(attestation: Attestation | None, findings: Iterable[Finding]) -> Finding:
    """Does the signed result agree with ours? A signer who found less than we do is not believed, one who found more
    is.
    """
    if attestation is None:
        return Finding(SAID, Status.SKIPPED, "the record is not signed")
    said, ours = attestation.statement.predicate, worst(findings)
    if said.result != "FAILED" and ours in (Status.FAIL, Status.INVALID):
        return Finding(SAID, ours, f"signed as {said.result}, and it is not", "see the other findings", ATTESTATION)
    if said.result == "FAILED" and ours not in (Status.FAIL, Status.INVALID):
        names = ", ".join(said.failedTests) or "no check named"
        return Finding(
            SAID, Status.FAIL, f"signed as FAILED ({names}); nothing fails here", "ask its signer", ATTESTATION
        )
    return Finding(SAID, Status.OK, f"signed as {said.result}")


def _trust(attestation: Attestation | None, record: Record, policy: Policy | None) -> tuple[Trust, str]:
    if attestation is None:
        return "unsigned", "nobody signed the record"
    if policy is None:
        return "untrusted", "no trust file was given"
    evidence = Evidence(attestation.signer.keyid, record.lock.target, record.environment.image_digest)
    reason = policy.unmet(evidence)
    return ("untrusted", reason) if reason else ("trusted", "the trust file names the key")


def _trust_finding(trust: Trust, reason: str) -> Finding:
    if trust == "trusted":
        return Finding(TRUST, Status.OK, reason)
    remedy = "pass --trust FILE that names the signer's key" if trust == "untrusted" else "`sol sign` the record"
    return Finding(TRUST, Status.SKIPPED, reason, remedy)


def _result(record: Record, findings: list[Finding]) -> Result:
    heaviest = worst(findings)
    if heaviest == Status.INVALID:
        return "INVALID"
    if heaviest == Status.FAIL:
        return "FAILED"
    undecoded = any(finding.check == "media-decoded" and finding.status == Status.SKIPPED for finding in findings)
    return "PASSED (partial)" if record.withheld or undecoded else "PASSED"


def _derive(record: Record) -> Benchmark | None:
    try:
        return derive(record)
    except Exception:  # a finding of benchmark-derived says it already
        return None
