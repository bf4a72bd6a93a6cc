"""Progress: a bar on a terminal, never on stdout, without colour and without a trace when asked."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run_on_a_terminal(*words: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and what a terminal of 80 columns got as stderr."""
    main_fd, terminal_fd = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gymfast", *words],
        stdout=subprocess.PIPE,
        stderr=terminal_fd,
        env={**os.environ, "TERM": "xterm-256color", **environment},
        text=True,
    )
    os.close(terminal_fd)
    shown = b""
    while True:
        try:
            chunk = os.read(main_fd, 4096)
        except OSError:  # Linux tells the end of a terminal so
            break
        if not chunk:
            break
        shown += chunk
    out, _ = process.communicate(timeout=60)
    os.close(main_fd)
    return process.returncode, out, shown.decode()


CALL = ("delta", "encode", "old.safetensors", "new.safetensors", "-o", "f.gfd", "--json")
COLOUR = re.compile(r"\x1b\[[0-9;]*[34][0-9](?:;[0-9]+)*m")


def test_a_terminal_gets_a_bar_and_stdout_only_data(files: Path) -> None:
    code, out, shown = run_on_a_terminal(*CALL, COLUMNS="80")
    assert code == 0, shown
    assert json.loads(out)["schema"] == "gymfast.delta.encode/1"
    assert "encode" in shown
    assert not COLOUR.search(shown)  # NO_COLOR is set


def test_no_progress_shows_nothing(files: Path) -> None:
    assert run_on_a_terminal(*CALL, "--no-progress")[::2] == (0, "")


def test_a_dumb_terminal_gets_no_control_codes(files: Path) -> None:
    code, _, shown = run_on_a_terminal(*CALL, TERM="dumb")
    assert (code, shown) == (0, "")


@pytest.mark.parametrize("words", [("delta", "inspect", "old.safetensors"), ("delta", "decode")])
def test_errors_on_a_terminal_are_plain_text(words: tuple[str, ...], files: Path) -> None:
    code, _, shown = run_on_a_terminal(*words)
    assert code in (2, 3)
    assert "\x1b" not in shown
