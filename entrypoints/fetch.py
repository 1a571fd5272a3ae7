"""`sol fetch`: a published checkpoint, complete and verified, with a line or a bar that says how far it is."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from config.errors import UsageError
from config.lock import load_target
from engine.checkpoint import access
from engine.checkpoint.fetch import Options, destination, fetch
from engine.checkpoint.published import Verified, verify_published
from engine.checkpoint.store import checkpoint_folder
from entrypoints.benchmark import interrupts_raise
from entrypoints.console import make_console
from entrypoints.progress import LINE_SECONDS, ByteRate, clock

BAR_WIDTH = 30
"""Characters."""


@dataclass(frozen=True)
class FetchOptions:
    """The command line."""

    target: str
    dest: Path | None
    jobs: int
    verify_only: bool
    rehash: bool
    accept_licence: bool
    as_json: bool


class Display:
    """A bar with rate and time left on a terminal, a plain line every ten seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began, self._last = time.monotonic(), -LINE_SECONDS
        self._rate, self._lock = ByteRate(), threading.Lock()
        self._text, self._done, self._total = "asking", 0, 0
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._bar, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """One line about something that happened."""
        self._console.print(text, markup=False, soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """So many bytes of a phase are done."""
        with self._lock:
            self._text, self._done, self._total = self._rate.text(what, done, total), done, total
            now = time.monotonic()
            if self._live is None and now - self._last >= LINE_SECONDS:
                self._last = now
                self._console.print(self._line())

    def _bar(self) -> Columns:
        bar = ProgressBar(total=self._total or None, completed=self._done, width=BAR_WIDTH)  # no total: it only pulses
        return Columns([bar, self._line()])

    def _line(self) -> Text:
        return Text(f"[{clock(time.monotonic() - self._began)}] {self._text}")


def fetch_and_print(options: FetchOptions) -> None:
    """Fetch or verify, and say what is there.

    Raises:
        UsageError: the target has no published weights.
        SolError: whatever stopped it; what arrived is kept.
    """
    checkpoint = load_target(options.target).checkpoint
    if checkpoint.kind != "hub":
        raise UsageError(
            f"target {options.target!r} runs synthetic weights", remedy=f"type `sol synth {options.target}` instead"
        )
    root = (destination(options.dest) if options.dest else checkpoint_folder(checkpoint)).absolute()
    console = make_console(stderr=options.as_json)
    if not options.verify_only:
        ask_for_licence(checkpoint.repo, console, accepted=options.accept_licence)
    with interrupts_raise(), Display(console) as display:
        if options.verify_only:
            verified = verify_published(
                checkpoint,
                root,
                rehash=options.rehash,
                on_hash=lambda done, total: display.progress("hashing", done, total),
            )
        else:
            verified = fetch(checkpoint, root, Options(jobs=options.jobs, rehash=options.rehash), display)
    show(verified, console, as_json=options.as_json)


def ask_for_licence(repo: str, console: Console, *, accepted: bool) -> None:
    """Take an acknowledgement from the option, or from a person at a terminal; without either the fetch refuses."""
    if access.acknowledged(repo):
        return
    if not accepted and sys.stdin.isatty() and console.is_terminal:
        console.print(access.LICENCE.format(repo=repo), markup=False)
        accepted = console.input("Have you read it, and may you use the weights? [yes/no] ").strip().lower() == "yes"
    if accepted:
        access.acknowledge(repo)


def show(verified: Verified, console: Console, *, as_json: bool) -> None:
    """What is there now."""
    size = sum(file.bytes for file in verified.found.files)
    if as_json:
        report = {
            "folder": str(verified.folder),
            "revision": verified.found.revision,
            "sha256": verified.found.sha256,
            "bytes": size,
            "hashed_bytes": verified.hashed,
            "fetched_bytes": verified.fetched,
            "notes": list(verified.notes),
            "files": [file.model_dump() for file in verified.found.files],
        }
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
        return
    console.print(
        f"{verified.folder}: {len(verified.found.files)} files, {size / 1e9:.2f} GB, verified "
        f"({verified.fetched / 1e9:.2f} GB fetched, {verified.hashed / 1e9:.2f} GB hashed now)",
        markup=False,
        soft_wrap=True,
    )
    for note in verified.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
