"""The cases of `python -m benchmarks transfer` under pytest-benchmark, at quick sizes.

pytest -c benchmarks/cases/pytest.ini benchmarks/cases/transfer.py
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.transfer import NotHere, Options, Row, cases


@pytest.mark.parametrize("name", list(cases()))
def test_transfer(name: str, benchmark: BenchmarkFixture) -> None:
    rows: list[Row] = []

    def run() -> None:
        try:
            rows.extend(cases()[name](Options.quick()))
        except NotHere as reason:
            pytest.skip(str(reason))

    benchmark.group = "transfer"
    benchmark.pedantic(run, rounds=1)  # each row has rounds of its own, in processes of its own
    assert rows
    assert all(row.nwrong == 0 for row in rows)
    benchmark.extra_info["rows"] = [row.as_nccl() for row in rows]
