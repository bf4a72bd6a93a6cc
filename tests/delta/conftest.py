"""Back ends and frame parsers that every test of this folder runs on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gymfast import _core
from gymfast.delta.backends import Backend, select
from gymfast.delta.frame import parse_frame


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return select(request.param)


@pytest.fixture(params=["reference", "cpu"])
def parse(request: pytest.FixtureRequest) -> Callable[[bytes], object]:
    return parse_frame if request.param == "reference" else _core.parse_frame
