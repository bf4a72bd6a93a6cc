"""Stateful: publishers and readers in any order of events, compared with a model dict (I03, I26).

Events: publish, publish nothing, restart or replace the publisher, ask for an anchor, lose replies,
retention, compactors that fold, restart or are killed, readers that follow, lag, restart, join
late or crash while they write, clock jumps.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.numpy import load_file
from sync.harness import (
    RUN,
    FaultyStore,
    ManualClock,
    Weights,
    addresses,
    assert_same,
    copy_of,
    make_weights,
    publisher,
    step,
    zeros_like,
)

from gymfast.errors import ConflictError, DeadlineError, GymfastError, StoreError
from gymfast.stores import MemoryStore
from gymfast.sync import CheckpointTarget, Compactor, LiveTarget, Publisher, State, Subscriber
from gymfast.sync.fsck import fsck

NUM_READERS = 3


class _BreakingTarget(LiveTarget):
    """Live tensors whose writer dies half way when told to."""

    breaks = False

    def write(self, frames, *, is_known):
        if self.breaks:
            self.breaks = False
            first = next(iter(self.state.tensors.values()))
            first.data[:5] ^= 1
            self.state.is_consistent = False
            raise OSError("killed half way")
        return super().write(frames, is_known=is_known)


class SyncMachine(RuleBasedStateMachine):
    """`model` has the weights of every committed version."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="gymfast-stateful-"))
        self.clock = ManualClock()
        self.store = FaultyStore(MemoryStore())
        self.model: dict[int, Weights] = {}
        self.weights = make_weights(num_tensors=3, size=60)
        self.seed = 0
        self.readers: list[Subscriber | None] = [None] * NUM_READERS
        self.live: list[Weights] = [{} for _ in range(NUM_READERS)]
        self.pointers: list[dict[str, int]] = [{} for _ in range(NUM_READERS)]
        self.fenced: list[Publisher] = []

    @initialize(anchor_every=st.sampled_from([2, 5, 256]), keep=st.sampled_from([1, 3, 50]))
    def start(self, anchor_every: int, keep: int) -> None:
        self.options = {
            "anchor_every": anchor_every,
            "keep": keep,
            "clock": self.clock,
            "timeout_s": 2.0,
            "object_bytes": 200,
        }
        self.source = publisher(self.store, **self.options)
        self.publish(density=0.01)

    def teardown(self) -> None:
        for follower in self.readers:
            if follower is not None:
                follower.close()
        shutil.rmtree(self.folder)

    def change(self, density: float) -> None:
        self.seed += 1
        self.weights = step(self.weights, self.seed, density)

    def commit(self) -> None:
        report = self.source.publish(self.weights)
        self.model[report.version] = copy_of(self.weights)

    @rule(density=st.sampled_from([0.001, 0.02, 0.5, 1.0]))
    def publish(self, density: float) -> None:
        self.change(density)
        self.commit()

    @rule()
    def publish_nothing_new(self) -> None:
        self.commit()

    @rule()
    def publish_an_anchor(self) -> None:
        self.change(0.02)
        report = self.source.publish(self.weights, anchor=True)
        assert report.kind == "anchor"
        self.model[report.version] = copy_of(self.weights)

    @rule()
    def change_the_schema(self) -> None:
        self.seed += 1
        extra = np.full(self.seed % 7 + 1, self.seed, np.int16)
        self.weights = {**self.weights, "extra": extra}
        self.commit()

    @precondition(lambda self: "extra" in self.weights)
    @rule()
    def remove_a_tensor(self) -> None:
        self.weights = {n: v for n, v in self.weights.items() if n != "extra"}
        self.commit()

    @rule(number=st.integers(1, 30), how=st.sampled_from(["before", "after"]), lasts=st.booleans())
    def publish_with_a_fault(self, number: int, how: str, lasts: bool) -> None:
        """Afterwards the same weights are published again, as a trainer would."""
        self.change(0.02)
        self.store.arm(lambda n, op, key: how if n == number or (lasts and n > number) else "")
        before = self.source.version
        try:
            self.commit()
        except (StoreError, DeadlineError):
            self.store.arm(None)
            self.commit()
        self.store.arm(None)
        assert self.source.version in (before + 1, before + 2)
        self.model.setdefault(before + 1, copy_of(self.weights))

    @rule(adopts=st.booleans())
    def replace_the_publisher(self, adopts: bool) -> None:
        self.fenced = [*self.fenced[-1:], self.source]
        self.source = publisher(self.store, **self.options)
        assert self.source.version == max(self.model)
        if adopts:
            assert self.source.adopt(self.model[self.source.version])

    @precondition(lambda self: self.fenced)
    @rule()
    def an_old_publisher_wakes_up(self) -> None:
        with pytest.raises(ConflictError, match="fenced"):
            self.fenced[-1].publish(self.weights)

    @rule(seconds=st.sampled_from([1.0, 700.0, -5_000.0, 100_000.0]))
    def the_wall_clock_jumps(self, seconds: float) -> None:
        self.clock.wall_offset_s += seconds

    def follower(self, i: int) -> Subscriber:
        """Reader 2 has a checkpoint, the others live tensors."""
        found = self.readers[i]
        if found is None:
            if i == 2:
                target: object = CheckpointTarget(self.folder / "c.safetensors")
            else:
                self.live[i] = zeros_like(self.weights)
                self.pointers[i] = addresses(self.live[i])
                target = _BreakingTarget(self.live[i], threads=1, allow_new_names=True)
            found = Subscriber(
                self.store, RUN, target, clock=self.clock, timeout_s=2.0, reader_id=f"r{i}"
            )
            self.readers[i] = found
        return found

    @rule(i=st.integers(0, NUM_READERS - 1))
    def a_reader_pulls(self, i: int) -> None:
        follower = self.follower(i)
        report = follower.pull()
        assert report.version == max(self.model)
        assert report.kind == "nothing" or report.num_deltas + (report.kind == "anchor") > 0

    @rule(i=st.integers(0, NUM_READERS - 1), num_later=st.integers(1, 6))
    def a_reader_stages_and_installs_after_more_versions(self, i: int, num_later: int) -> None:
        """It holds a lease meanwhile, so what it staged stays true and its objects readable."""
        follower = self.follower(i)
        staged = follower.fetch()
        for _ in range(num_later):
            self.publish(0.02)
        if staged.frames:
            first = staged.plan.first_seq
            assert all(seq < first for seq in self.deleted_from(first))
        assert follower.apply().version == max(self.model) - num_later

    def deleted_from(self, first: int) -> list[int]:
        keys = {int(key[-20:]) for key in self.store.inner.list(f"{RUN}/log/")}
        return [seq for seq in range(first, max(keys) + 1) if seq not in keys]

    @rule(i=st.integers(0, NUM_READERS - 1))
    def a_reader_restarts(self, i: int) -> None:
        if self.readers[i] is not None:
            self.readers[i].close()
        self.readers[i] = None
        self.follower(i)

    @rule(i=st.integers(0, 1))
    def a_reader_dies_half_way(self, i: int) -> None:
        follower = self.follower(i)
        target = follower._installer._target
        self.publish(0.02)
        target.breaks = True
        with pytest.raises(OSError, match="half way"):
            follower.pull()
        assert follower.state is State.INCONSISTENT
        assert follower.version is None

    @rule(i=st.integers(0, 1))
    def memory_of_a_reader_is_damaged(self, i: int) -> None:
        follower = self.follower(i)
        if follower.version is not None:
            name = "layers.0.weight"
            self.live[i][name].view(np.uint8).reshape(-1)[3] ^= 4
            self.publish(0.02)
            try:
                follower.pull()  # an anchor, or a delta that replaces the block, heals it
            except GymfastError:
                assert follower.state is State.INCONSISTENT
            else:
                assert_same(self.live[i], self.model[follower.version])

    @invariant()
    def every_reader_serves_exactly_a_committed_version(self) -> None:
        for i, follower in enumerate(self.readers):
            if follower is None or follower.version is None:
                continue
            found = self.live[i] if i < 2 else load_file(self.folder / "c.safetensors")
            assert_same(found, self.model[follower.version])
            kept = {n: p for n, p in self.pointers[i].items() if n.startswith("layers.")}
            assert {n: p for n, p in addresses(found).items() if n in kept} == kept or i == 2

    @invariant()
    def the_store_is_sound(self) -> None:
        if self.model:
            report = fsck(self.store.inner, RUN, reads_objects=False)
            assert not report.damage
            assert report.restorable == max(self.model)


