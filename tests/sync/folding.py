"""What tests of folds share: runs whose versions differ in few units, compactors, late readers."""

from __future__ import annotations

from pathlib import Path

from sync.harness import RUN, Weights, assert_same, history, publisher, reader, zeros_like

from gymfast.stores.base import Store
from gymfast.sync import Compactor
from gymfast.sync.folds import spans
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import Log

KEYS = RunKeys(RUN)
SIZE = 20_000  # units of a tensor: large enough for folds to pay
FOLDED_9 = [(0, 4), (4, 8), (8, 9)]


def published(store: Store, num_versions: int, **options) -> list[Weights]:
    """Weights of versions 0 to `num_versions`, committed; they differ in few units."""
    states = history(num_versions, num_tensors=2, size=SIZE)
    options = {"keep": 1000, "anchor_every": 256, **options}
    source = publisher(store, **options)
    for state in states:
        source.publish(state)
    return states


def compact(store: Store, folder: Path, **options) -> list[tuple[int, int]]:
    """Spans of the folds that a compactor makes until nothing is due."""
    options = {"every": 2, "levels": 2, "threads": 1, **options}
    with Compactor(store, RUN, folder, **options) as compactor:
        return [(fold.base_version, fold.version) for fold in compactor.work()]


def spans_of(store: Store) -> list[tuple[int, int]]:
    return [(span.base, span.version) for span in spans(Log(store, KEYS))]


def pulled(store: Store, states: list[Weights], **options) -> list[tuple[int, int]]:
    """What a fresh reader fetches to get to the newest version, which it then exactly holds."""
    live = zeros_like(states[0])
    with reader(store, live, **options) as follower:
        staged = follower.fetch()
        found = [
            (getattr(s.record, "base_version", -1), s.record.version) for s in staged.plan.steps
        ]
        assert follower.apply().version == len(states) - 1
    assert_same(live, states[-1])
    return found
