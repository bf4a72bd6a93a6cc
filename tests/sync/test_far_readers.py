"""Readers of a store that is far away: troubles of what they have under way."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from sync.folding import KEYS
from sync.harness import FaultyStore, assert_same, history, publisher, reader, zeros_like

from gymfast.errors import DeadlineError
from gymfast.stores import MemoryStore

pytestmark = pytest.mark.usefixtures("quick_disk")


def far_store() -> FaultyStore:
    store = FaultyStore(MemoryStore())
    store.num_ahead, store.shows_puts = 4, True
    return store


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs kernel feature fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    """Those of its parent are not in it: whoever waited for them would wait for ever."""
    store, states = far_store(), history(1)
    source = publisher(store)
    source.publish(states[0])
    follower = reader(store, zeros_like(states[0]))
    follower.pull()
    process = os.fork()
    if process == 0:
        signal.alarm(30)
        try:
            source.publish(states[1])
            follower.wait(1, 20.0)
            os._exit(0 if follower.version == 1 else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(process, 0)
    assert status == 0


def test_a_wait_at_a_damaged_record_does_not_spin() -> None:
    store, states = far_store(), history(1)
    source, live = publisher(store), zeros_like(states[0])
    source.publish(states[0])
    follower = reader(store, live)
    follower.pull()
    source.publish(states[1])
    key = KEYS.record(3)
    blob = bytearray(store.get(key, max_bytes=1 << 20))
    blob[40] ^= 1
    store.put(key, bytes(blob))
    follower.poll()
    store.arm(None)
    with pytest.raises(DeadlineError):
        follower.wait(1, 1.0, interval_s=0.25)
    assert len(store.calls) < 40  # tens of thousands where nothing pauses
    assert follower.version == 0


def test_a_look_at_the_floor_that_fails_costs_no_byte() -> None:
    store, states = far_store(), history(0, num_tensors=2, size=20_000)
    source, live = publisher(store, object_bytes=2000), zeros_like(states[0])
    source.publish(states[0])
    follower = reader(store, live)
    num_failed = 0

    def fault(_: int, operation: str, key: str) -> str:
        nonlocal num_failed
        is_after_lease = any(op == "put" and "/readers/" in k for op, k in store.calls)
        is_look = operation == "list" and "/floors/" in key and is_after_lease
        if is_look and not num_failed and threading.current_thread() is not threading.main_thread():
            num_failed += 1
            return "before"
        return ""

    store.arm(fault)
    follower.pull()
    objects = [key for _, key in store.calls if "/objects/" in key]
    assert (num_failed, len(objects)) == (1, len(set(objects)))
    assert_same(live, states[0])
