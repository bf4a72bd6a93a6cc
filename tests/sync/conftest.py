"""Fixtures of the tests of publish and subscribe."""

from __future__ import annotations

import os

import pytest

from gymfast.stores import FileStore, MemoryStore


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path / "store")


@pytest.fixture
def quick_disk(monkeypatch):
    """For tests that write many checkpoints: no power is cut here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
