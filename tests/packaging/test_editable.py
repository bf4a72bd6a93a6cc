"""`make build` installs both packages in place: edits are live, the extension is beside them."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _file_of(module: str) -> Path:
    """Where a fresh process, started elsewhere, finds the module."""
    program = f"import {module} as m; print(m.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd="/", capture_output=True, text=True, check=True
    )
    return Path(done.stdout.strip())


def test_this_environment_has_an_editable_install_of_this_checkout() -> None:
    text = importlib.metadata.distribution("gymfast").read_text("direct_url.json")
    origin = json.loads(text or "{}")
    assert origin == {"dir_info": {"editable": True}, "url": ROOT.as_uri()}


def test_both_packages_are_those_of_the_checkout() -> None:
    assert _file_of("gymfast") == ROOT / "gymfast/__init__.py"
    assert _file_of("gymfast_sim") == ROOT / "sim/gymfast_sim/__init__.py"


def test_extension_is_found_outside_the_checkout() -> None:
    assert not _file_of("gymfast._core").is_relative_to(ROOT / "gymfast")
