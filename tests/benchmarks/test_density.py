"""`python -m benchmarks density`: its rows agree with what is known of the formats."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    """All rows that need no training, as the CSV has them too."""
    file = tmp_path_factory.mktemp("density") / "density.csv"
    command = [sys.executable, "-m", "benchmarks", "density", "--quick", "--without-training"]
    found = subprocess.run(
        [*command, "--json", "--csv", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["schema"] == "gymfast-density/1"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert [r["data"] for r in csv.DictReader(lines)] == [r["data"] for r in document["rows"]]
    return document["rows"]


def test_every_form_is_measured_with_frozen_and_recomputed_scales(rows) -> None:
    generated = [row for row in rows if row["data"] == "generator 1% dithered"]
    forms = {(row["form"], row["scales"]) for row in generated}
    assert len(generated) == len(forms) == 11
    assert ("bf16", "") in forms and ("int4 g32", "recomputed") in forms


def test_fewer_codes_change_than_bf16_values_and_frozen_scales_never_do(rows) -> None:
    bf16 = {row["data"]: row["changed_ratio"] for row in rows if row["form"] == "bf16"}
    for row in rows:
        if row["form"] == "bf16":
            continue
        assert row["changed_ratio"] < bf16[row["data"]]
        if row["scales"] == "frozen":
            assert row["scales_ratio"] == 0
        assert row["delta_bytes"] < row["full_bytes"]
