"""`sol verify`: the verdict on a record, as tables or JSON."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from config.errors import Exit, UsageError
from config.lock import load_target
from entrypoints.console import discard_output, make_console, make_table
from entrypoints.report import print_benchmark
from verify.findings import Status, worst
from verify.report import Report, verify_record

COLOURS = {
    Status.OK: "green",
    Status.SKIPPED: "dim",
    Status.WARN: "yellow",
    Status.FAIL: "red",
    Status.INVALID: "red",
}


def verify_and_print(record: Path, trust: Path | None, *, as_json: bool) -> Exit:
    """Judge a record and print the verdict.

    Raises:
        UsageError: not a directory, or not a trust file.
    """
    report = verify_record(record, trust)
    try:
        print_report(report, as_json=as_json)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads had enough (`| head -1`); the verdict is what it is
        discard_output()
    return report.exit_code


def print_verification(record: Path, *, as_json: bool) -> Exit:
    """Judge a record that this process has just signed: whether its key is trusted is for others to say, no failure."""
    report = verify_record(record)
    print_report(report, as_json=as_json)
    return report.result_exit_code


def print_report(report: Report, *, as_json: bool) -> None:
    """Print a report: checks, what was measured, published claims, verdict."""
    console = make_console()
    if as_json:
        console.file.write(json.dumps(report.as_json(), indent=1) + "\n")
        return
    console.print(checks_table(report))
    if report.benchmark is not None:
        print_benchmark(console, report.benchmark)
    print_claims(console, report)
    colour = "green" if report.result.startswith("PASSED") else "red"
    console.print(f"\n{report.verdict}", style=f"bold {colour}", end="")
    console.print(f" (exit {int(report.exit_code)})", end="")
    if report.verdict in ("UNTRUSTED", "UNSIGNED"):
        console.print(f": the record itself {report.result}; {report.trust_reason}", end="")
    console.print()


def checks_table(report: Report) -> Table:
    """One row for each check that is quiet, one for each finding of a check that is not."""
    table = make_table("check", "", "finding", title=f"record {report.path.name}", title_justify="left")
    for name, group in groupby(report.findings, key=lambda finding: finding.check):
        findings = list(group)
        loud = [finding for finding in findings if finding.status is not Status.OK]
        for finding in loud or findings[:1]:
            text = f"{finding.where}: {finding.message}" if finding.where else finding.message
            if not loud and len(findings) > 1:
                text = f"{len(findings)} findings, all ok; {text}"
            if finding.remedy and finding.status not in (Status.OK, Status.SKIPPED):
                text += f" -> {finding.remedy}"
            status = worst(findings) if not loud else finding.status
            colour = COLOURS[status]
            table.add_row(name, Text(str(status), style=colour), text)
    return table


def print_claims(console: Console, report: Report) -> None:
    """The published claims about this target, or that there are none."""
    if report.record is None:
        return
    if not report.claims:
        console.print(f"\nNo published claim is about this target ({title_of(report.record.lock.target)}).")
        return
    table = make_table(
        "claim", "published", "measured", "verdict", "why", title="published claims", title_justify="left"
    )
    for claim in report.claims:
        measured = "not measured" if claim.measured is None else f"{claim.measured:.6g} {claim.unit} (n = {claim.n})"
        table.add_row(claim.claim, claim.printed, measured, claim.text, claim.reason)
    console.print(table)


def title_of(target: str) -> str:
    """What a target is; of another release's target its name."""
    try:
        return load_target(target).title
    except UsageError:
        return f"{target}, which this release does not know"
