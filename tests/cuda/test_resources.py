"""Every CUDA kernel compiles for Hopper and Blackwell, and takes no more than the table says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cuda_resources import Resources, measure, nvcc_version, read_table

Rows = dict[tuple[str, str, int], Resources]


def regressions(found: Rows, table: Rows) -> list[str]:
    """What got worse, and kernels that only one side has."""
    worse = [f"{key}: not in both" for key in sorted(found.keys() ^ table.keys())]
    for key in sorted(found.keys() & table.keys()):
        new, old = found[key], table[key]
        for name in ("registers", "spill_bytes", "shared_bytes"):
            if getattr(new, name) > getattr(old, name):
                worse.append(f"{key}: {name} {getattr(new, name)}, table {getattr(old, name)}")
        if new.vector_loads < old.vector_loads:
            worse.append(f"{key}: vector_loads {new.vector_loads}, table {old.vector_loads}")
    return worse


def missed_targets(rows: Rows) -> list[str]:
    """Targets of issue 3 that a table misses."""
    missed = [f"{key}: spills" for key, row in rows.items() if row.spill_bytes]
    for key, row in rows.items():
        if row.kernel == "diff_kernel" and (row.registers > 48 or row.vector_loads < 2):
            missed.append(f"{key}: {row.registers} registers, {row.vector_loads} 16-byte loads")
    return missed


def test_the_committed_table_meets_the_targets() -> None:
    _, table = read_table()
    assert {key[0] for key in table} == {"90a", "100a"}
    assert {key[2] for key in table if key[1] == "diff_kernel"} == {1, 2, 4}
    assert missed_targets(table) == []


@pytest.mark.parametrize(
    "change", [{"registers": 49}, {"spill_bytes": 4}, {"shared_bytes": 1}, {"vector_loads": 0}]
)
def test_a_worse_kernel_is_a_regression(change: dict[str, int]) -> None:
    _, table = read_table()
    key = ("90a", "diff_kernel", 2)
    worse = table | {key: replace(table[key], **change)}
    assert len(regressions(worse, table)) == 1
    assert len(regressions({k: row for k, row in table.items() if k != key}, table)) == 1
    assert regressions(table, table) == []


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_no_kernel_got_worse() -> None:
    version = nvcc_version()
    if version is None:
        pytest.skip("needs nvcc of the CUDA toolkit")
    found = {row.key: row for row in measure()}
    assert missed_targets(found) == []
    measured_with, table = read_table()
    if version == measured_with:  # another compiler spends registers in another way
        assert regressions(found, table) == []