class FoldMachine(SyncMachine):
    """The same with two compactors, whose disk makes each step slower."""

    @rule(
        name=st.sampled_from(["a", "b"]),
        anchor_every=st.sampled_from([None, 4]),
        killed_at=st.sampled_from([None, None, 3, 12, 30]),
    )
    def a_compactor_works(self, name: str, anchor_every: int | None, killed_at: int | None) -> None:
        """Two of them have folders of their own; a kill loses what the store did not get."""
        self.store.arm(lambda n, op, key: "before" if killed_at and n >= killed_at else "")
        try:
            with Compactor(
                *(self.store, RUN, self.folder / name),
                every=2,
                levels=2,
                anchor_every=anchor_every,
                threads=1,
                timeout_s=2.0,
                clock=self.clock,
            ) as compactor:
                for _ in compactor.work():
                    pass
        except (StoreError, DeadlineError):
            assert killed_at
        self.store.arm(None)


_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
TestI03 = SyncMachine.TestCase
TestI03.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=_QUIET
)


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestI03Long(SyncMachine.TestCase):
    settings = settings(
        max_examples=400, stateful_step_count=125, deadline=None, suppress_health_check=_QUIET
    )


TestFolds = FoldMachine.TestCase
TestFolds.settings = settings(
    max_examples=4, stateful_step_count=30, deadline=None, suppress_health_check=_QUIET
)


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestFoldsLong(FoldMachine.TestCase):
    settings = settings(
        max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=_QUIET
    )
