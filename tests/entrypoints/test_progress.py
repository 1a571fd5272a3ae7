"""The time left: a guess at first, then what the parts that ended say."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from config.schema import Expected
from entrypoints.progress import Pace, Progress


def test_before_anything_ended_it_is_what_was_expected() -> None:
    pace = Pace(100.0, 2)
    assert pace.left(7.0) == 200.0
    pace.start(10.0)
    assert pace.left(40.0) == 170.0
    assert pace.share() == 0.0


def test_a_machine_of_half_the_speed_doubles_what_is_left() -> None:
    pace = Pace(100.0, 1)
    pace.start(0.0)
    pace.finish(40.0, 80.0)
    assert pace.left(80.0) == 120.0
    assert pace.left(90.0) == 110.0
    assert pace.share() == pytest.approx(0.4)


def test_an_arm_that_ends_early_takes_its_rest_with_it() -> None:
    pace = Pace(100.0, 2)
    pace.start(0.0)
    pace.finish(40.0, 40.0)
    pace.finish_arm(50.0)
    assert pace.left(50.0) == 100.0
    pace.finish_arm(60.0)
    assert (pace.left(60.0), pace.share()) == (0.0, 1.0)


@given(st.lists(st.tuples(st.floats(0.1, 50), st.floats(0, 500)), max_size=20), st.floats(0, 1e4))
def test_it_is_never_negative_and_the_share_stays_a_share(parts: list[tuple[float, float]], later: float) -> None:
    pace, now = Pace(100.0, 3), 0.0
    pace.start(now)
    for expected, took in parts:
        now += took
        pace.finish(expected, now)
        assert pace.left(now) >= 0.0
        assert 0.0 <= pace.share() <= 1.0
    assert pace.left(now + later) >= 0.0


def test_every_line_tells_the_time_left() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200), ["dense"], 1, 4, 4, Expected(load=40, forward=1, request=6))
    with progress:
        progress.part("checkpoint")
        progress.on_arm("dense")
        progress.on_event("dense", {"event": "load_end", "source": "driver"})
        progress.on_event("dense", {"event": "arm_end", "source": "driver", "outcome": "complete"})
    lines = out.getvalue().splitlines()
    assert all(" left" in line for line in lines)
    assert "about 1:00 left" in lines[0]
    assert lines[-1].endswith("about 0:00 left")


def test_a_warm_up_of_fewer_steps_counts_as_that_many() -> None:
    """A dense arm of 11 and 49 forwards said 3:49 left before its last forward: its warm-up had counted as 49."""
    out = io.StringIO()
    expected = Expected(load=120, forward=6, request=10)
    with Progress(Console(file=out, width=200), ["dense"], 1, 49, 11, expected) as progress:
        progress.part("checkpoint")
    lines = out.getvalue().splitlines()
    assert lines and all("about 8:20 left" in line for line in lines)  # 120 + (11 + 49) x 6 + 2 x 10
