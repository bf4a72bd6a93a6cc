"""Fixtures of the tests of publish and subscribe."""

from __future__ import annotations

import pytest

from gymfast.stores import FileStore, MemoryStore


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path / "store")
