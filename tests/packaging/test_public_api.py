"""The names that users may rely on; a change here is a change for the changelog."""

from __future__ import annotations

import importlib

import pytest

PINNED: dict[str, list[str]] = {
    "gymfast": [
        *("__version__", "Encoder", "State", "Tensor"),
        *("apply", "encode", "inspect", "restore", "verify"),
    ],
    "gymfast.delta": [
        *("ApplyReport", "EncodeStats", "Encoder", "FrameInfo", "State", "Tensor", "TensorInfo"),
        *("Weights", "apply", "as_tensor", "encode", "inspect", "restore", "verify"),
    ],
    "gymfast.stores": [
        *("Blob", "FileStore", "HttpStore", "MemoryStore", "ObjectStore", "Store"),
        *("check_create_only", "check_key", "check_prefix", "open_store"),
    ],
    "gymfast.sync": [
        *("Publisher", "PublishReport", "Subscriber", "SubscriberStatus", "Staged", "State"),
        *("Target", "LiveTarget", "CheckpointTarget", "GroupTarget", "InstallReport"),
        *("CleanReport", "collect", "Compactor", "FoldReport"),
    ],
}


@pytest.mark.parametrize("module", PINNED)
def test_public_names_are_pinned(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == sorted(PINNED[module])


@pytest.mark.parametrize("module", PINNED)
def test_every_public_name_exists(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []
