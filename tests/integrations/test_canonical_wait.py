"""An engine's copy that waits for a version reads the log once, and takes exactly that version."""

from __future__ import annotations

from collections import Counter

import pytest
from sync.harness import RUN, FaultyStore, assert_same, history, publisher

from gymfast.errors import DeadlineError
from gymfast.integrations.canonical import CanonicalCopy
from gymfast.stores import MemoryStore


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    store = FaultyStore(MemoryStore())
    store.num_ahead, store.shows_puts = 4, True
    monkeypatch.setattr("gymfast.integrations.canonical.open_store", lambda url: store)
    monkeypatch.setenv("GYMFAST_REPORT_S", "0")
    return store


def test_a_copy_that_waits_asks_for_each_record_once(far: FaultyStore) -> None:
    states = history(2)
    source = publisher(far)
    source.publish(states[0])
    copy = CanonicalCopy.of_run("far", RUN)
    copy.pull(0, timeout_s=60.0)
    source.publish(states[1])
    far.arm(None)
    copy.pull(1, timeout_s=60.0)
    asked = Counter(key for operation, key in list(far.calls) if "/log/" in key)
    assert asked and max(asked.values()) == 1, asked
    assert copy.root == source.root
    copy.close()


def test_a_copy_that_waits_takes_no_newer_version(far: FaultyStore) -> None:
    states = history(2)
    source = publisher(far)
    for state in states:
        source.publish(state)
    copy = CanonicalCopy.of_run("far", RUN)
    copy.pull(1, timeout_s=60.0)
    tensors = dict(copy.tensors(copy.names, states[1][copy.names[0]]))
    assert_same(tensors, states[1])
    with pytest.raises(DeadlineError, match="waiting for version 3"):
        copy.pull(3, timeout_s=0.05)
    copy.close()
