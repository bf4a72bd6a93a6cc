"""Fixtures of the command line tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_commands import Gymfast, Result

from gymfast.cli import main

WIDTH = 80


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Width 80, no colour, and none of the variables of gymfast."""
    for name in list(os.environ):
        if name.startswith("GYMFAST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture
def gymfast(capfd: pytest.CaptureFixture[str]) -> Gymfast:
    """Run `gymfast` in this process; every run also checks what holds for all of them."""

    def run(*args: str | Path) -> Result:
        capfd.readouterr()
        code = main([str(arg) for arg in args])
        result = Result(code, *capfd.readouterr())
        assert "Traceback" not in result.out + result.err
        assert (code == 0) or result.err.count("Error: ") == 1, result
        return result

    return run


@pytest.fixture
def gymfast_process() -> Gymfast:
    """Run `gymfast` in a process of its own."""

    def run(*args: str | Path, **kwargs: Any) -> Result:
        command = [sys.executable, "-m", "gymfast", *map(str, args)]
        options = {"capture_output": True, "text": True, "timeout": 60, **kwargs}
        done = subprocess.run(command, check=False, **options)
        assert "Traceback" not in (done.stdout or "") + (done.stderr or "")
        return Result(done.returncode, done.stdout or "", done.stderr or "")

    return run
