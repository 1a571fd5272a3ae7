"""Progress of a run with the time left: a live bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from config.schema import Expected

LINE_SECONDS = 10.0


class Pace:
    """Seconds left of a run, from what its parts were expected to take and how much longer they took so far."""

    def __init__(self, arm_seconds: float, arms: int) -> None:
        self._arm_seconds, self._arms = arm_seconds, arms
        self._expected_left = self._total = arm_seconds * arms
        self._expected_done = self._took = 0.0
        self._since: float | None = None

    def start(self, now: float) -> None:
        """A part begins."""
        self._since = now

    def finish(self, expected: float, now: float) -> None:
        """The running part, expected to take `expected` seconds, ended; the next begins."""
        self._took += now - (now if self._since is None else self._since)
        self._expected_done += expected
        self._expected_left = max(self._expected_left - expected, 0.0)
        self._since = now

    def finish_arm(self, now: float) -> None:
        """An arm ended, with or without all its parts."""
        self._arms -= 1
        self._expected_left = self._arm_seconds * self._arms
        self._since = now

    def left(self, now: float) -> float:
        """Seconds left, at least 0."""
        pace = self._took / self._expected_done if self._expected_done else 1.0
        running = 0.0 if self._since is None else now - self._since
        return max(self._expected_left * pace - running, 0.0)

    def share(self) -> float:
        """How much of the run is done, 0 to 1."""
        return 1.0 - self._expected_left / self._total if self._total else 1.0


class Progress:
    """Follows the events of a run; the time left is a guess at first and gets better with every part that ended.

    Args:
        console: where it is shown.
        arms: those that will run, in this order.
        samples: measured requests of an arm, after one of warm-up.
        forwards: of a measured request.
        warmup_forwards: of the warm-up.
        expected: seconds of the parts, as the target guesses them.
    """

    def __init__(
        self,
        console: Console,
        arms: Sequence[str],
        samples: int,
        forwards: int,
        warmup_forwards: int,
        expected: Expected | None = None,
    ) -> None:
        self._console, self._arms = console, list(arms)
        self._expected = expected or Expected()
        all_forwards = warmup_forwards + samples * forwards
        requests = all_forwards * self._expected.forward + (samples + 1) * self._expected.request
        self._pace = Pace(self._expected.load + requests, len(self._arms))
        self._began = self._last_line = time.monotonic()
        self._what = "starting"
        self._live: Live | None = None
        self._bytes = ByteRate()

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._line, console=self._console, refresh_per_second=2, transient=True)
            self._live.start()
        else:
            self._say()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def part(self, what: str) -> None:
        """Work outside the arms."""
        self._what = what
        self._say()

    def say(self, text: str) -> None:
        """A line about the fetch of a checkpoint."""
        self._console.print(text, markup=False)

    def progress(self, what: str, done: int, total: int) -> None:
        """Bytes of a checkpoint that are hashed or fetched."""
        self._what = f"checkpoint: {self._bytes.text(what, done, total)}"
        self.tick()

    def tick(self) -> None:
        """Called often; prints a line now and then where there is no live bar."""
        if self._live is None and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._say()

    def on_arm(self, arm: str) -> None:
        """An arm is about to start."""
        self._pace.start(time.monotonic())
        self._what = f"{self._place(arm)}: starting"
        self._say()

    def _place(self, arm: str) -> str:
        return f"arm {arm} ({self._arms.index(arm) + 1} of {len(self._arms)})"

    def on_event(self, arm: str, event: dict[str, Any]) -> None:
        """One event of an arm."""
        kind, source = event["event"], event["source"]
        place = self._place(arm)
        if kind == "arm_start" and source == "driver":
            self._what = f"{place}: loading"
        elif kind == "load_end":
            self._pace.finish(self._expected.load, time.monotonic())
        elif kind == "request_start" and source == "driver":
            self._what = f"{place}: {event['phase']} sample {event['sample']}, text encoding"
        elif kind == "step":
            self._pace.finish(self._expected.forward, time.monotonic())
            self._what = f"{place}: sample {event['sample']}, forward {event['step'] + 1}"
        elif kind == "request_end" and source == "worker":
            self._what = f"{place}: sample {event['sample']}, decoding"
        elif kind == "request_end":
            self._pace.finish(self._expected.request, time.monotonic())
        elif kind == "gate":
            self._console.print(f"{place}: Real-QKV gate {'green' if event['passed'] else 'RED'}")
        elif kind == "arm_end":
            self._pace.finish_arm(time.monotonic())
            self._what = f"{place}: {event['outcome']}"
            self._say()

    def _line(self) -> Text:
        now = time.monotonic()
        left = f"about {clock(self._pace.left(now))} left"
        return Text(f"[{clock(now - self._began)}] {self._pace.share():4.0%}  {self._what}; {left}")

    def _say(self) -> None:
        if self._live is None:
            self._last_line = time.monotonic()
            self._console.print(self._line())


class ByteRate:
    """How fast bytes of a phase come, over the last seconds, and when the last will be there."""

    WINDOW_SECONDS = 20.0

    def __init__(self) -> None:
        self._what = ""
        self._seen: deque[tuple[float, int]] = deque()

    def text(self, what: str, done: int, total: int) -> str:
        """The phase in words, after `done` of `total` bytes."""
        now = time.monotonic()
        if what != self._what or (self._seen and done < self._seen[-1][1]):
            self._what = what
            self._seen.clear()
        self._seen.append((now, done))
        while now - self._seen[0][0] > self.WINDOW_SECONDS:
            self._seen.popleft()
        before, elapsed = self._seen[0][1], now - self._seen[0][0]
        rate = (done - before) / elapsed if elapsed > 0.5 else 0.0
        left = f"{rate / 1e6:.1f} MB/s, {clock((total - done) / rate)} left" if rate > 0 else "time left not known yet"
        return f"{what} {done / 1e9:.2f} of {total / 1e9:.2f} GB, {left}"


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
