"""Trainers, readers, cleaners, forgers and decay: who takes part in a history."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gymfast.delta import State
from gymfast.errors import (
    ConflictError,
    DeadlineError,
    GymfastError,
    NotFoundError,
    StoreError,
)
from gymfast.stores.base import Store
from gymfast.sync import LiveTarget, Publisher, Subscriber
from gymfast.sync.cleaner import collect
from tests.campaign.counts import Counts
from tests.campaign.ground import Ground, WayStore
from tests.campaign.model import Model
from tests.campaign.simulation import Process, Simulation, current
from tests.sync.harness import Weights, copy_of, make_weights, step, zeros_like

KEY = b"campaign-key-0123456789"
WRONG_KEY = b"another-key-9876543210"
RETRIED = (GymfastError,)


def name_of(process: Process) -> str:
    """The name of a reader in its lease."""
    return process.name.replace("/", ".")


@dataclass
class Scene:
    """What all parties of one run share."""

    simulation: Simulation
    ground: Ground
    model: Model
    counts: Counts
    options: dict[str, Any]
    key: bytes | None = None
    is_quiet: bool = False
    ends: bool = False
    is_over: bool = False
    has_sure_writes: bool = False
    may_fence_falsely: bool = False
    num_states: int = 0
    pause_s: float = 0.0
    size: int = 40
    texts: list[str] = field(default_factory=list)

    def note(self, process: Process, what: str, error: BaseException | None = None) -> None:
        text = what if error is None else f"{what}: {type(error).__name__}: {error}"
        self.ground.note(process.name, "--", "", text)
        if self.key is not None and error is not None:
            self.texts.append(str(error))

    def way(self, process: Process) -> WayStore:
        return WayStore(self.ground, process)

    def new_weights(self, weights: Weights | None) -> Weights:
        """The next state of a training: some, all or no bits changed, other tensors, an old one."""
        rng = self.simulation.rng
        self.num_states += 1
        number = self.num_states
        if weights is None:
            return make_weights(number, num_tensors=2, size=self.size)
        drawn = rng.random()
        if drawn < 0.1:
            return copy_of(weights)
        if drawn < 0.15:
            return {**weights, "extra": np.full(number % 7 + 1, number, np.int16)}
        if drawn < 0.2:
            return {name: value for name, value in weights.items() if name != "extra"}
        if drawn < 0.25:  # a training that goes back
            return copy_of(rng.choice(list(self.model.states.values())[-6:]))
        return step(weights, number, rng.choice((0.001, 0.02, 0.02, 0.5)))


@dataclass
class Trainer:
    """Publishes versions, again what failed, until it is fenced; then somebody starts it anew."""

    scene: Scene
    had_death: bool = False

    def work(self, process: Process) -> None:
        scene = self.scene
        rng, clock = scene.simulation.rng, process
        while not scene.ends:
            try:
                source = Publisher(
                    scene.way(process),
                    scene.model.run,
                    clock=clock,
                    key=scene.key,
                    label=process.name,
                    **scene.options,
                )
            except RETRIED as error:
                scene.note(process, "could not start", error)
                clock.sleep(rng.expovariate(1 / 3))
                continue
            scene.note(process, f"took over: epoch {source.epoch}, version {source.version}")
            scene.counts["starts of a publisher"] += 1
            if self.had_death:
                scene.counts.check("I21", True, "")
            self._lead(process, source)
            clock.sleep(rng.expovariate(1 / 4))

    def _lead(self, process: Process, source: Publisher) -> None:
        scene, rng = self.scene, self.scene.simulation.rng
        roots = scene.model.versions.get(scene.model.newest, set())
        newest = scene.model.states[min(roots)] if roots else None
        if newest is not None and source.version == scene.model.newest and rng.random() < 0.6:
            try:
                source.adopt(newest)
            except RETRIED as error:
                scene.note(process, "could not adopt", error)
        weights = newest
        is_new, has_failed, num_published = True, False, 0
        while not scene.ends:
            if is_new:
                weights = scene.new_weights(weights)
            assert weights is not None
            root = State.reading(weights).root.hex()
            scene.model.states.setdefault(root, copy_of(weights))
            before, anchor = source.root, scene.is_quiet or rng.random() < 0.1
            try:
                report = source.publish(weights, anchor=anchor)
            except ConflictError as error:
                scene.note(process, "fenced", error)
                self._check_fenced(process, source, weights)
                return
            except RETRIED as error:
                scene.note(process, "failed", error)
                self._check_rolled_back(source)
                if scene.ground.full_until_s > scene.simulation.now_s:
                    is_of_store = isinstance(error, (StoreError, DeadlineError))
                    scene.counts.check("I25", is_of_store, f"the store is full: {error!r}")
                is_new, has_failed = rng.random() < 0.4, True
                if rng.random() < 0.1:
                    return
            else:
                scene.note(process, f"published version {report.version}, {report.kind}")
                self._check_published(report, root, before, has_failed=has_failed)
                is_new, has_failed = True, False
                num_published += 1
                if scene.is_quiet and num_published >= 2:
                    scene.ends = True
            process.sleep(scene.pause_s + rng.expovariate(1 / 2))

    def _check_published(self, report, root: str, before: str | None, *, has_failed: bool) -> None:
        model, counts = self.scene.model, self.scene.counts
        record = model.records.get(report.seq)
        is_there = root in model.versions.get(report.version, ()) and report.root == root
        is_there &= record is None or (record.get("root"), record["epoch"]) == (root, report.epoch)
        counts.check("I22", is_there, f"version {report.version} was told, but is not in the log")
        if has_failed:
            counts.check("I04", is_there, "")
        if report.kind == "delta" and before is not None:
            is_empty = report.num_changed == 0
            if model.states[root].keys() == model.states[before].keys():
                counts.check("I33", is_empty == (root == before), f"{report.num_changed} changed")

    def _check_rolled_back(self, source: Publisher) -> None:
        snapshot = source._snapshot
        committed = snapshot._committed
        if committed is None:
            return
        assert snapshot._pending is None
        try:
            committed.verify()
        except GymfastError as error:
            self.scene.counts.check("I04", False, f"the snapshot is torn: {error}")
        known = self.scene.model.states.get(snapshot.root or "")
        found = {name: bytes(t.data) for name, t in committed.tensors.items()}
        is_same = known is not None and found == {n: v.tobytes() for n, v in known.items()}
        is_same &= committed.root.hex() == snapshot.root
        roots = set().union(*self.scene.model.versions.values())
        is_same &= snapshot.root in roots
        self.scene.counts.check("I04", is_same, "the snapshot is not the committed state")

    def _check_fenced(self, process: Process, source: Publisher, weights: Weights) -> None:
        scene = self.scene
        newest = max(scene.model.claims, default=0)
        is_replaced = newest > source.epoch or scene.may_fence_falsely
        scene.counts.check("I23", is_replaced, f"epoch {source.epoch} is fenced, {newest} newest")
        num_calls = len(scene.ground.trace)
        try:
            source.publish(weights)
        except ConflictError:
            scene.counts.check("I23", len(scene.ground.trace) == num_calls, "it wrote again")
        else:
            scene.counts.check("I23", False, "a fenced publisher went on")


class BreakingTarget(LiveTarget):
    """Live tensors whose writer dies half way when told to."""

    breaks = False
    num_folds = 0

    def write(self, frames, *, is_known):
        self.num_folds = sum(frame.step.is_fold for frame in frames)
        if self.breaks:
            self.breaks = False
            first = next(iter(self.state.tensors.values()))
            first.data[:5] ^= 1
            self.state.is_consistent = False
            raise OSError("killed half way")
        return super().write(frames, is_known=is_known)


@dataclass
class Reader:
    """Follows the run in every way there is; what it serves is compared after each step."""

    scene: Scene
    open_way: Callable[[Process], Store]
    key: bytes | None
    lease_s: float = 600.0
    hold_s: float = 3.0
    process: Process | None = None
    subscriber: Subscriber | None = None
    live: Weights = field(default_factory=dict)
    highest: int = -1
    is_corrupt: bool = False
    may_lag: bool = False
    pace_s: float = 3.0

    @property
    def has_wrong_key(self) -> bool:
        return self.key not in (None, self.scene.key)

    @property
    def is_told_to_start_anew(self) -> bool:
        """True if the log contradicts what it followed: it serves that and says so."""
        assert self.subscriber is not None
        return "start this reader from scratch" in self.subscriber.status.last_error or (
            "publisher in charge" in self.subscriber.status.last_error
        )

    def work(self, process: Process) -> None:
        scene, rng = self.scene, self.scene.simulation.rng
        self.process, self.highest, self.is_corrupt = process, -1, False
        first = next(iter(scene.model.states.values()), None)
        self.live = {} if first is None or rng.random() < 0.3 else zeros_like(first)
        while not scene.is_over:
            self._open(process)
            self._follow(process)

    def _open(self, process: Process) -> None:
        scene = self.scene
        self.highest = -1
        self.target = BreakingTarget(self.live, threads=1, allow_new_names=True)
        self.subscriber = Subscriber(
            self.open_way(process),
            scene.model.run,
            self.target,
            clock=process,
            timeout_s=scene.options["timeout_s"],
            reader_id=name_of(process),
            lease_s=self.lease_s,
            freshness_s=60.0,
            key=self.key,
        )

    def _follow(self, process: Process) -> None:
        """Until it goes; then nothing of it stays."""
        scene, rng = self.scene, self.scene.simulation.rng
        assert self.subscriber is not None
        while not scene.is_over:
            if self.subscriber.state.name == "CLEAN" and not scene.is_quiet:
                self._spoil()
            try:
                self._act(process, self.subscriber)
            except OSError as error:
                scene.note(process, "died half way", error)
            except RETRIED as error:
                scene.note(process, "failed", error)
            self.check()
            process.sleep(rng.expovariate(1 / (1 if scene.is_quiet else self.pace_s)))
            if not scene.is_quiet and rng.random() < 0.05:
                with suppress(*RETRIED):
                    self.subscriber.fetch()
                break
        self.subscriber.close()
        at_work = [(strand, strand.work) for strand in process.strands if strand is not current()]

        def check_ended() -> None:
            is_gone = all(strand.work is not work for strand, work in at_work)
            scene.counts.check("I61", is_gone, f"a thread of {process.name} stays")

        scene.simulation.at(200.0, check_ended)  # what was asked for is answered by then
        if scene.has_sure_writes:
            lease = scene.ground.now(scene.model.keys.reader(name_of(process)))
            scene.counts.check("I61", lease is None, f"the lease of {process.name} stays")

    def _spoil(self) -> None:
        rng = self.scene.simulation.rng
        if rng.random() < 0.03:
            self.target.breaks = True
        elif rng.random() < 0.03 and self.live:
            name = rng.choice(sorted(self.live))
            flat = self.live[name].view(np.uint8).reshape(-1)
            flat[rng.randrange(flat.size)] ^= 1 << rng.randrange(8)
            self.is_corrupt = True

    def _act(self, process: Process, subscriber: Subscriber) -> None:
        rng, model = self.scene.simulation.rng, self.scene.model
        drawn = 0.0 if self.scene.is_quiet else rng.random()
        if drawn < 0.5:
            self._installed(process, subscriber.pull())
        elif drawn < 0.7:
            staged = subscriber.fetch()
            process.sleep(min(100.0, rng.expovariate(1 / self.hold_s)))
            assert staged.version >= 0
            self._installed(process, subscriber.apply())
        elif drawn < 0.8:
            subscriber.poll()
        elif drawn < 0.9:
            newest = subscriber.poll()
            if newest is not None:
                interval_s = rng.choice((None, 0.1, 1.0)) if process.num_ahead else None
                report = subscriber.wait(newest + 1, timeout_s=8.0, interval_s=interval_s)
                self._installed(process, report)
        else:
            version = rng.randint(max(0, model.newest - 4), max(0, model.newest + 1))
            with suppress(NotFoundError, DeadlineError):
                self._installed(process, subscriber.pull(version))

    def _installed(self, process: Process, report) -> None:
        self.scene.note(
            process, f"serves version {report.version}: {report.kind}, {report.num_deltas} deltas"
        )
        self.scene.counts["installs"] += report.kind != "nothing"
        if report.kind == "nothing":
            return
        if self.is_corrupt:
            self.is_corrupt = False
            self.scene.counts.check("I31", self._is_exact(), "damaged memory is served")
        if self.target.num_folds:
            self.target.num_folds = 0
            self.scene.counts.check("I30 folds", self._is_exact(), f"folds to {report.version}")
        before = report.from_version
        if before is not None and report.version - before > 1:
            self.scene.counts.check("I30", self._is_exact(), f"{before} to {report.version}")

    def _is_exact(self) -> bool:
        assert self.subscriber is not None
        version, root = self.subscriber.version, self.subscriber.root
        if version is None:
            return True
        known = self.scene.model.states.get(root or "")
        return (
            known is not None
            and root in self.scene.model.versions.get(version, ())
            and sorted(known) == sorted(self.live)
            and all(self.live[n].tobytes() == v.tobytes() for n, v in known.items())
            and all(self.live[n].dtype == v.dtype for n, v in known.items())
        )

    def check(self) -> None:
        """What it serves is exactly a committed version, and none older than before."""
        counts, subscriber = self.scene.counts, self.subscriber
        assert subscriber is not None
        version = subscriber.version
        if self.has_wrong_key:
            counts.check("I82", version is None, "a reader with another key serves a version")
            return
        if self.is_corrupt and version is not None:
            return
        text = f"it serves version {version} with other bytes"
        counts.check("I20", self._is_exact(), text)
        if self.may_lag:
            counts.check("I34", self._is_exact(), text)
        if version is None:
            counts["looks at readers that serve nothing"] += 1
        else:
            counts.check("I32", version >= self.highest, f"{self.highest}, then {version}")
            self.highest = version


@dataclass
class Gc:
    """Somebody else who runs retention from time to time."""

    scene: Scene

    def work(self, process: Process) -> None:
        scene, rng = self.scene, self.scene.simulation.rng
        while True:
            process.sleep(rng.expovariate(1 / 10))
            try:
                report = collect(
                    scene.way(process),
                    scene.model.run,
                    keep=scene.options["keep"],
                    key=scene.key,
                    clock=process,
                )
            except RETRIED as error:
                scene.note(process, "failed", error)
            else:
                scene.note(process, f"floor {report.floor}, {len(report.records)} records gone")
