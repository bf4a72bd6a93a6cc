"""tests/rows.txt: every row of the research notes has its tests."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORTS = (
    "01 02 04 05 06 09 10 13 15 16 19 21 23 24 25 26 28 29 30 31 33 34 35 36 39 40 42 43 44 45 47 "
    "48 49 52 53 54 56 57 58 61 62 63 64 65 67 69 71 72 73 74 76 78 79 82 83 84 86 87 89 90 "
    "91 92 94 95 114 115"
)
NO_BUG = {11, 22, 24}
EXPECTED = {f"R{number}" for number in REPORTS.split()}
EXPECTED |= {f"B{number:02}" for number in range(1, 37) if number not in NO_BUG}
INVARIANTS = (
    "01 02 03 04 05 06 07 08 10 11 12 13 14 15 20 21 22 23 24 25 26 27 28 30 31 32 33 34 "
    "40 41 42 43 44 45 46 50 51 52 53 54 55 60 61 62 80 81 82 83 84"
)
EXPECTED |= {f"I{number}" for number in INVARIANTS.split()}
LINES = [line.split() for line in (ROOT / "tests" / "rows.txt").read_text().splitlines()]
ROWS = {row: tests for row, *tests in LINES if row != "#"}


@cache
def named_tests(file: str) -> set[str]:
    """Names of the tests in a file: functions, and classes of tests."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):  # the machine of a stateful test
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.lower().startswith("test")}


def test_every_row_is_listed_once() -> None:
    assert set(ROWS) == EXPECTED
    assert len([row for row, *_ in LINES if row != "#"]) == len(EXPECTED)


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(row: str) -> None:
    if ROWS[row][:1] == ["-"]:
        assert len(ROWS[row]) > 3, "a row without a test needs a reason"
        return
    assert ROWS[row]
    for test in ROWS[row]:
        file, _, name = test.partition("::")
        assert name in named_tests(file), f"{file} has no {name}"
