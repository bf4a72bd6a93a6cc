"""Rows of group D, publishing and storage: one test per public report.

Elsewhere too, with real files, disks and processes: R39 test_stopped, test_explorer; R40
test_stopped, test_crash_points; R42 R53 test_crash_points; R43 test_small_disk, test_crash_points,
tests/stores/test_full_disk; R44 R45 test_invariants (I34); R48 R49 tests/stores, test_damage.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from sync.harness import (
    RUN,
    DelayedStore,
    FaultyStore,
    ManualClock,
    PassThroughStore,
    assert_same,
    copy_of,
    history,
    make_weights,
    publisher,
    reader,
    step,
    zeros_like,
)

from gymfast.errors import ChainError, StoreError
from gymfast.stores import FileStore, MemoryStore
from gymfast.sync import CheckpointTarget, LiveTarget, State, Subscriber, collect
from gymfast.sync.fsck import fsck
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import Log
from gymfast.sync.manifest import StateRecord

KEYS = RunKeys(RUN)


def state_records(store) -> list[StateRecord]:
    entries = Log(store, KEYS).load(lambda _: False)
    return [e.record for e in entries if isinstance(e.record, StateRecord)]


def object_keys(record: StateRecord) -> list[str]:
    return [KEYS.object(record.epoch, ref.digest) for ref in record.frame.objects]


@pytest.mark.parametrize("stop_after", range(4))
def test_r39_a_version_is_not_deleted_while_it_is_read(stop_after):
    """Keep 1, anchors at each version; a slow reader pulls v3 while v4 to v9 are published."""
    store = FaultyStore(MemoryStore())
    states = history(9)
    source = publisher(store, anchor_every=1, keep=1, object_bytes=500)
    for weights in states[:4]:
        source.publish(weights)
    live = zeros_like(states[0])
    follower = reader(store, live)
    reads = [0]

    def slow(n, operation, key):
        if operation == "get_range":
            reads[0] += 1
            if reads[0] == stop_after + 1:
                fault, store.fault = store.fault, None
                for weights in states[4:]:
                    source.publish(weights)
                store.fault = fault
        return ""

    store.arm(slow)
    report = follower.pull()
    store.arm(None)
    assert report.version == 3, "the lease kept what it needed"
    assert_same(live, states[3])
    assert follower.pull().version == 9
    assert_same(live, states[9])
    source.publish(states[8])
    assert not fsck(store, RUN).damage


def test_r39_a_reader_whose_lease_is_over_starts_again_from_a_newer_anchor():
    store, clock = FaultyStore(MemoryStore()), ManualClock()
    states = history(9)
    source = publisher(store, anchor_every=1, keep=1, object_bytes=500, clock=clock)
    for weights in states[:4]:
        source.publish(weights)
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock, lease_s=10.0)
    is_done = [False]

    def very_slow(n, operation, key):
        if operation == "get_range" and not is_done[0]:
            is_done[0] = True
            clock.now_s += 10_000
            for weights in states[4:]:
                source.publish(weights)
        return ""

    store.arm(very_slow)
    assert follower.pull().version == 9
    assert_same(live, states[9])


def test_r40_a_visible_version_is_complete_at_every_call_of_the_publisher():
    """A reader looks at the store before and after each call of the publisher."""
    store = FaultyStore(MemoryStore())
    states = history(4)
    looks = [0]

    def look(n, operation, key):
        looks[0] += 1
        for record in state_records(store.inner):
            for name in object_keys(record):
                assert store.inner.size(name) > 0
        for name in store.inner.list(KEYS.log_prefix):
            assert store.inner.size(name) > 0
        return ""

    source = publisher(store, anchor_every=2, keep=1, object_bytes=300)
    store.arm(look)
    for weights in states:
        source.publish(weights)
    assert looks[0] > 100


def test_r42_a_file_that_cannot_be_deleted_is_a_warning_and_tried_again(caplog):
    class Busy(PassThroughStore):
        is_busy = True

        def delete(self, key):
            if self.is_busy and "/objects/" in key:
                raise StoreError(f"delete '{key}': Directory not empty [ENOTEMPTY]")
            self.inner.delete(key)

    store, states = Busy(MemoryStore()), history(6)
    source = publisher(store, anchor_every=1, keep=1)
    reports = [source.publish(weights) for weights in states[:5]]
    assert reports[-1].version == 4, "publishing goes on"
    failures = [f for r in reports if r.cleaned for f in r.cleaned.failures]
    assert failures
    assert "ENOTEMPTY" in failures[0]
    assert "retention of run" in caplog.text
    num_before = len(list(store.list(KEYS.objects_prefix)))
    store.is_busy = False
    report = source.publish(states[5])
    assert report.cleaned is not None
    assert report.cleaned.failures == ()
    assert len(list(store.list(KEYS.objects_prefix))) < num_before
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[5])


def test_r43_a_full_disk_is_a_clear_error_and_publishing_resumes():
    """64 kB hold about three anchors; ten versions of 10 kB are published without retention."""
    states = [make_weights(seed, size=600) for seed in range(12)]
    store = MemoryStore(limit_bytes=64_000)
    source = publisher(store, anchor_ratio=0.0)
    free: list[int] = []

    def publish_all() -> None:
        for weights in states[:10]:
            free.append(source.publish(weights).free_bytes)

    with pytest.raises(StoreError, match="bytes are free"):
        publish_all()
    assert free == sorted(free, reverse=True), "the space metric falls"
    last = len(free) - 1
    live = zeros_like(states[0])
    follower = reader(store, live)
    assert follower.pull().version == last
    assert_same(live, states[last])
    assert not fsck(store, RUN).findings, "nothing half written is left"
    report = collect(store, RUN, keep=1)
    assert len(report.records) == last
    assert report.num_objects == 0, "a publisher may be alive"
    second = publisher(store, anchor_ratio=0.0, keep=1)
    assert collect(store, RUN, keep=1).num_objects == last, "it is fenced now"
    assert second.publish(states[10]).version == last + 1, "after space was made it goes on"
    follower.pull()
    assert_same(live, states[10])


def test_r43_keep_last_bounds_the_space_by_default():
    store = MemoryStore(limit_bytes=80_000)
    source = publisher(store, anchor_ratio=0.0, keep=2)
    for seed in range(12):
        report = source.publish(make_weights(seed, size=600))
    assert report.free_bytes > 20_000


def test_r44_a_version_is_invisible_until_all_its_objects_are():
    """Objects become visible 5 s late; the record must not come before them."""
    clock = ManualClock()
    inner = MemoryStore()
    store = DelayedStore(inner, clock, lambda key: 5.0 if "/objects/" in key else 0.0)
    states = history(2)
    source = publisher(store, clock=clock, timeout_s=30.0)
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock)
    for version, weights in enumerate(states):
        start_s = clock.now_s
        source.publish(weights)
        assert clock.now_s - start_s >= 5.0
        assert follower.pull().version == version
        assert_same(live, weights)


def test_r45_the_protocol_needs_only_put_get_and_conditional_put():
    """No rename, and lists that are 2 s behind."""
    clock = ManualClock()

    class ObjectStore(DelayedStore):
        def list(self, prefix):
            return iter([k for k in self.inner.list(prefix) if not self._old(k)[0]])

        def _old(self, key):
            is_young = self.clock.monotonic_s() < self._visible_at.get(key, 0.0)
            return is_young, None

        def get(self, key, *, max_bytes):
            return self.inner.get(key, max_bytes=max_bytes)

    store = ObjectStore(MemoryStore(), clock, lambda key: 2.0)
    states = history(6)
    source = publisher(store, clock=clock, anchor_every=2, keep=1)
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock)
    for weights in states:
        source.publish(weights)
        clock.now_s += 3.0
        follower.pull()
        assert_same(live, weights)
    other = publisher(store, clock=clock)
    assert other.version == 6


def test_r47_identity_is_content_not_size_or_time(tmp_path):
    """An object and a checkpoint are overwritten: same size, same mtime, other bytes."""
    store, states = FileStore(tmp_path / "store"), history(2)
    source = publisher(store)
    source.publish(states[0])
    path = tmp_path / "c.safetensors"
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        follower.pull()
    status = path.stat()
    blob = bytearray(path.read_bytes())
    blob[-3] ^= 0x10
    path.write_bytes(blob)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        assert follower.version is None
        follower.pull()
        assert_same(load_file(path), states[0])

    record = state_records(store)[0]
    file = store.root / object_keys(record)[0]
    status = file.stat()
    blob = bytearray(file.read_bytes())
    blob[len(blob) // 2] ^= 1
    file.write_bytes(blob)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    live = zeros_like(states[0])
    late = reader(store, live)
    with pytest.raises(ChainError, match="cannot be reached"):
        late.pull()
    assert_same(live, zeros_like(live))


_TRUNCATE = """
import os, sys
from gymfast.stores import FileStore
from gymfast.sync import CheckpointTarget, Subscriber
store, path = sys.argv[1:]
with Subscriber(FileStore(store), "run-a", CheckpointTarget(path)) as follower:
    assert follower.version == 0, follower.status
    os.truncate(path, os.path.getsize(path) // 2)
    try:
        follower.pull()
    except Exception as error:
        assert path in str(error), error
        print(type(error).__name__, follower.state.name)
    follower.pull()
    print(follower.version)
"""


def test_r48_a_truncated_file_is_an_exception_and_the_process_lives(tmp_path):
    store, states = FileStore(tmp_path / "store"), history(1)
    source = publisher(store)
    source.publish(states[0])
    path = tmp_path / "c.safetensors"
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        follower.pull()
    source.publish(states[1])
    command = [sys.executable, "-c", _TRUNCATE, str(store.root), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["FormatError", "INCONSISTENT", "1"]
    assert_same(load_file(path), states[1])


@pytest.mark.parametrize("cut", ["0", "1", "8", "23", "24", "half", "size-1"])
def test_r49_a_cut_object_is_one_clear_error_with_both_sizes(cut, caplog):
    store, states = MemoryStore(), history(1)
    source = publisher(store)
    for weights in states:
        source.publish(weights)
    key = object_keys(state_records(store)[-1])[0]
    size = store.size(key)
    length = {"half": size // 2, "size-1": size - 1}.get(cut) or int(cut if cut.isdigit() else 0)
    store.put(key, store.get(key, max_bytes=1 << 20)[:length])
    live = copy_of(states[0])
    follower = reader(store, live)
    with pytest.raises(ChainError, match="cannot be reached"):
        follower.pull(1)
    assert f"has {length} bytes, its record says {size}" in caplog.text
    assert (follower.version, follower.state) == (0, State.CLEAN)
    assert_same(live, states[0])


def test_r49_an_object_with_bytes_added_is_refused(caplog):
    store, weights = MemoryStore(), make_weights()
    publisher(store).publish(weights)
    key = object_keys(state_records(store)[-1])[0]
    store.put(key, store.get(key, max_bytes=1 << 20) + b"x")
    with pytest.raises(ChainError):
        reader(store, zeros_like(weights)).pull()
    assert "its record says" in caplog.text


@pytest.mark.parametrize("target_kind", ["live", "checkpoint"])
def test_r52_the_next_good_version_heals_without_a_restart(target_kind, tmp_path):
    """Tensor 5 of 10 is broken at the receiver, then a good version is published."""
    store = MemoryStore()
    states = history(3, num_tensors=10, size=60)
    source = publisher(store)
    source.publish(states[0])
    source.publish(states[1])
    live = copy_of(states[1])
    path = tmp_path / "c.safetensors"
    if target_kind == "live":
        follower = Subscriber(store, RUN, LiveTarget(live))
    else:
        follower = Subscriber(store, RUN, CheckpointTarget(path))
    follower.pull()
    if target_kind == "live":
        live["layers.5.weight"].reshape(-1)[0] += 1
    else:
        blob = bytearray(path.read_bytes())
        blob[len(blob) // 2] ^= 1
        path.write_bytes(blob)
    source.publish({**states[1], "layers.5.weight": states[2]["layers.5.weight"]})
    with pytest.raises(Exception, match=r"digest|base|root"):
        follower.pull()
    assert follower.version is None
    source.publish(states[3])
    assert follower.pull().kind == "anchor"
    assert_same(live if target_kind == "live" else load_file(path), states[3])
    source.publish(states[2])
    assert follower.pull().kind == "deltas"
    assert_same(live if target_kind == "live" else load_file(path), states[2])
    follower.close()


def test_r53_any_torn_position_file_is_survived(tmp_path):
    """Every prefix, and garbage: the checkpoint itself tells what it holds."""
    store, states = MemoryStore(), history(2)
    source = publisher(store)
    source.publish(states[0])
    source.publish(states[1])
    path = tmp_path / "c.safetensors"
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        follower.pull()
    position = tmp_path / ".gymfast.position.c.safetensors"
    whole = position.read_bytes()
    for blob in (*(whole[:n] for n in range(0, len(whole), 7)), b"\0" * 100, b"{}\n"):
        position.write_bytes(blob)
        with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
            follower.poll()
            assert follower.version == 1
    source.publish(states[2])
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        assert follower.pull().kind == "deltas"
    assert_same(load_file(path), states[2])


def test_own_the_disk_of_the_receiver_is_full_during_staging(tmp_path, monkeypatch):
    import shutil

    store, states = MemoryStore(), history(1)
    source = publisher(store)
    source.publish(states[0])
    live = zeros_like(states[0])
    follower = reader(store, live, staging_dir=tmp_path)
    full = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(Exception, match="10 bytes free"):
        follower.pull()
    monkeypatch.undo()
    follower.pull()
    assert_same(live, states[0])


def test_own_two_readers_do_not_disturb_each_other():
    store, states = MemoryStore(), history(5)
    source = publisher(store, anchor_every=2, keep=1)
    lives = [zeros_like(states[0]) for _ in range(2)]
    followers = [reader(store, live, reader_id=f"r{i}") for i, live in enumerate(lives)]
    for version, weights in enumerate(states):
        source.publish(weights)
        followers[version % 2].pull()
        assert_same(lives[version % 2], weights)


def test_own_every_byte_changes_and_zeros_change_sign():
    store = MemoryStore()
    zero = np.zeros(64, np.float32)
    states = [{"a": zero, "b": zero}, {"a": -zero, "b": ~zero.view(np.uint32)}]
    states.append({"a": zero, "b": zero})
    source = publisher(store)
    live = zeros_like(states[0])
    follower = reader(store, live)
    for weights in states:
        source.publish(weights)
        follower.pull()
        assert_same(live, weights)
    assert step(states[0], 1) is not states[0]


def test_R95_a_hundred_versions_of_an_adapter_leave_three_behind():
    """In the store: those kept and the newest; at a reader: one, in the same memory."""
    rng = np.random.default_rng(95)
    adapter = {f"{n}.lora_{side}": np.zeros((8, 32), np.float16) for n in range(4) for side in "AB"}
    store, live = MemoryStore(), zeros_like(adapter)
    source, follower = publisher(store, anchor_every=1, keep=2), reader(store, live)
    places = {name: array.ctypes.data for name, array in live.items()}
    first_objects = 0
    for version in range(100):
        for array in adapter.values():
            array[:] = rng.standard_normal(array.shape)
        assert source.publish(adapter).version == version
        assert follower.pull().version == version
        num_objects = len(list(store.list(KEYS.objects_prefix)))
        first_objects = first_objects or num_objects
        assert num_objects <= 3 * first_objects
    assert_same(live, adapter)
    assert {name: array.ctypes.data for name, array in live.items()} == places
