"""gymfast/_core.pyi and _cuda.pyi are what the stub generator writes for the modules built."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "gymfast"


@pytest.mark.parametrize("module", ["_core", "_cuda"])
def test_committed_stub_equals_the_generated_one(module: str, tmp_path: Path) -> None:
    name = f"gymfast.{module}"
    if module == "_cuda" and find_spec(name) is None:
        pytest.skip("needs nvcc of the CUDA toolkit")
    fresh = tmp_path / f"{module}.pyi"
    subprocess.run(
        [sys.executable, "-P", "-m", "nanobind.stubgen", "-q", "-m", name, "-o", fresh],
        check=True,
        cwd=tmp_path,
    )
    committed = (PACKAGE / f"{module}.pyi").read_text()
    assert committed == fresh.read_text(), "the bindings changed: run make stubs"
