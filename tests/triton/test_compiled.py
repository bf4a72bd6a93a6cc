"""Every kernel compiles for sm_90 and sm_100, and takes no more resources than the table says."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
UPDATE = "if that is meant: python -P tests/triton/compile_kernels.py --write"


def read(lines: list[str]) -> dict[tuple[str, ...], dict[str, int]]:
    """Resources by kernel, variant and architecture."""
    keys = ("kernel", "variant", "arch")
    return {
        tuple(row.pop(key) for key in keys): {name: int(value) for name, value in row.items()}
        for row in csv.DictReader(lines)
    }


def regressions(
    table: dict[tuple[str, ...], dict[str, int]], found: dict[tuple[str, ...], dict[str, int]]
) -> list[str]:
    """What got worse, as sentences."""
    lines = [f"{key}: in only one of table and compiler" for key in table.keys() ^ found.keys()]
    for key in table.keys() & found.keys():
        for name, value in found[key].items():
            is_worse = value < table[key][name] if "16" in name else value > table[key][name]
            if is_worse:
                lines.append(f"{key}: {name} {value}, the table says {table[key][name]}")
    return sorted(lines)


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, ...], dict[str, int]]:
    return read((FOLDER / "resources.csv").read_text().splitlines())


@pytest.mark.timeout(600)  # a cold cache: twice sixty kernels
@pytest.mark.usefixtures("triton_installed")
def test_no_kernel_takes_more_than_the_table_says(table, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-P", FOLDER / "compile_kernels.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not regressions(table, read(done.stdout.splitlines())), UPDATE


def test_the_table_keeps_the_promises_of_the_streaming_kernels(table) -> None:
    assert {arch for _, _, arch in table} == {"sm_90", "sm_100"}
    assert all(row["spill_bytes"] == 0 for row in table.values())
    scans = {key[1:]: row for key, row in table.items() if key[0] == "diff_kernel"}
    for arch in ("sm_90", "sm_100"):
        assert scans["-", arch]["registers"] <= 48
        assert scans["-", arch]["loads_16_bytes"] >= 2


def test_a_regression_is_found(table) -> None:
    key = next(key for key, row in table.items() if row["loads_16_bytes"])
    for name, change in (("registers", 1), ("spill_bytes", 8), ("loads_16_bytes", -1)):
        found = {k: dict(row) for k, row in table.items()}
        found[key][name] += change
        assert len(regressions(table, found)) == 1
        found[key][name] = table[key][name] - change
        assert not regressions(table, found)
    assert regressions(table, {}) and not regressions(table, table)
