"""Keeps the tests of the interpreter out of a process that compiles, and skips without triton."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETING else ["interpreted/*"]


@pytest.fixture
def triton_installed() -> None:
    """Skips where triton cannot be; a Linux machine can be given it, so CI fails on that skip."""
    if sys.platform != "linux":
        pytest.skip(f"needs Linux: triton has no wheel for {sys.platform}")
    # This folder is a namespace package of the name "triton": only a submodule tells them apart.
    if importlib.util.find_spec("triton") is None or not _has_language():
        pytest.skip("needs triton, which the dependency group `test` brings")


def _has_language() -> bool:
    return importlib.util.find_spec("triton.language") is not None
