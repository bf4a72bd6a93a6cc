"""Back ends and frame parsers that every test of this folder runs on."""

from __future__ import annotations

import pytest

from gymfast.delta.backends import Backend, select
from gymfast.errors import MissingDependencyError


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    try:
        return select(request.param)
    except MissingDependencyError:
        pytest.skip("gymfast._core is not built")
