"""The stores of this package pass the shipped contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymfast.stores import FileStore, MemoryStore, Store
from gymfast.testing.conformance import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestFileStore(StoreContract):
    is_shared = True
    is_streaming = True

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FileStore(tmp_path / "not" / "yet" / "there")


@pytest.mark.long
class TestFileStoreForLonger(TestFileStore):
    num_thread_rounds = 1000
    num_process_rounds = 1000
    num_kills = 200
