"""Rows of group C, version chain, restart, failover: one test per public report.

Elsewhere too, with processes that are killed, stopped or fail at each system call:
R25 R29 test_crash_points, test_stopped; R30 test_fencing; R31 R33 R35 test_subscribe, test_chain;
R34 test_fencing. Random orders of all of these: test_stateful.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sync.harness import (
    RUN,
    FaultyStore,
    ManualClock,
    addresses,
    assert_same,
    copy_of,
    history,
    publisher,
    reader,
    zeros_like,
)

from gymfast.cli import main
from gymfast.errors import ChainError, ConflictError, NotFoundError, StoreError
from gymfast.stores import FileStore, MemoryStore
from gymfast.sync import CheckpointTarget, LiveTarget, State, Subscriber
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import Log

KEYS = RunKeys(RUN)


class FailingTarget(LiveTarget):
    """Live tensors whose `fails` next writes fail, before or after the first byte."""

    def __init__(self, weights, *, after_write: bool = False):
        super().__init__(weights, threads=1)
        self.fails = 0
        self.after_write = after_write

    def write(self, frames, *, is_known):
        if self.fails:
            self.fails -= 1
            if self.after_write:
                next(iter(self.state.tensors.values())).data[:3] ^= 1
            raise OSError("disk error")
        return super().write(frames, is_known=is_known)


def test_r25_a_failed_apply_is_noticed_and_the_next_version_is_exact():
    """Receiver fails v3. v3 is not served; v4 restores exact bytes without a resend of all."""
    store, states = MemoryStore(), history(4)
    source = publisher(store)
    live = zeros_like(states[0])
    target = FailingTarget(live)
    follower = Subscriber(store, RUN, target)
    for version in range(3):
        source.publish(states[version])
        follower.pull()
    source.publish(states[3])
    target.fails = 1
    with pytest.raises(OSError, match="disk error"):
        follower.pull()
    assert follower.version == 2
    assert_same(live, states[2])
    source.publish(states[4])
    report = follower.pull()
    assert (report.kind, report.num_deltas, report.version) == ("deltas", 2, 4)
    assert_same(live, states[4])


def test_r26_the_version_moves_only_with_the_bytes():
    """(a) apply raises, (b) nothing changed, (c) the upload returns nothing."""
    store = FaultyStore(MemoryStore())
    states = history(2)
    source = publisher(store, clock=ManualClock(), timeout_s=1.0)
    live = zeros_like(states[0])
    target = FailingTarget(live)
    follower = Subscriber(store, RUN, target)
    source.publish(states[0])
    follower.pull()

    source.publish(states[1])
    target.fails = 1
    with pytest.raises(OSError, match="disk error"):
        follower.pull()
    assert follower.version == 0
    follower.pull()

    source.publish(states[1])
    follower.pull()
    assert (source.version, follower.version) == (2, 2)

    store.arm(lambda n, op, key: "before" if op == "put" else "")
    with pytest.raises(StoreError):
        source.publish(states[2])
    store.arm(None)
    follower.pull()
    assert (source.version, follower.version) == (2, 2)
    assert_same(live, states[1])


@pytest.mark.parametrize("start", [0, 117, 121])
def test_r28_receivers_at_any_version_catch_up_with_a_trainer_that_resumed(start):
    """Trainer resumes at v120, receivers at v0, v117 and v121: exact or refused, never wrong."""
    store, states = MemoryStore(), history(125, num_tensors=2, size=20)
    source = publisher(store, anchor_every=10, keep=20)
    live = zeros_like(states[0])
    follower = reader(store, live)
    for version in range(122):
        source.publish(states[version])
        if version == start:
            follower.pull()
    resumed = publisher(store, anchor_every=10, keep=20)
    assert not resumed.adopt(states[120])
    assert resumed.publish(states[123]).version == 122
    report = follower.pull()
    assert report.kind == ("anchor" if start == 0 else report.kind)
    assert follower.version == 122
    assert_same(live, states[123])


def test_r29_the_baseline_moves_with_the_commit_only():
    """Crash between payload and manifest: the next delta is against the last COMMITTED version."""
    store = FaultyStore(MemoryStore())
    states = history(3)
    source = publisher(store)
    source.publish(states[0])

    def crash(n, operation, key):
        if operation == "create" and key.startswith(KEYS.log_prefix):
            raise KeyboardInterrupt
        return ""

    store.arm(crash)
    with pytest.raises(KeyboardInterrupt):
        source.publish(states[1])
    store.arm(None)
    assert source.publish(states[2]).version == 1
    record = Log(store, KEYS).load(lambda _: False)[-1].record
    assert record.kind == "delta"
    live = copy_of(states[0])
    follower = reader(store, live)
    follower.poll()
    assert follower.version == 0
    follower.pull()
    assert_same(live, states[2])


def test_r30_versions_stay_monotonic_over_a_failover():
    """The publisher is killed and replaced; the old one wakes up later and is fenced."""
    store, states = MemoryStore(), history(60, num_tensors=1, size=20)
    old = publisher(store)
    for weights in states[:58]:
        old.publish(weights)
    new = publisher(store)
    assert new.version == 57
    assert new.publish(states[58]).version == 58
    with pytest.raises(ConflictError, match="took over"):
        old.publish(states[59])
    live = zeros_like(states[0])
    follower = reader(store, live)
    assert follower.pull().version == 58
    assert_same(live, states[58])


def test_r31_a_restarted_engine_is_not_ready_before_it_has_the_weights():
    """It restarts at the base while the run is at v9: not ready, catching up, then ready."""
    store, states = MemoryStore(), history(9)
    source = publisher(store)
    for weights in states:
        source.publish(weights)
    live = copy_of(states[0])
    follower = reader(store, live)
    assert not follower.serves()
    assert not follower.ready(9)
    assert "catching up" in follower.status.text
    follower.poll()
    assert follower.serves(0)
    assert not follower.serves(9)
    assert "9 behind the newest" in follower.status.text
    follower.fetch()
    assert follower.ready(9)
    assert not follower.serves(9)
    follower.apply()
    assert follower.serves(9)
    assert "serves version 9, the newest" in follower.status.text


@pytest.mark.parametrize("target_kind", ["live", "checkpoint"])
def test_r33_a_base_that_differs_by_a_byte_is_refused_as_a_base(target_kind, tmp_path):
    """Identity by content: the byte is found before v1; an anchor is the only way in."""
    store, states = MemoryStore(), history(1)
    source = publisher(store)
    for weights in states:
        source.publish(weights)
    live = copy_of(states[0])
    live["layers.0.weight"].view(np.uint8).reshape(-1)[17] ^= 1
    if target_kind == "live":
        target: object = LiveTarget(live)
    else:
        save_file(live, tmp_path / "c.safetensors")
        target = CheckpointTarget(tmp_path / "c.safetensors")
    follower = Subscriber(store, RUN, target)
    follower.poll()
    assert follower.version is None
    staged = follower.fetch()
    assert staged.plan.starts_with_anchor
    follower.apply()
    found = live if target_kind == "live" else load_file(tmp_path / "c.safetensors")
    assert_same(found, states[1])
    follower.close()


def test_r33_a_checkpoint_that_was_changed_behind_our_back_is_not_served(tmp_path):
    store, states = MemoryStore(), history(1)
    source = publisher(store)
    source.publish(states[0])
    path = tmp_path / "c.safetensors"
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        follower.pull()
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)
    source.publish(states[1])
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        assert follower.state is State.INCONSISTENT
        assert follower.version is None
        assert follower.pull().kind == "anchor"
    assert_same(load_file(path), states[1])


def test_r34_a_second_run_on_the_same_store_is_disjoint(tmp_path):
    """Run B starts in the store of run A while A publishes."""
    store, states = FileStore(tmp_path), history(4)
    a = publisher(store, "a", anchor_every=1, keep=1)
    for weights in states[:2]:
        a.publish(weights)
    before = {k: store.get(k, max_bytes=1 << 20) for k in store.list("a/")}
    b = publisher(store, "b", anchor_every=1, keep=1)
    for weights in states[2:]:
        b.publish(weights)
    assert {k: store.get(k, max_bytes=1 << 20) for k in store.list("a/")} == before
    assert a.publish(states[2]).version == 2
    for run, expected in (("a", states[2]), ("b", states[4])):
        live = zeros_like(states[0])
        reader(store, live, run=run).pull()
        assert_same(live, expected)
    with pytest.raises(ConflictError, match="choose another run"):
        publisher(store, "a", resume=False)


def test_r35_a_target_that_is_not_the_next_version_is_installed_once():
    """v0 to v2 installs once; v5 with v3 missing is a clear error while v2 is served; v2 again."""
    store, clock = MemoryStore(), ManualClock()
    states = history(5)
    source = publisher(store, clock=clock)
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock)
    source.publish(states[0])
    follower.pull()
    source.publish(states[1])
    source.publish(states[2])
    report = follower.pull(2)
    assert (report.from_version, report.version, report.num_deltas) == (0, 2, 2)
    for weights in states[3:]:
        source.publish(weights)
    third = next(e.record for e in Log(store, KEYS).load() if e.tip.version == 3)
    for ref in third.frame.objects:
        store.delete(KEYS.object(third.epoch, ref.digest))
    with pytest.raises(ChainError, match="version 5 cannot be reached"):
        follower.pull(5)
    assert (follower.version, follower.state) == (2, State.CLEAN)
    assert_same(live, states[2])
    assert follower.pull(2).kind == "nothing"
    source.publish(states[5], anchor=True)
    follower.pull()
    assert_same(live, states[5])


def test_r36_the_six_requirements_of_delta_sync():
    store, states = MemoryStore(), history(3)
    source = publisher(store)
    reports = [source.publish(weights) for weights in states]
    live = copy_of(states[0])
    before = addresses(live)
    follower = reader(store, live)
    follower.poll()

    staged = follower.fetch()  # 1. staging before any pause
    assert_same(live, states[0])
    assert follower.ready(3)
    installed = follower.apply()  # 2. recovery by replay
    assert (installed.kind, installed.num_deltas) == ("deltas", 3)
    assert staged.version == 3

    other = reader(store, zeros_like(live))  # 3. recovery by anchor
    assert other.pull().kind == "anchor"

    with pytest.raises(ChainError, match="rollback"):  # 4. refusal of an unsafe target
        follower.pull(1)
    strange = copy_of(states[2])  # 5. refusal of an unsafe base: the delta needs v2 exactly
    strange["layers.1.weight"].view(np.uint8).reshape(-1)[0] ^= 1
    unsafe = reader(store, strange)
    unsafe.poll()
    assert unsafe.version is None

    for seconds in (reports[-1].seconds, installed.seconds):  # 6. split timings
        parts = dataclasses.asdict(seconds)
        assert len(parts) >= 4
        assert sum(parts.values()) > 0
    assert addresses(live) == before


def test_r36_the_command_line_meets_the_requirements_too(tmp_path, capfd, monkeypatch):
    """The same points against `gymfast sync`, with the numbers that it reports for each."""
    monkeypatch.chdir(tmp_path)
    states = history(3)
    for version, weights in enumerate(states):
        save_file(weights, f"v{version}.safetensors")
    save_file(zeros_like(states[0]), "other.safetensors")

    def run(*words: str, code: int = 0) -> dict:
        capfd.readouterr()
        assert main(["sync", *words, "--run", "demo", "--json"]) == code, capfd.readouterr()
        lines = capfd.readouterr().out.splitlines()
        return json.loads(lines[-1]) if code == 0 else {}

    published = run("publish", "store", "v0.safetensors", "v1.safetensors")
    assert (published["version"], published["kind"]) == (1, "delta")
    assert run("pull", "store", "r.safetensors")["kind"] == "anchor"  # recovery by anchor
    run("publish", "store", "v3.safetensors", "--base", "other.safetensors", code=3)  # unsafe base
    run("publish", "store", "v2.safetensors", "v3.safetensors", "--base", "v1.safetensors")
    pulled = run("pull", "store", "r.safetensors")  # recovery by replay, as one install
    assert (pulled["kind"], pulled["num_deltas"], pulled["version"]) == ("deltas", 2, 3)
    assert_same(load_file("r.safetensors"), states[3])
    run("pull", "store", "r.safetensors", "--version", "1", code=3)  # unsafe target
    assert_same(load_file("r.safetensors"), states[3])
    assert set(pulled["seconds"]) == {"fetch", "verify", "apply", "check"}  # staging, then the rest
    assert {"diff", "encode", "put", "commit"} <= set(published["seconds"])
    run("verify", "store", "r.safetensors")


def test_i32_rollback_by_replaying_an_old_stream_is_refused():
    """The whole store goes back to an older copy of itself, then grows another way."""
    store, states = MemoryStore(), history(6)
    source = publisher(store)
    for weights in states[:3]:
        source.publish(weights)
    old = {key: store.get(key, max_bytes=1 << 20) for key in store.list("")}
    for weights in states[3:5]:
        source.publish(weights)
    live = zeros_like(states[0])
    follower = reader(store, live)
    follower.pull()
    for key in list(store.list("")):
        store.delete(key)
    for key, blob in old.items():
        store.put(key, blob)
    assert follower.poll() == 4, "nothing new: the version held stays"
    with pytest.raises(ChainError, match="rollback"):
        follower.pull(2)
    other = publisher(store)
    for weights in (states[5], states[6], states[5], states[6]):
        other.publish(weights)
    with pytest.raises(ChainError, match="replaced or rolled back"):
        follower.pull()
    assert_same(live, states[4])
    assert follower.version == 4


def test_i32_mix_and_match_an_object_replaced_by_its_older_version_is_refused():
    store, clock, states = MemoryStore(), ManualClock(), history(3)
    source = publisher(store, clock=clock)
    for weights in states:
        source.publish(weights)
    refs = [
        (e.record.epoch, e.record.frame.objects[0].digest)
        for e in Log(store, KEYS).load()
        if e.tip.version is not None
    ]
    store.put(KEYS.object(*refs[3]), store.get(KEYS.object(*refs[2]), max_bytes=1 << 20))
    live = copy_of(states[1])
    follower = reader(store, live, clock=clock)
    with pytest.raises(ChainError, match="version 3 cannot be reached"):
        follower.pull(3)
    report = follower.pull()
    assert report.version == 2, "the newest version that is whole"
    assert_same(live, states[2])


def test_i32_a_record_of_the_log_replaced_by_an_older_one_is_damage_and_no_rollback():
    store, states = MemoryStore(), history(4)
    source = publisher(store)
    live = zeros_like(states[0])
    source.publish(states[0])
    follower = reader(store, live)
    follower.pull()
    for weights in states[1:]:
        source.publish(weights)
    store.put(KEYS.record(5), store.get(KEYS.record(3), max_bytes=1 << 20))
    with pytest.raises(NotFoundError, match="record 3 lies where record 5 belongs"):
        follower.pull(3)
    assert follower.pull().version == 2
    assert_same(live, states[2])
    assert follower.pull().kind == "nothing"
    source.publish(states[0], anchor=True)
    assert follower.pull().version == 5
    assert_same(live, states[0])


def test_own_tensors_renamed_while_another_takes_the_old_name():
    store = MemoryStore()
    first = {"a": np.arange(6.0), "b": np.ones(3, np.int8)}
    second = {"b": first["a"], "c": first["b"]}
    source = publisher(store)
    live = zeros_like(first)
    follower = reader(store, live)
    for weights in (first, second):
        source.publish(weights)
        follower.pull()
        assert_same(live, weights)
    with pytest.raises(NotFoundError, match="not published"):
        follower.pull(7)
