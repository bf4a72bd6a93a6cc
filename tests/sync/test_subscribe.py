"""Subscribers, live and on checkpoints: staged, bounded, told apart from something else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sync.harness import (
    RUN,
    ManualClock,
    addresses,
    assert_same,
    copy_of,
    history,
    make_weights,
    publisher,
    reader,
    zeros_like,
)

from gymfast.errors import (
    BudgetError,
    ChainError,
    ConflictError,
    DeadlineError,
    FormatError,
    NotFoundError,
)
from gymfast.stores import MemoryStore
from gymfast.sync import CheckpointTarget, GroupTarget, LiveTarget, Publisher, Subscriber, Target
from gymfast.sync import State as TargetState
from gymfast.sync.keys import RunKeys

KEYS = RunKeys(RUN)


def test_fetch_stages_and_apply_installs(store):
    source, states = publisher(store), history(2)
    source.publish(states[0])
    live = zeros_like(states[0])
    follower = reader(store, live)
    assert (follower.poll(), follower.version, follower.state) == (0, None, TargetState.EMPTY)
    assert not follower.ready(0)
    follower.fetch()
    assert follower.ready(0)
    assert not follower.ready(1)
    assert not follower.serves(0)
    assert_same(live, zeros_like(live))
    follower.apply()
    assert follower.serves(0)
    assert follower.ready(0)
    with pytest.raises(ChainError, match=r"call fetch\(\)"):
        follower.apply()


def test_nothing_to_do_is_reported_as_such(store):
    source, states = publisher(store, anchor_every=1), history(1)
    for weights in states:
        source.publish(weights)
    follower = reader(store, zeros_like(states[0]))
    follower.pull()
    publisher(store)
    report = follower.pull()
    assert (report.kind, report.version, report.num_bytes) == ("nothing", 1, 0)
    assert list(store.list(KEYS.readers_prefix)) == []


def test_a_run_without_versions_is_not_found(store):
    live = make_weights()
    follower = reader(store, live)
    assert follower.poll() is None
    with pytest.raises(NotFoundError, match="no version"):
        follower.pull()
    publisher(store)
    assert follower.poll() is None
    with pytest.raises(NotFoundError, match="no version"):
        follower.pull()
    assert NotFoundError.exit_code == 5


@pytest.mark.parametrize("anchor_every", [2, 50])
def test_a_target_that_holds_a_published_state_needs_no_anchor(store, anchor_every):
    """Also where newer anchors lie between: the deltas are cheaper."""
    source, states = publisher(store, anchor_every=anchor_every), history(4, size=4000)
    for weights in states:
        source.publish(weights)
    live = copy_of(states[2])
    follower = reader(store, live, request_bytes=0)
    follower.poll()
    assert follower.version == 2
    report = follower.pull()
    assert (report.kind, report.from_version, report.num_deltas) == ("deltas", 2, 2)
    assert_same(live, states[4])


def test_frames_can_be_staged_on_disk(store, tmp_path):
    source, states = publisher(store), history(2)
    for weights in states:
        source.publish(weights)
    live = zeros_like(states[0])
    folder = tmp_path / "staging"
    follower = reader(store, live, staging_dir=folder)
    staged = follower.fetch()
    assert len(staged.frames) == 3 or staged.frames[0].step.kind == "anchor"
    assert list(folder.iterdir()) == [], "staged files have no name: a crash leaves none"
    follower.apply()
    assert_same(live, states[2])


def test_staging_is_bounded(store, tmp_path):
    source, weights = publisher(store), make_weights()
    source.publish(weights)
    for options in ({}, {"staging_dir": tmp_path / "staging"}):
        follower = reader(store, zeros_like(weights), max_staging_bytes=100, **options)
        with pytest.raises(BudgetError, match="the limit is 100 bytes"):
            follower.pull()
        assert list(store.list(KEYS.readers_prefix)) == []


def test_a_subscriber_waits_with_a_deadline():
    store, clock = MemoryStore(), ManualClock()
    source, states = publisher(store, clock=clock), history(2)
    source.publish(states[0])
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock)
    with pytest.raises(DeadlineError, match="version 1"):
        follower.wait(1, timeout_s=10)
    assert 9 < clock.slept_s < 11
    clock.on_sleep = lambda: source.publish(states[1]) if source.version == 0 else None
    assert follower.wait(1, timeout_s=10).version == 1
    assert_same(live, states[1])


class FailsAtFirst:
    """Passes on to a target whose first write fails: before it, or with a crash of the process."""

    def __init__(self, inner: Target) -> None:
        self.inner = inner
        self.error: BaseException | None = OSError("no room")

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, frames, *, is_known):
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.inner.write(frames, is_known=is_known)


@pytest.mark.parametrize("num_members", [1, 2])
def test_a_first_install_that_fails_leaves_an_empty_live_target_empty(num_members):
    store, states = MemoryStore(), history(1)
    publisher(store).publish(states[0])
    lives = [{} for _ in range(num_members)]
    target = FailsAtFirst(GroupTarget([LiveTarget(live, threads=1) for live in lives]))
    follower = Subscriber(store, RUN, target)
    with pytest.raises(OSError, match="no room"):
        follower.pull()
    assert (follower.state, follower.version) == (TargetState.EMPTY, None)
    assert Subscriber(store, RUN, target).state is TargetState.EMPTY
    assert follower.pull().kind == "anchor"
    for live in lives:
        assert_same(live, states[0])


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("name", ["model.safetensors", "directory"])
def test_a_first_install_that_fails_leaves_no_checkpoint_and_an_empty_target(
    tmp_path, name, is_killed, monkeypatch
):
    store, states = MemoryStore(), history(1)
    publisher(store).publish(states[0])
    path = tmp_path / name
    target = FailsAtFirst(CheckpointTarget(path, threads=1))
    with Subscriber(store, RUN, target) as follower:
        if is_killed:
            monkeypatch.setattr(follower._installer, "_settle", lambda tips: None)
        with pytest.raises(OSError, match="no room"):
            follower.pull()
        if not is_killed:
            assert follower.state is TargetState.EMPTY
    assert not path.exists()
    with Subscriber(store, RUN, CheckpointTarget(path, threads=1)) as follower:
        assert follower.state is TargetState.EMPTY
        assert follower.pull().kind == "anchor"
        assert follower.version == 0
    assert path.exists()


def test_a_first_install_that_fails_leaves_other_weights_empty_and_as_they_were(tmp_path):
    """Also for the next process: weights that are no version are not inconsistent."""
    store, states = MemoryStore(), history(1)
    publisher(store).publish(states[0])
    path = tmp_path / "model.safetensors"
    other = zeros_like(states[0])
    save_file(other, path)
    for _ in range(2):
        target = FailsAtFirst(CheckpointTarget(path, threads=1))
        with Subscriber(store, RUN, target) as follower:
            assert follower.state is TargetState.EMPTY
            with pytest.raises(OSError, match="no room"):
                follower.pull()
            assert follower.state is TargetState.EMPTY
        assert_same(load_file(path), other)
    with Subscriber(store, RUN, CheckpointTarget(path, threads=1)) as follower:
        follower.pull()
    assert_same(load_file(path), states[0])


def test_a_target_that_held_a_version_and_is_gone_is_inconsistent(tmp_path):
    store, states = MemoryStore(), history(1)
    publisher(store).publish(states[0])
    path = tmp_path / "model.safetensors"
    with Subscriber(store, RUN, CheckpointTarget(path, threads=1)) as follower:
        follower.pull()
    path.unlink()
    with Subscriber(store, RUN, CheckpointTarget(path, threads=1)) as follower:
        assert follower.state is TargetState.INCONSISTENT
        assert follower.pull().version == 0
    assert_same(load_file(path), states[0])


def test_i32_a_log_that_stands_still_is_stale():
    store, clock = MemoryStore(), ManualClock()
    source, states = publisher(store, clock=clock), history(2)
    source.publish(states[0])
    follower = reader(store, zeros_like(states[0]), clock=clock, freshness_s=60.0)
    follower.pull()
    assert not follower.is_stale
    clock.now_s += 61
    follower.poll()
    assert follower.is_stale
    assert "stale" in follower.status.text
    source.publish(states[1])
    follower.poll()
    assert not follower.is_stale
    late = reader(store, zeros_like(states[0]), clock=clock, freshness_s=60.0)
    clock.now_s += 61
    late.poll()
    assert late.is_stale, "a reader that has just started sees the age of the record"


def test_an_old_log_stays_stale_after_an_install_and_after_a_restart():
    """The age of the newest record known counts, whether it is installed or not."""
    store, clock = MemoryStore(), ManualClock()
    source, states = publisher(store, clock=clock), history(2)
    source.publish(states[0])
    clock.now_s += 61
    live = zeros_like(states[0])
    target = LiveTarget(live, threads=1)
    follower = Subscriber(store, RUN, target, clock=clock, freshness_s=60.0)
    follower.pull()
    assert follower.is_stale
    assert follower.status.unchanged_s == pytest.approx(61)
    follower.poll()
    assert follower.is_stale
    again = Subscriber(store, RUN, target, clock=clock, freshness_s=60.0)
    assert again.version == 0
    again.poll()
    assert again.is_stale
    source.publish(states[1])
    again.pull()
    assert not again.is_stale
    assert_same(live, states[1])


def test_a_place_whose_record_is_gone_or_unreadable_has_no_age():
    store, clock = MemoryStore(), ManualClock()
    source, states = publisher(store, clock=clock), history(1)
    source.publish(states[0])
    target = LiveTarget(zeros_like(states[0]), threads=1)
    Subscriber(store, RUN, target, clock=clock).pull()
    clock.now_s += 61
    store.put(KEYS.record(2), b"garbage")
    follower = Subscriber(store, RUN, target, clock=clock, freshness_s=60.0)
    follower.poll()
    assert not follower.is_stale
    clock.now_s += 61
    assert follower.is_stale


def test_a_clock_that_runs_backwards_harms_nothing(store):
    clock = ManualClock()
    source, states = publisher(store, clock=clock), history(3)
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock, freshness_s=60.0)
    for weights in states:
        clock.wall_offset_s -= 10_000_000_000
        source.publish(weights)
        follower.pull()
        assert_same(live, weights)
        assert not follower.is_stale


@pytest.mark.parametrize("name", ["model.safetensors", "directory"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_checkpoint_follows_the_run_across_restarts(store, tmp_path, name, in_place):
    source, states = publisher(store, anchor_every=3), history(5)
    path = tmp_path / name
    file = path if path.suffix else path / "model.safetensors"
    for version, weights in enumerate(states):
        source.publish(weights)
        with Subscriber(store, RUN, CheckpointTarget(path, in_place=in_place)) as follower:
            assert follower.version == (version - 1 if version else None)
            follower.pull()
            assert follower.version == version
        assert_same(load_file(file), weights)
    assert {p.name for p in tmp_path.iterdir()} - {"store"} == {
        name,
        f".gymfast.position.{name}",
        f".gymfast.lock.{name}",
    }


def test_a_sharded_checkpoint_keeps_its_shards_and_side_files(tmp_path):
    store = MemoryStore()
    states = history(3)
    path = tmp_path / "model"
    path.mkdir()
    names = sorted(states[0])
    files = {
        "model-00001-of-00002.safetensors": names[:2],
        "model-00002-of-00002.safetensors": names[2:],
    }
    for file, members in files.items():
        save_file({n: states[0][n] for n in members}, path / file)
    index = {"metadata": {}, "weight_map": {n: f for f, members in files.items() for n in members}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text("{}")
    source = publisher(store)
    for weights in states[:3]:
        source.publish(weights)
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        report = follower.pull()
        assert (report.kind, report.from_version) == ("deltas", 0)
    found = {n: v for file in files for n, v in load_file(path / file).items()}
    assert_same(found, states[2])
    source.publish(states[3], anchor=True)
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        assert follower.pull().kind == "anchor"
    assert_same(load_file(path / "model.safetensors"), states[3])
    assert (path / "config.json").read_text() == "{}"


def test_two_subscribers_do_not_share_a_checkpoint(store, tmp_path):
    publisher(store).publish(make_weights())
    with (
        Subscriber(store, RUN, CheckpointTarget(tmp_path / "c")),
        pytest.raises(ConflictError, match="followed by another process"),
    ):
        CheckpointTarget(tmp_path / "c")
    CheckpointTarget(tmp_path / "c").close()


def test_a_checkpoint_of_something_else_is_not_overwritten(store, tmp_path):
    publisher(store).publish(make_weights())
    path = tmp_path / "model.safetensors"
    save_file({"layers.0.weigth": np.zeros(3)}, path)
    before = path.read_bytes()
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        with pytest.raises(FormatError, match=r"layers.0.weight.*nearest.*layers.0.weigth"):
            follower.pull()
        assert follower.state is TargetState.EMPTY
    assert path.read_bytes() == before
    with Subscriber(store, RUN, CheckpointTarget(path, allow_new_names=True)) as follower:
        follower.pull()
    assert_same(load_file(path), make_weights())


def test_live_tensors_of_something_else_are_not_overwritten(store):
    publisher(store).publish(make_weights())
    live = {"layers.0.weigth": np.zeros(3)}
    follower = reader(store, live)
    with pytest.raises(FormatError, match=r"layers\.0\.weight"):
        follower.pull()
    assert follower.state is TargetState.EMPTY
    assert_same(live, {"layers.0.weigth": np.zeros(3)})


def test_addresses_survive_deltas_and_anchors(store):
    source, states = publisher(store), history(4)
    live = zeros_like(states[0])
    before = addresses(live)
    follower = reader(store, live)
    for version, weights in enumerate(states):
        source.publish(weights, anchor=version == 3)
        follower.pull()
        assert_same(live, weights)
        assert addresses(live) == before


def test_torch_tensors_are_updated_in_place():
    torch = pytest.importorskip("torch")
    store = MemoryStore()
    generator = torch.Generator().manual_seed(1)
    weights = {
        "a": torch.randn(64, 32, generator=generator).to(torch.bfloat16),
        "b": torch.randn(100, generator=generator),
    }
    live = {name: torch.zeros_like(value) for name, value in weights.items()}
    pointers = {name: value.data_ptr() for name, value in live.items()}
    source = publisher(store)
    follower = Subscriber(store, RUN, LiveTarget(live))
    for _ in range(3):
        source.publish(weights)
        follower.pull()
        assert {n: v.data_ptr() for n, v in live.items()} == pointers
        assert all(
            torch.equal(live[n].view(torch.uint8), weights[n].view(torch.uint8)) for n in live
        )
        weights = {n: v * 1.01 for n, v in weights.items()}


def test_a_store_may_be_named_by_its_address(tmp_path: Path):
    url = f"file:{tmp_path / 'store'}"
    weights = make_weights()
    Publisher(url, RUN).publish(weights)
    live = zeros_like(weights)
    Subscriber(url, RUN, LiveTarget(live)).pull()
    assert_same(live, weights)
