"""The snapshot of one rank: promoted once, whatever happens in the middle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from gymfast.delta.safetensors_files import Checkpoint
from gymfast.errors import CoverageError, GymfastError
from gymfast.integrations import rank_snapshot
from gymfast.integrations.host_budget import HostBudget
from gymfast.integrations.rank_encoder import Add, Encoded, RankEncoder
from gymfast.integrations.rank_snapshot import RankSnapshot, to_host

OLD = {name: np.arange(1000, dtype=np.uint8) for name in "abc"}
NEW = {name: OLD[name] ^ (OLD[name] % 7 == 0) for name in "abc"}


@pytest.fixture
def snapshot(tmp_path: Path) -> RankSnapshot:
    save_file(OLD, tmp_path / "model.safetensors")
    snapshot = RankSnapshot("xor", "xxh3-128", HostBudget(None))
    with Checkpoint.open(tmp_path) as base:
        for name, value in OLD.items():
            snapshot.seed(name, value, base)
    return snapshot


def test_encoding_changes_nothing_until_it_is_promoted(snapshot: RankSnapshot) -> None:
    for _ in range(2):
        changes = {name: snapshot.encode(name, NEW[name]) for name in "abc"}
    snapshot.promote(changes, 2)
    assert [snapshot.encode(name, NEW[name]) for name in "abc"] == [None] * 3


def test_promoting_again_after_an_error_does_the_rest(
    snapshot: RankSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {name: snapshot.encode(name, NEW[name]) for name in "abc"}
    failing = changes["b"]
    restore = rank_snapshot.restore

    def fail_for_one(stored: object, *arguments: object) -> None:
        if stored is failing:
            raise MemoryError
        restore(stored, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(rank_snapshot, "restore", fail_for_one)
        with pytest.raises(MemoryError):
            snapshot.promote(changes, 2)
    assert list(changes) == ["b"]
    snapshot.promote(changes, 2)
    assert [snapshot.encode(name, NEW[name]) for name in "abc"] == [None] * 3


def test_a_tensor_that_the_base_lacks_is_taken_as_it_is(
    snapshot: RankSnapshot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = np.zeros((), np.float32)
    with Checkpoint.open(tmp_path) as base:
        snapshot.seed("d", value, base)
    assert "tensor 'd' is not in" in caplog.text
    assert snapshot.encode("d", value.reshape(1).view(np.uint8)) is None


def test_a_tensor_that_is_new_or_changed_its_size_is_refused(snapshot: RankSnapshot) -> None:
    with pytest.raises(CoverageError, match="tensor 'x' is new"):
        snapshot.encode("x", NEW["a"])
    with pytest.raises(CoverageError, match="tensor 'a' had 1000 bytes and has 10"):
        snapshot.encode("a", NEW["a"][:10])


def test_a_tensor_without_dimensions_has_its_bytes() -> None:
    value = torch.tensor(1.5, dtype=torch.bfloat16)
    assert to_host(value, "scale").tobytes() == b"\xc0\x3f"


def test_a_tensor_that_is_exported_twice_has_to_be_the_same(
    snapshot: RankSnapshot, tmp_path: Path
) -> None:
    with Checkpoint.open(tmp_path) as base:
        snapshot.seed("a", OLD["a"], base)
    assert snapshot.repeated == {"a"}

    def encode(second: np.ndarray) -> Encoded:
        def walk(add: Add) -> None:
            for name, value in [("a", NEW["a"]), ("b", NEW["b"]), ("a", second)]:
                add(name, value)

        return RankEncoder(snapshot, snapshot.repeated, 2, HostBudget(None)).run(walk)

    encoded = encode(NEW["a"].copy())
    assert list(encoded.changes) == ["a", "b"]
    assert encoded.sizes == {"a": 1000, "b": 1000}
    with pytest.raises(GymfastError, match="tensor 'a' was exported twice with different bytes"):
        encode(OLD["a"])
