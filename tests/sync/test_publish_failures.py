"""A publisher whose store, memory or log fails: exact after a retry, or refused."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from sync.harness import (
    RUN,
    FaultyStore,
    ManualClock,
    assert_same,
    history,
    make_weights,
    publisher,
    reader,
    step,
    zeros_like,
)

from gymfast.delta import State
from gymfast.errors import (
    BudgetError,
    ConflictError,
    DeadlineError,
    FormatError,
    StoreError,
)
from gymfast.stores import MemoryStore
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import parse_hint

KEYS = RunKeys(RUN)


def run_with_faults(how: str, make_fault):
    """Publishes with one fault per attempt until it works; then everything has to be exact."""
    states = history(3)
    for number in itertools.count(1):
        store = FaultyStore(MemoryStore())
        clock = ManualClock()
        source = publisher(store, clock=clock, anchor_every=2, keep=1, timeout_s=5.0)
        source.publish(states[0])
        source.publish(states[1])
        store.arm(make_fault(number, how))
        try:
            source.publish(states[2])
            failed = False
        except (StoreError, DeadlineError):
            failed = True
        num_calls = len(store.calls)
        store.arm(None)
        if failed:
            report = source.publish(states[2])
            assert report.version in (2, 3)
            assert report.root == State.reading(states[2]).root.hex()
        source.publish(states[3])
        live = zeros_like(states[0])
        reader(store, live).pull()
        assert_same(live, states[3])
        if number > num_calls:
            return number
    raise AssertionError


@pytest.mark.parametrize("how", ["before", "after"])
def test_i04_a_retry_after_one_failed_call_is_exact(how):
    def fault(number, how):
        return lambda n, operation, key: how if n == number else ""

    assert run_with_faults(how, fault) > 10


@pytest.mark.parametrize("how", ["before", "after"])
def test_i04_a_retry_after_a_store_that_stays_away_is_exact(how):
    def fault(number, how):
        return lambda n, operation, key: how if n >= number else ""

    assert run_with_faults(how, fault) > 10


def test_i04_other_weights_after_a_lost_reply_are_diffed_against_what_was_committed():
    states = history(4)
    store, clock = FaultyStore(MemoryStore()), ManualClock()
    source = publisher(store, clock=clock, timeout_s=5.0)
    source.publish(states[0])
    is_log = f"{RUN}/log/"
    store.arm(
        lambda n, operation, key: (
            ("after" if operation == "create" else "before") if key.startswith(is_log) else ""
        )
    )
    with pytest.raises(StoreError, match="injected"):
        source.publish(states[1])
    assert source.version == 0
    store.arm(None)
    report = source.publish(states[2])
    assert (report.version, report.kind) == (2, "anchor")
    live = zeros_like(states[0])
    follower = reader(store, live)
    for version in range(3):
        follower.pull(version)
        assert_same(live, states[version])


def test_the_version_asked_for_is_refused_if_an_earlier_attempt_took_it():
    states = history(2)
    store, clock = FaultyStore(MemoryStore()), ManualClock()
    source = publisher(store, clock=clock, timeout_s=5.0)
    store.arm(
        lambda n, op, key: (
            ("after" if op == "create" else "before") if key.startswith(KEYS.log_prefix) else ""
        )
    )
    with pytest.raises(StoreError):
        source.publish(states[0], version=7)
    store.arm(None)
    with pytest.raises(ValueError, match="goes on with 8"):
        source.publish(states[1], version=7)
    assert source.publish(states[1], version=8).version == 8


def test_an_interrupt_in_the_middle_leaves_the_committed_state():
    states = history(3)
    for where in ("put", "create"):
        store = FaultyStore(MemoryStore())
        source = publisher(store)
        source.publish(states[0])

        def interrupt(n, operation, key, where=where):
            if operation == where and "/hint" not in key:
                raise KeyboardInterrupt
            return ""

        store.arm(interrupt)
        with pytest.raises(KeyboardInterrupt):
            source.publish(states[1])
        store.arm(None)
        assert source.publish(states[2]).kind == "delta"
        live = zeros_like(states[0])
        reader(store, live).pull()
        assert_same(live, states[2])


def test_weights_that_no_frame_can_carry_leave_the_committed_state(store):
    states = history(2)
    source = publisher(store)
    source.publish(states[0])
    for bad, error in (
        ({}, ValueError),
        ({"a": object()}, TypeError),
        ({"a\n": np.zeros(3)}, ValueError),
        ({**states[1], "x": np.array(["text"])}, TypeError),
    ):
        with pytest.raises(error):
            source.publish(bad)
    assert source.publish(states[1]).kind == "delta"
    assert source.version == 1


def test_objects_of_a_failed_publish_are_removed(store):
    faulty = FaultyStore(store)
    source, states = publisher(faulty, object_bytes=100, timeout_s=1.0), history(2)
    source.publish(states[0])
    before = sorted(store.list(KEYS.objects_prefix))
    faulty.arm(lambda n, op, key: "before" if op == "put" and n > 6 else "")
    with pytest.raises(StoreError):
        source.publish(states[1])
    faulty.arm(None)
    assert sorted(store.list(KEYS.objects_prefix)) == before


def test_what_is_only_advice_may_fail(store, caplog):
    faulty = FaultyStore(store)
    source, states = publisher(faulty, anchor_every=1, keep=1), history(4)
    faulty.arm(lambda n, op, key: "before" if key == KEYS.hint or op == "delete" else "")
    for weights in states:
        source.publish(weights)
    assert "hint" in caplog.text
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[-1])


def test_an_anchor_that_fails_is_made_up_for_later(store, caplog):
    faulty = FaultyStore(store)
    source, states = publisher(faulty, anchor_every=2), history(4)
    source.publish(states[0])
    source.publish(states[1])
    creates = itertools.count()
    faulty.arm(lambda n, op, key: "before" if op == "put" and next(creates) == 2 else "")
    report = source.publish(states[2])
    assert (report.version, report.anchor_bytes) == (2, 0)
    assert "gets its anchor later" in caplog.text
    faulty.arm(None)
    assert source.publish(states[3]).anchor_bytes > 0
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[3])


def test_i60_a_snapshot_that_does_not_fit_is_refused_with_numbers():
    weights = make_weights(size=5000)
    size = sum(value.nbytes for value in weights.values())
    with pytest.raises(BudgetError, match=f"{size} bytes for the snapshot") as caught:
        publisher(memory_budget_bytes=size).publish(weights)
    assert f"the budget is {size} bytes" in str(caught.value)
    assert "memory_budget_bytes" in str(caught.value)
    assert BudgetError.exit_code == 7


def test_i60_a_way_back_that_does_not_fit_makes_the_version_an_anchor(caplog):
    weights = make_weights(size=5000)
    size = sum(value.nbytes for value in weights.values())
    from gymfast.sync.budget import SECTION_BYTES

    store = MemoryStore()
    budget = size + SECTION_BYTES + (1 << 20) + 3000
    source = publisher(store, memory_budget_bytes=budget, object_bytes=1 << 20)
    source.publish(weights)
    second = step(weights, 1, density=0.001)
    assert source.publish(second).kind == "delta"
    third = step(second, 2, density=0.2)
    assert source.publish(third).kind == "anchor"
    assert "the way back needs" in caplog.text
    fourth = step(third, 3, density=0.001)
    assert source.publish(fourth).kind == "delta"
    live = zeros_like(weights)
    reader(store, live).pull()
    assert_same(live, fourth)


def test_the_available_memory_is_the_budget_if_none_is_declared(monkeypatch):
    from gymfast.sync import budget

    monkeypatch.setattr(budget, "available_bytes", lambda: 1000)
    with pytest.raises(BudgetError, match="of 1000 bytes available 900 may be used"):
        publisher().publish(make_weights())
    monkeypatch.setattr(budget, "available_bytes", lambda: None)
    publisher().publish(make_weights())


def test_available_memory_is_known_on_linux():
    from gymfast.sync.budget import available_bytes

    found = available_bytes()
    assert found is None or found > 0


def test_the_hint_is_advice_only(store):
    source, states = publisher(store), history(2)
    for weights in states:
        source.publish(weights)
    hint = parse_hint(store.get(KEYS.hint, max_bytes=1000), "hint")
    assert (hint.version, hint.seq) == (2, 4)
    for blob in (b"garbage", b"", json.dumps({"seq": 10**9}).encode()):
        store.put(KEYS.hint, blob)
        live = zeros_like(states[0])
        assert reader(store, live).pull().version == 2
    store.delete(KEYS.hint)
    assert reader(store, zeros_like(states[0])).pull().version == 2


def test_a_reader_with_a_key_refuses_what_is_not_signed_with_it(store):
    key = b"0123456789abcdef"
    states = history(2)
    source = publisher(store, key=key)
    for weights in states:
        source.publish(weights)
    live = zeros_like(states[0])
    assert reader(store, live, key=key).pull().version == 2
    assert reader(store, zeros_like(live)).pull().version == 2
    with pytest.raises(FormatError, match="another key"):
        reader(store, zeros_like(live), key=b"x" * 16).pull()
    with pytest.raises(FormatError, match="another key"):
        publisher(store, key=b"x" * 16)
    publisher(store, run="open").publish(states[0])
    with pytest.raises(FormatError, match="not signed"):
        reader(store, zeros_like(live), run="open", key=key).pull()


def test_a_publisher_without_the_key_of_a_signed_run_is_refused_before_it_writes(store):
    key = b"0123456789abcdef"
    states = history(3)
    publisher(store, key=key).publish(states[0])
    before = set(store.list(""))
    with pytest.raises(ConflictError, match="is signed: its readers refuse"):
        publisher(store)
    assert {name for name in store.list("") if "/log/" in name} == {
        n for n in before if "/log/" in n
    }
    publisher(store, key=key).publish(states[1])
    assert reader(store, zeros_like(states[0]), key=key).pull().version == 1


def test_progress_is_told_in_bytes(store):
    source, states = publisher(store, object_bytes=500), history(1)
    told: list[tuple[int, int]] = []
    source.publish(states[0], advance=lambda done, total: told.append((done, total)))
    size = sum(value.nbytes for value in states[0].values())
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    told.clear()
    reader(store, zeros_like(states[0])).pull(advance=lambda d, t: told.append((d, t)))
    assert told[-1][0] == told[-1][1] > 0
