"""The README tells the truth: its commands run, its table of variables is the program's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gymfast.cli.settings import SETTINGS

README = (Path(__file__).parents[2] / "README.md").read_text()
# Blocks of one language run together, in order; `<!-- not run -->` above a block leaves it out.
BLOCK = re.compile(r"(<!-- not run -->\n)?```(bash|python)\n(.*?)```", re.DOTALL)


def _blocks(language: str) -> str:
    return "\n".join(
        text for skip, kind, text in BLOCK.findall(README) if kind == language and not skip
    )


def _run(command: list[str], text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "NO_COLOR": "1"}
    return subprocess.run(
        command,
        input=text,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_python_blocks_run(tmp_path: Path) -> None:
    done = _run([sys.executable, "-P", "-"], _blocks("python"), tmp_path)
    assert done.returncode == 0, done.stderr


def test_bash_blocks_run_after_the_python_blocks(tmp_path: Path) -> None:
    assert _run([sys.executable, "-P", "-"], _blocks("python"), tmp_path).returncode == 0
    done = _run(["bash", "-euxo", "pipefail"], _blocks("bash"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_languages_have_blocks_that_run() -> None:
    assert "publish" in _blocks("python")
    assert "gymfast delta" in _blocks("bash")


def test_table_of_variables_is_complete() -> None:
    assert set(re.findall(r"^\| `(GYMFAST_\w+)`", README, re.MULTILINE)) == {
        s.name for s in SETTINGS
    }


@pytest.mark.parametrize("name", re.findall(r"\]\((?!https?:|#)([^)#]+)", README))
def test_links_lead_to_files(name: str) -> None:
    assert (Path(__file__).parents[2] / name).exists()


def test_benchmark_table_has_its_markers() -> None:
    assert README.count("<!-- benchmark:begin -->") == README.count("<!-- benchmark:end -->") == 1
