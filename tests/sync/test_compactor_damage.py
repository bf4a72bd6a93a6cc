"""A compactor goes past what is lost, from the next full state on, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from sync.folding import KEYS, SIZE, pulled, spans_of
from sync.harness import RUN, Weights, history, publisher

from gymfast.errors import ChainError
from gymfast.stores import MemoryStore
from gymfast.sync import Compactor
from gymfast.sync.log import Log
from gymfast.sync.manifest import StateRecord

pytestmark = pytest.mark.usefixtures("quick_disk")


def with_anchor(num_versions: int, anchor: int | None) -> tuple[MemoryStore, list[Weights]]:
    """A run whose version `anchor` is a full state, as version 0 is."""
    store, states = MemoryStore(), history(num_versions, num_tensors=2, size=SIZE)
    source = publisher(store, keep=1000, anchor_every=256)
    for version, state in enumerate(states):
        source.publish(state, anchor=version == anchor)
    return store, states


def lose(store: MemoryStore, version: int) -> None:
    """Deletes the frame of a version; its record stays."""
    records, _ = Log(store, KEYS).read_all()
    (record,) = [r for r in records.values() if isinstance(r, StateRecord) and r.version == version]
    for ref in record.frame.objects:
        store.delete(KEYS.object(record.epoch, ref.digest))


def compactor(store: MemoryStore, folder: Path) -> Compactor:
    return Compactor(store, RUN, folder, every=2, levels=1, threads=1, timeout_s=0.05)


@pytest.mark.parametrize("lost", [0, 3])
def test_a_compactor_behind_a_lost_frame_goes_on_from_the_next_full_state(
    lost: int, tmp_path: Path
) -> None:
    store, states = with_anchor(10, 5)
    lose(store, lost)
    with compactor(store, tmp_path / "c") as folder:
        made = [(fold.base_version, fold.version) for fold in folder.work()]
        assert made == [(0, 2)] * (lost == 3) + [(6, 8), (8, 10)]
        (skip,) = folder.skipped
        assert (skip.first, skip.last) == ((3, 5) if lost == 3 else (0, 5))
        assert "is lost" in skip.reason
        assert list(folder.work()) == []
    assert (8, 10) in spans_of(store)
    assert pulled(store, states, timeout_s=0.05)[0] == (-1, 5)


def test_a_compactor_behind_a_lost_frame_waits_for_a_full_state(tmp_path: Path) -> None:
    store, states = with_anchor(5, None)
    lose(store, 3)
    with compactor(store, tmp_path / "c") as folder:
        made = folder.work()
        assert next(made).version == 2
        with pytest.raises(ChainError, match="is lost"):
            list(made)
        assert folder.skipped == ()
        source = publisher(store, keep=1000, anchor_every=256)
        for version in (6, 7, 8):
            source.publish(states[-1], anchor=version == 6)
        assert [fold.version for fold in folder.work()] in ([], [8])
        assert [(s.first, s.last) for s in folder.skipped] == [(3, 5)]
        assert folder.version == 8
