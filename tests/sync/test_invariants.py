"""Invariants of reliability.md section 6 that concern publish and subscribe, by name.

The others of this folder: I03 I26 test_stateful and test_explorer, I04 I20 I21 I25
test_crash_points and test_publish_failures, I20 I50 test_stopped, I22 I23 I27 test_fencing, I24 I33
test_publish_pull, I60 test_publish_failures, I32 test_reports_chain, I05 test_reports_apply.
"""

from __future__ import annotations

import ast
import gc
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from sync.harness import (
    RUN,
    DelayedStore,
    FaultyStore,
    ManualClock,
    addresses,
    assert_same,
    copy_of,
    history,
    make_weights,
    publisher,
    reader,
    step,
    zeros_like,
)
from sync.test_reports_apply import live_target

import gymfast.sync
from gymfast.errors import DeadlineError, GymfastError, NotFoundError, StoreError
from gymfast.stores import FileStore, MemoryStore
from gymfast.sync import CheckpointTarget, GroupTarget, LiveTarget, State, Subscriber
from gymfast.sync.budget import SECTION_BYTES


@pytest.mark.parametrize("absent", [1, 2, 3, 10, 100, 300])
def test_i30_missed_versions_are_replayed_or_an_anchor_is_loaded_as_one_install(absent):
    store = MemoryStore()
    states = history(absent, num_tensors=2, size=20)
    source = publisher(store, anchor_every=40, keep=100)
    live = zeros_like(states[0])
    follower = reader(store, live)
    source.publish(states[0])
    follower.pull()
    installs = [0]
    target = follower._installer._target
    write = target.write

    def counted(frames, *, is_known):
        installs[0] += 1
        return write(frames, is_known=is_known)

    target.write = counted
    for weights in states[1:]:
        source.publish(weights)
    report = follower.pull()
    assert installs == [1]
    assert (report.from_version, report.version) == (0, absent)
    assert_same(live, states[absent])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("anchor_every", [7, 40, 256])
def test_i30_every_number_of_missed_versions_from_1_to_300_is_one_exact_install(anchor_every):
    """Reader k follows up to version 300 - k and is then away; all come back at the end."""
    store, states = MemoryStore(), history(300, num_tensors=2, size=20)
    source = publisher(store, anchor_every=anchor_every, keep=400)
    followers = []
    for version, weights in enumerate(states[:-1]):
        source.publish(weights)
        live = zeros_like(weights)
        follower = reader(store, live, reader_id=f"r{version}")
        assert follower.pull().version == version
        followers.append((version, live, follower))
    source.publish(states[300])
    for version, live, follower in followers:
        installs, write = [], follower._installer._target.write

        def counted(frames, *, is_known, installs=installs, write=write):
            installs.append(len(frames))
            return write(frames, is_known=is_known)

        follower._installer._target.write = counted
        report = follower.pull()
        assert (report.from_version, report.version, len(installs)) == (version, 300, 1)
        assert_same(live, states[300])


@pytest.mark.parametrize("position", [0, 1, 100, 599, -1])
def test_i31_a_base_with_one_flipped_byte_is_refused_before_any_write(position, tmp_path):
    """Also where the flip comes after the reader has looked: the apply looks again."""
    store, states = MemoryStore(), history(1)
    source = publisher(store)
    source.publish(states[0])
    path = tmp_path / "c.safetensors"
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        follower.pull()
        source.publish(states[1])
        blob = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(blob[:8], "little")
        blob[position if position < 0 else header + position] ^= 0x40
        path.write_bytes(blob)
        with pytest.raises(GymfastError, match="digest"):
            follower.pull()
        assert follower.version is None
        assert path.read_bytes() == blob, "nothing was written"


@pytest.mark.parametrize(
    "seed",
    [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 300))],
)
def test_i34_partial_late_and_reordered_visibility_only_delays(seed):
    """Every key becomes visible on its own after up to 5 s; replaced objects are stale."""
    rng = np.random.default_rng(seed)
    clock = ManualClock()

    def delay(key: str) -> float:  # the probe at the start needs to read its own writes
        return 0.0 if "/probe/" in key else float(rng.uniform(0, 5))

    store = DelayedStore(MemoryStore(), clock, delay)
    states = history(12, num_tensors=2, size=40)
    source = publisher(store, clock=clock, anchor_every=4, keep=6, timeout_s=60.0)
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock, timeout_s=30.0)
    seen = -1
    for weights in states:
        source.publish(weights)
        for _ in range(3):
            clock.now_s += float(rng.uniform(0, 2))
            with suppress(NotFoundError, DeadlineError):
                follower.pull()
            if follower.version is not None:
                assert follower.version >= seen
                seen = follower.version
                assert_same(live, states[seen])
    clock.now_s += 40.0
    follower.poll()
    clock.now_s += 40.0
    follower.pull()
    assert_same(live, states[-1])


