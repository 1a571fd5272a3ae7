"""Progress of a run with the time left: a live bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

LINE_SECONDS = 10.0
LOAD_UNITS = 20.0
"""Loading weighs about as much as this many forwards, until the first load was timed."""
REQUEST_UNITS = 10.0
"""Text encoding, decoding and mux of a request, in forwards, likewise."""


class Progress:
    """Follows the events of a run. The estimate is elapsed time over the share of units done, hence rough at first."""

    def __init__(self, console: Console, arms: Sequence[str], samples: int, forwards: int) -> None:
        self._console, self._arms = console, list(arms)
        self._forwards, self._requests = forwards, samples + 1
        self._began = self._last_line = time.monotonic()
        self._finished_units = self._units = 0.0
        self._what = "starting"
        self._live: Live | None = None
        self._bytes = ByteRate()

    @property
    def _arm_units(self) -> float:
        return LOAD_UNITS + self._requests * (self._forwards + REQUEST_UNITS)

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
            self._units = LOAD_UNITS
        elif kind == "request_start" and source == "driver":
            self._what = f"{place}: {event['phase']} sample {event['sample']}, text encoding"
        elif kind == "step":
            self._units += 1
            self._what = f"{place}: sample {event['sample']}, forward {event['step'] + 1}"
        elif kind == "request_end" and source == "worker":
            self._what = f"{place}: sample {event['sample']}, decoding"
        elif kind == "request_end":
            self._units += REQUEST_UNITS
        elif kind == "gate":
            self._console.print(f"{place}: Real-QKV gate {'green' if event['passed'] else 'RED'}")
        elif kind == "arm_end":
            self._finished_units += self._arm_units
            self._units = 0.0
            self._what = f"{place}: {event['outcome']}"
            self._say()

    def _share(self) -> float:
        total = self._arm_units * len(self._arms)
        return min((self._finished_units + self._units) / total, 1.0) if total else 0.0

    def _line(self) -> Text:
        share, elapsed = self._share(), time.monotonic() - self._began
        left = f"about {clock(elapsed / share - elapsed)} left" if share > 0.02 else "time left not known yet"
        return Text(f"[{clock(elapsed)}] {share:4.0%}  {self._what}; {left}")

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
