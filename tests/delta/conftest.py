"""Back ends and frame parsers that every test of this folder runs on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gymfast.delta.backends import Backend, select
from gymfast.delta.frame import parse_frame
from gymfast.errors import MissingDependencyError


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    try:
        return select(request.param)
    except MissingDependencyError:
        pytest.skip("gymfast._core is not built")


@pytest.fixture(params=["reference", "cpu"])
def parse(request: pytest.FixtureRequest) -> Callable[[bytes], object]:
    if request.param == "reference":
        return parse_frame
    core = pytest.importorskip("gymfast._core", reason="gymfast._core is not built")
    return core.parse_frame