@pytest.mark.parametrize(("rank", "tensor"), list(itertools.product(range(3), range(1, 5))))
def test_i40_each_rank_failing_at_each_tensor_is_flagged_or_leaves_the_old_version(rank, tensor):
    store, states = MemoryStore(), history(2)
    source = publisher(store)
    lives = [zeros_like(states[0]) for _ in range(3)]
    pairs = [live_target(live) for live in lives]
    follower = Subscriber(store, RUN, GroupTarget([target for target, _ in pairs]))
    source.publish(states[0])
    follower.pull()
    source.publish(states[1])
    pairs[rank][1].arm(tensor)
    with pytest.raises(OSError, match="device lost"):
        follower.pull()
    if follower.version is None:
        assert follower.state is State.INCONSISTENT
    else:
        assert follower.version == 0
        for live in lives:
            assert_same(live, states[0])
    pairs[rank][1].arm(0)
    source.publish(states[2], anchor=True)
    follower.pull()
    for live in lives:
        assert_same(live, states[2])


@pytest.mark.parametrize("fault", ["gather", "digest", "one rank"])
def test_i41_the_served_version_moves_only_after_every_rank_was_verified(fault, monkeypatch):
    store, states = MemoryStore(), history(2)
    source = publisher(store)
    lives = [zeros_like(states[0]) for _ in range(3)]
    targets = [LiveTarget(live, threads=1) for live in lives]
    group = GroupTarget(targets)
    follower = Subscriber(store, RUN, group)
    source.publish(states[0])
    follower.pull()
    source.publish(states[1])
    seen: list[int | None] = []

    def watched(target, verify):
        def root():
            seen.append(follower.version)
            return verify()

        return root

    for target in targets:
        monkeypatch.setattr(target, "root", watched(target, target.root))

    def broken():
        raise StoreError("no answer from rank 1")

    if fault == "gather":
        monkeypatch.setattr(group, "root", broken)
    elif fault == "digest":
        write = targets[1].write

        def write_and_flip(frames, *, is_known):
            installed = write(frames, is_known=is_known)
            lives[1]["layers.1.weight"].view(np.uint8).reshape(-1)[9] ^= 1
            return installed

        monkeypatch.setattr(targets[1], "write", write_and_flip)
    else:
        monkeypatch.setattr(targets[2], "root", broken)
    with pytest.raises(GymfastError):
        follower.pull()
    assert follower.version is None
    assert set(seen) <= {None}, "nothing was served while it was verified"
    monkeypatch.undo()
    source.publish(states[2], anchor=True)
    follower.pull()
    assert follower.version == 2
    for live in lives:
        assert_same(live, states[2])


def test_i42_untouched_tensors_keep_pointer_and_bytes_over_five_syncs():
    store, weights = MemoryStore(), make_weights(num_tensors=6)
    source = publisher(store)
    live = zeros_like(weights)
    follower = reader(store, live)
    source.publish(weights)
    follower.pull()
    pointers, bits = addresses(live), {n: v.tobytes() for n, v in live.items()}
    for number in range(5):
        name = f"layers.{number}.weight"
        weights = {**weights, name: step({name: weights[name]}, number)[name]}
        source.publish(weights)
        follower.pull()
        assert addresses(live) == pointers
        changed = {n for n in live if live[n].tobytes() != bits[n]}
        assert changed == {f"layers.{i}.weight" for i in range(number + 1)}
    assert live["layers.5.weight"].tobytes() == bits["layers.5.weight"]


# Deadlines


def test_i50_sync_sleeps_only_by_its_clock():
    """So that every pause is part of a deadline, or of a budget; other waits: test_stopped."""
    folder = Path(gymfast.sync.__file__).parent
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "sleep":
                if ast.unparse(node.value) == "self._clock":
                    continue
                assert file.name in ("clock.py", "drive.py"), f"{file.name} sleeps on its own"


