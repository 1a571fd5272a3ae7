"""A report for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from config.record import ArmResult
from verify.findings import Finding, Status
from verify.report import Report

STYLES = {
    Status.OK: "green",
    Status.SKIPPED: "dim",
    Status.WARN: "yellow",
    Status.FAIL: "bold red",
    Status.INVALID: "bold red",
}


def render(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print a report: arms, claims, findings, verdict. Without `verbose`, passed checks are counted and not listed."""
    if report.benchmark:
        console.print(_arms(report))
    if report.claims:
        console.print(_claims(report))
    passed = sum(finding.status == Status.OK for finding in report.findings)
    shown = [finding for finding in report.findings if verbose or finding.status != Status.OK]
    if shown:
        console.print(_findings(shown))
    console.print(f"{passed} findings without objection" + ("" if verbose else " (not listed)"))
    console.print(_verdict(report))


def _arms(report: Report) -> Table:
    benchmark = report.benchmark
    assert benchmark is not None
    title = f"{benchmark.target}: {'locked' if benchmark.locked else 'open'} run, {benchmark.weights} weights"
    table = Table("arm", "outcome", "n", "seconds", "denoise", "cache", "density", "gate", title=title)
    for name, arm in benchmark.arms.items():
        table.add_row(name, arm.outcome, str(len(arm.samples)), *_figures(arm))
    for ratio in benchmark.ratios:
        table.add_row(
            f"{ratio.arm} / {ratio.baseline}",
            "",
            "",
            f"{ratio.seconds:.2f}x",
            f"{ratio.denoise_seconds:.2f}x",
            "",
            "",
            "",
        )
    return table


def _figures(arm: ArmResult) -> tuple[str, ...]:
    last = arm.samples[-1] if arm.samples else None
    cache, density = (last.cache, last.density) if last else (None, None)
    return (
        f"{arm.seconds.median:.2f}" if arm.seconds else "-",
        f"{arm.denoise_seconds.median:.2f}" if arm.denoise_seconds else "-",
        f"{cache.compute} + {cache.reuse} reused" if cache else "-",
        f"{density.mean:.1%}" if density else "-",
        f"{'green' if arm.gate.passed else 'RED'}, {arm.gate.rel_l2:.2g}" if arm.gate else "-",
    )


def _claims(report: Report) -> Table:
    table = Table("claim", "published", "measured", "n", "verdict", "reason", title="published claims")
    for claim in report.claims:
        measured = "-" if claim.measured is None else f"{claim.measured:.6g} {claim.unit}".strip()
        table.add_row(claim.claim, claim.printed, measured, str(claim.n), claim.text, claim.reason)
    return table


def _findings(findings: list[Finding]) -> Table:
    table = Table("status", "check", "finding", title="findings")
    for finding in findings:
        text = f"{finding.where}: {finding.message}" if finding.where else finding.message
        if finding.remedy:
            text += f"\n-> {finding.remedy}"
        table.add_row(Text(finding.status, STYLES[finding.status]), finding.check, _plain(text))
    return table


def _plain(text: str) -> Text:
    """Text of a record as it stands: neither rich's markup nor a terminal's control sequences in it have an effect."""
    return Text(
        "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)
    )


def _verdict(report: Report) -> Text:
    style = {0: "bold green", 14: "bold yellow"}.get(int(report.exit_code), "bold red")
    text = Text(report.verdict, style)
    if report.verdict != report.result:
        text.append(f" (the result itself: {report.result})")
    text.append_text(_plain(f", exit {int(report.exit_code)}; {report.trust_reason}"))
    return text
