"""Habits of docs/architecture.md and CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTED = subprocess.run(
    ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
).stdout.split("\0")
TRACKED = sorted(path for name in LISTED if name and (path := ROOT / name).is_file())
SOURCES = [path for path in TRACKED if path.suffix in {".py", ".cpp", ".h", ".cu", ".cuh"}]
TOP_LEVEL = {
    *("pyproject.toml", "CMakeLists.txt", "csrc", "gymfast", "sim", "benchmarks", "tests"),
    *("docs", "examples", "Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md"),
    *("LICENSE", ".clang-format", ".pre-commit-config.yaml", ".ci", ".gitignore", ".gitattributes"),
}


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_checkout_lists_its_files() -> None:
    assert len(SOURCES) > 20, "run the tests in a git checkout"


def test_only_the_agreed_names_stand_at_the_top() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in TRACKED} <= TOP_LEVEL


def test_no_tracked_file_is_over_1_mib() -> None:
    assert [_id(path) for path in TRACKED if path.stat().st_size > 2**20] == []


def test_no_source_file_is_over_500_lines() -> None:
    assert [_id(path) for path in SOURCES if len(path.read_text().splitlines()) > 500] == []


def test_no_file_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [_id(path) for path in SOURCES if path.stem in drawers] == []


@pytest.mark.parametrize("folder", ["gymfast", "sim/gymfast_sim", "benchmarks"])
def test_no_python_function_is_over_80_lines(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or 0) - node.lineno + 1
                if num_lines > 80:
                    found.append(f"{_id(path)}:{node.lineno} {node.name}: {num_lines} lines")
    assert found == []


def test_no_tracked_text_names_a_path_of_this_machine() -> None:
    places = [f"{ROOT}/", f"{Path.home()}/"]
    texts = [path for path in TRACKED if path.suffix in {".py", ".md", ".toml", ".csv", ".json"}]
    assert [_id(p) for p in texts if any(place in p.read_text() for place in places)] == []