@pytest.mark.parametrize("operation", ["put", "create", "get", "get_range", "size", "list"])
@pytest.mark.parametrize("party", ["publisher", "subscriber"])
def test_i50_a_store_that_fails_for_ever_is_given_up_at_the_deadline(party, operation):
    store, clock, states = FaultyStore(MemoryStore()), ManualClock(), history(1)
    source = publisher(store, clock=clock, timeout_s=10.0)
    source.publish(states[0])
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock, timeout_s=10.0)
    clock.slept_s = 0.0
    store.arm(lambda n, op, key: "before" if op == operation else "")
    error = ""
    try:
        if party == "publisher":
            source.publish(states[1])
        else:
            follower.pull()
    except GymfastError as caught:
        error = str(caught)
    assert "injected" in error or not error
    assert clock.slept_s <= 11.0


_STOPPED = """
import sys
sys.path.insert(0, sys.argv[2])
from sync.harness import publisher, make_weights
from gymfast.stores import FileStore
source = publisher(FileStore(sys.argv[1]))
source.publish(make_weights())
print("ready", flush=True)
sys.stdin.readline()
"""


def test_i50_a_reader_of_a_stopped_publisher_returns_by_its_deadline(tmp_path):
    command = [sys.executable, "-c", _STOPPED, str(tmp_path), str(Path(__file__).parents[1])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        live = zeros_like(make_weights())
        follower = reader(FileStore(tmp_path), live)
        follower.pull()
        start_s = time.monotonic()
        with pytest.raises(DeadlineError, match="version 1"):
            follower.wait(1, timeout_s=0.5)
        assert time.monotonic() - start_s < 0.5 * 1.1 + 1.0
        assert follower.version == 0
    finally:
        process.kill()
        process.communicate()


# Memory and leaks


_PEAK = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from gymfast.stores import FileStore
from sync.harness import publisher
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
rng = np.random.default_rng(0)
size = 48 << 20
weights = {f"w{i}": rng.integers(0, 1 << 16, size // 16, dtype=np.uint16) for i in range(8)}
source = publisher(FileStore(sys.argv[2]), object_bytes=4 << 20, anchor_ratio=0.5)
source.publish({"w0": weights["w0"][:1000]})
before = peak()
source.publish(weights)
for value in weights.values():
    value[:: 50] ^= 1
source.publish(weights, anchor=False)
print(peak() - before, source.version)
"""


def test_i60_peak_memory_is_within_the_plan(tmp_path):
    """Snapshot, one object and the sections under way; measured in a process of its own."""
    command = [sys.executable, "-c", _PEAK, str(Path(__file__).parents[1]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    grown, version = map(int, done.stdout.split())
    assert version == 2
    undo = 6 * (48 << 20) // 2 // 50
    plan = (48 << 20) + (4 << 20) + SECTION_BYTES + undo
    assert grown <= 1.1 * plan, f"grew by {grown} bytes, planned {plan}"


def usage() -> tuple[int, int, int]:
    """Resident bytes, descriptors, threads."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return pages * resource.getpagesize(), descriptors, threading.active_count()


def sync_many(folder: Path, num_syncs: int) -> tuple[list[int], list[int], list[int]]:
    store = FileStore(folder / "store")
    source = publisher(store, anchor_every=5, keep=3)
    weights = make_weights(num_tensors=3, size=100)
    live = zeros_like(weights)
    followers = [reader(store, live), Subscriber(store, RUN, CheckpointTarget(folder / "c"))]
    found: tuple[list[int], list[int], list[int]] = ([], [], [])
    for number in range(num_syncs):
        weights = step(weights, number)
        source.publish(weights)
        for follower in followers:
            follower.pull()
        for values, value in zip(found, usage(), strict=True):
            values.append(value)
    assert_same(live, weights)
    assert_same(load_file(folder / "c" / "model.safetensors"), weights)
    for follower in followers:
        follower.close()
    return found


_MANY = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from sync.test_invariants import sync_many
print(json.dumps(sync_many(Path(sys.argv[2]), int(sys.argv[3]))))
"""


@pytest.mark.parametrize(
    "num_syncs", [60, pytest.param(300, marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)
def test_i61_nothing_leaks_over_many_syncs(tmp_path, num_syncs):
    """In a process of its own: pytest keeps every log line."""
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", _MANY, tests, str(tmp_path), str(num_syncs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=True)
    resident, descriptors, threads = json.loads(done.stdout)
    assert descriptors[-1] <= descriptors[20]
    assert threads[-1] <= threads[20]
    slope = np.polyfit(np.arange(20, num_syncs), resident[20:], 1)[0]
    assert slope < 10_000, f"{slope:.0f} bytes per sync"
    num_files = sum(path.is_file() for path in tmp_path.rglob("*"))
    assert num_files < 60, "retention bounds the store"


def test_copies_made_for_tests_are_copies():
    weights = make_weights()
    assert addresses(copy_of(weights)) != addresses(weights)
