"""gymfast/_core.pyi is what the stub generator writes for the module that was built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMITTED = Path(__file__).parents[2] / "gymfast/_core.pyi"


def test_committed_stub_equals_the_generated_one(tmp_path: Path) -> None:
    fresh = tmp_path / "_core.pyi"
    subprocess.run(
        [sys.executable, "-P", "-m", "nanobind.stubgen", "-q", "-m", "gymfast._core", "-o", fresh],
        check=True,
        cwd=tmp_path,
    )
    assert COMMITTED.read_text() == fresh.read_text(), "the bindings changed: run make stubs"
