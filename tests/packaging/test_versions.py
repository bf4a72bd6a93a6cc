"""One version, written in three places that must agree."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import gymfast

ROOT = Path(__file__).parents[2]


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_version_is_the_same_in_project_file_package_and_installed_metadata() -> None:
    assert gymfast.__version__ == _project()["version"] == importlib.metadata.version("gymfast")


def test_changelog_has_an_entry_for_the_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert _project()["version"] in headings


def test_base_dependencies_are_the_five_that_architecture_allows() -> None:
    names = {re.match(r"[\w-]+", line).group() for line in _project()["dependencies"]}
    assert names == {"numpy", "msgspec", "safetensors", "click", "rich"}
