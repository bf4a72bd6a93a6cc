"""The pause of an engine under slime's updater and ours: every update is checked by its digest."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.slime.model import shapes
from benchmarks.slime.pause import WHO, Row, measure, table, write

SOURCE = os.environ.get("GYMFAST_SLIME_SOURCE")
ROW = Row("every tensor", "slime, reload", 400, 0.01, 40, 9, 7, 1.0, 2.0, 3.0, 2.5, 3.5, 6.0)


def test_a_row_becomes_a_line_of_the_table_and_of_the_csv(tmp_path: Path) -> None:
    line = "| every tensor | slime, reload | 1.00 | 2.00 | **3.000** (2.500 to 3.500) | 6.00 | 9 |"
    assert table([ROW]).splitlines()[-1] == line
    write(tmp_path / "rows.csv", [ROW], {"cpu": "Some CPU"})
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert lines[0] == "# cpu: Some CPU"
    assert lines[2] == "every tensor,slime, reload".replace("slime, reload", '"slime, reload"') + (
        ",400,0.01,40,9,7,1,2,3,2.5,3.5,6"
    )


def test_the_model_has_the_size_that_is_asked_for() -> None:
    size = sum(2 * rows[0] * (rows[1] if len(rows) > 1 else 1) for rows in shapes(1 << 28).values())
    assert 0.98 < size / (1 << 28) <= 1
    with pytest.raises(ValueError, match="too small, expected 128 MiB or more"):
        shapes(32 << 20)


@pytest.mark.ci
def test_updaters_and_engines_run_in_turns(tmp_path: Path) -> None:
    if SOURCE is None:
        pytest.skip("needs GYMFAST_SLIME_SOURCE")
    options = Namespace(source=Path(SOURCE), size=128 << 20, density=0.01, rounds=1)
    options.folder = tmp_path
    rows = measure(options, "one layer", "layers.5.")
    assert [row.who for row in rows] == list(WHO)
    loaded = [row.num_loaded for row in rows]
    assert loaded[0] == loaded[1] > 8 * loaded[2] - 1
    for row in rows:
        assert 0 < row.pause_s < row.total_s
