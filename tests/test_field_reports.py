"""docs/field-reports.md: every row names tests, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/field-reports.md").read_text("utf-8")
ROWS = {int(line.split("|")[1]): line.split("|") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)}
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), flags=re.MULTILINE)
}


def test_every_row_is_there() -> None:
    assert sorted(ROWS) == [
        *(1, 3, 5, 6, 7, 8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21),
        *(23, 24, 25, 26, 28, 29, 30, 32, 34, 35, 38, 39),
    ]


def test_every_row_is_shown_by_tests_that_exist() -> None:
    for number, cells in ROWS.items():
        named = re.findall(r"`(test_\w+)`", cells[5])
        assert named, number
        assert set(named) <= TESTS, (number, set(named) - TESTS)


def test_every_test_that_the_page_names_exists() -> None:
    """Those of the faults tried against fetch as well."""
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 60
    assert named <= TESTS, named - TESTS


def test_every_test_with_a_number_stands_in_the_table() -> None:
    assert [test for test in TESTS if test.startswith("test_field_report") and f"`{test}`" not in PAGE] == []
