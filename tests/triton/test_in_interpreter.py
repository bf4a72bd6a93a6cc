"""Runs tests/triton/interpreted in processes of their own, whose kernels run in the interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.timeout(600)  # one process with many tests
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
@pytest.mark.usefixtures("triton_installed")
def test_the_kernels_pass_the_conformance_tests(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FOLDER / file]
    env = os.environ | {"TRITON_INTERPRET": "1", "CI": "true"}
    root = FOLDER.parents[2]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = re.search(r"^(\d+) passed(?P<rest>.*)$", done.stdout, re.MULTILINE)
    assert summary and "skipped" not in summary["rest"], done.stdout[-2000:]
