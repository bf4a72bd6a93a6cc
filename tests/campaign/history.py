"""One number is one history: who takes part, what goes wrong, and whether all ends well."""

from __future__ import annotations

import random
import shutil
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from unittest import mock

from gymfast.errors import GymfastError
from gymfast.stores.base import Store
from gymfast.sync.fsck import fsck
from gymfast.sync.manifest import MAX_OBJECT_BYTES
from gymfast.sync.relay import RelayCache
from tests.campaign.counts import Counts, ViolationError
from tests.campaign.epilogue import epilogue
from tests.campaign.folding import Folding
from tests.campaign.ground import Ground, Troubles, WayStore
from tests.campaign.model import Model
from tests.campaign.overlap import overlapping
from tests.campaign.parties import (
    KEY,
    WRONG_KEY,
    Gc,
    Reader,
    Scene,
    Trainer,
    name_of,
)
from tests.campaign.simulation import Process, Simulation
from tests.campaign.troubles import Decay, Forger

CHAOS_S, CALM_S = 90.0, 400.0
FEATURES = (
    "kills", "stops", "cuts", "full", "lag", "flips", "late", "lost", "refused", "slow", "clocks",
    "decay", "forger", "relays", "second", "gc",
)  # fmt: skip
LATER_FEATURES = ("far", "folds", "twice", "stale")
"""Drawn by themselves, so that an old number still has the features above that it had."""
STRAYS = ("folds/readme", "folded/notes/part", "objects/readme", "log/readme", "notes")


@dataclass(frozen=True)
class Profile:
    """What a history is made of; each feature is on or off, and three times as bad if harsh."""

    seed: int
    features: frozenset[str]
    has_key: bool
    num_runs: int
    num_readers: int
    anchor_every: int
    keep: int
    chaos_s: float = CHAOS_S
    is_harsh: bool = False

    @classmethod
    def drawn(cls, seed: int) -> Profile:
        rng = random.Random(seed * 7919 + 13)
        features = {f for f in FEATURES if rng.random() < 0.45}
        if rng.random() < 0.85:
            features -= {"decay"}
        has_key = rng.random() < 0.35
        features -= set() if has_key else {"forger"}
        if "decay" in features:
            features -= {"forger", "clocks"}
        later = random.Random(seed * 104729 + 17)
        added = {f for f in LATER_FEATURES if later.random() < 0.45}
        profile = cls(
            seed,
            frozenset(features | added),
            has_key,
            1 + (rng.random() < 0.25),
            rng.randint(2, 4),
            rng.choice((1, 2, 5)),
            4 if "lag" in features else rng.choice((1, 2, 4)),
        )
        if "folds" in added:  # they are for long ways
            profile = replace(
                profile, anchor_every=later.choice((5, 50)), keep=later.choice((4, 12))
            )
        return profile

    def without(self, *names: str) -> Profile:
        return replace(self, features=self.features - set(names))

    def __str__(self) -> str:
        rest = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "features"]
        return f"{', '.join(rest)}, with {' '.join(sorted(self.features)) or 'nothing else'}"


@dataclass
class History:
    """One history on one ground."""

    profile: Profile
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.simulation = Simulation(self.profile.seed)
        self.ground = Ground(self.simulation)
        self.scenes: list[Scene] = []
        self.readers: list[Reader] = []
        self.relays: list[RelayCache] = []
        self.compactors: list[Folding] = []
        self.folder: Path | None = None
        self.num_started = 0

    def play(self) -> None:
        """Plays it; ViolationError if anything is not as it has to be."""
        try:
            self._play()
        except GymfastError as error:
            text = f"{type(error).__name__} at the end: {error}"
            raise ViolationError("I03", text) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ViolationError("errors", f"{type(error).__name__}: {error}") from error
        self.counts["errors"] += 1

    def _play(self) -> None:
        """Chaos, then calm, then the end."""
        simulation, profile = self.simulation, self.profile
        with self._patched():
            try:
                for number in range(profile.num_runs):
                    self._open_run(f"run{'' if number == 0 else '.1'}")
                self.ground.watch = self._watch
                self.ground.troubles = self._troubles()
                if self.has("far") and not self.has("lag"):
                    self.ground.shows_puts = self.simulation.rng.random() < 0.5
                self._plan_incidents()
                simulation.run(profile.chaos_s)
                self._calm()
                simulation.run(CALM_S)
                self._check_end()
                self._check_closed()
                simulation.close()
                epilogue(self)
            finally:
                simulation.close()
                for relay in self.relays:
                    relay.close()
                if self.folder is not None:
                    shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Random and clock of a process, wherever the code has no place to give one."""
        rng, clock = self.simulation.rng, self.simulation

        def nonce() -> str:
            return f"{rng.getrandbits(128):032x}"

        def reader_name() -> str:
            return f"compactor-{rng.getrandbits(32):08x}"

        virtual = types.SimpleNamespace(monotonic=lambda: clock.now_s)
        with (
            overlapping(),
            mock.patch("gymfast.sync.subscriber.reader_name", reader_name),
            mock.patch("gymfast.sync.committer.new_nonce", nonce),
            mock.patch("gymfast.sync.epoch.new_nonce", nonce),
            mock.patch("gymfast.sync.relay.time", virtual),
            mock.patch("gymfast.sync.relay._PAUSES_S", (0.0, 0.0)),  # they would be real ones
            mock.patch("gymfast.sync.relay_answers.time", virtual),
        ):
            yield

    def has(self, feature: str) -> bool:
        return feature in self.profile.features

    def _watch(self, who: Process | None, *effect) -> None:
        key = effect[1]
        run = who.name.split("/")[0] if who else key.split("/")[0]
        for scene in self.scenes:
            if scene.model.run == run:
                scene.model.watch(who, *effect)

    def _open_run(self, run: str) -> None:
        profile = self.profile
        model = Model(
            run,
            profile.keep,
            self.counts,
            self.ground,
            is_strict=not {"decay", "forger"} & profile.features,
            has_leases=not {"clocks", "flips", "lag"} & profile.features,
        )
        model.folds.is_clean = not {"late", "flips", "lag"} & profile.features
        for name in STRAYS:
            self.ground.effect(None, "put", f"{run}/{name}", name.encode())
        options = {
            "anchor_every": profile.anchor_every,
            "keep": profile.keep,
            "anchor_ratio": 100.0,
            "object_bytes": self.simulation.rng.choice((100, 400, 5000)),
            "timeout_s": 10.0,
            "threads": 1,
            "memory_budget_bytes": 1 << 30,
        }
        key = KEY if profile.has_key else None
        scene = Scene(self.simulation, self.ground, model, self.counts, options, key)
        scene.may_fence_falsely = bool({"decay", "forger", "flips"} & profile.features)
        scene.pause_s = 2.0 if self.has("lag") else 0.0  # retention keeps what it deletes longer
        scene.has_sure_writes = not {"refused", "lost", "late", "cuts", "decay"} & profile.features
        scene.size = 200 if self.has("folds") else 40  # for which folds pay
        self.scenes.append(scene)
        for _ in range(2 if self.has("second") else 1):
            self._start(scene, "trainer", Trainer(scene).work)
        for number in range(profile.num_readers):
            self._start_reader(scene, number)
        if self.has("folds"):
            self._start_compactors(scene)
        if self.has("gc"):
            self._start(scene, "gc", Gc(scene).work)
        for name, party in (("decay", Decay), ("forger", Forger)):
            if self.has(name):
                process = self._start(scene, name, party(scene).work)
                model.outsiders.add(process.name)

    def _start(self, scene: Scene, kind: str, work) -> Process:
        self.num_started += 1
        process = self.simulation.start(f"{scene.model.run}/{kind}{self.num_started}", work)
        process.wall_offset_s = self.simulation.rng.uniform(-20, 20)
        if self.has("far"):
            process.num_ahead = self.simulation.rng.choice((0, 1, 2, 4))
        return process

    def _start_compactors(self, scene: Scene) -> None:
        """One or two, and readers that need folds: slow ones, and such as come late."""
        rng = self.simulation.rng
        if self.folder is None:
            shared = Path("/dev/shm")  # memory: many small files
            self.folder = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
        every, levels = rng.choice(((2, 2), (2, 3), (3, 2), (4, 1)))
        anchor_every = rng.choice((None, every, 2 * every))
        for number in range(1 + (rng.random() < 0.5)):
            folding = Folding(
                scene,
                self.folder / f"{scene.model.run}-{number}",
                every,
                levels,
                anchor_every,
                rng.choice((100, scene.options["object_bytes"])),
            )
            self.compactors.append(folding)
            self._start(scene, "compactor", folding.work)
        for _ in range(2):
            after_s = rng.uniform(0, self.profile.chaos_s)
            self.simulation.at(after_s, lambda: self._start_reader(scene, 0, pace_s=15.0))

    def _start_reader(self, scene: Scene, number: int, pace_s: float = 3.0) -> None:
        rng = self.simulation.rng
        is_relayed = self.has("relays") and number > 0
        relay = self._relay(scene, number) if is_relayed else None
        key = scene.key
        if number == 1 and scene.key is not None and rng.random() < 0.5:
            key = WRONG_KEY
        reader = Reader(
            scene,
            (lambda process: scene.way(process)) if relay is None else (lambda _: relay),
            key,
            lease_s=rng.choice((30.0, 600.0)),
            hold_s=rng.choice((3.0, 3.0, 60.0)),
            may_lag=self.has("lag") or relay is not None,
            pace_s=pace_s,
        )
        process = self._start(scene, "reader", reader.work)
        if relay is None:
            scene.model.readers[process.name] = scene.model.keys.reader(name_of(process))
        self.readers.append(reader)

    def _relay(self, scene: Scene, number: int) -> Store:
        """The relay of a site: the second reader brings one, later ones share it, or stack one."""
        if number == 1 or not self.relays:
            process = Process(self.simulation, f"{scene.model.run}/relay{number}")
            way = WayStore(self.ground, process, is_atomic=True)
            self.relays.append(RelayCache(way, max_bytes=MAX_OBJECT_BYTES))
        elif number == 3:
            self.relays.append(RelayCache(self.relays[-1], max_bytes=MAX_OBJECT_BYTES))
        return self.relays[-1]

    def _troubles(self) -> Troubles:
        rng = self.simulation.rng

        def rate(feature: str, most: float) -> float:
            drawn = 3 * most if self.profile.is_harsh else rng.uniform(0, most)
            return drawn if self.has(feature) else 0.0

        return Troubles(
            refused=rate("refused", 0.1),
            lost=rate("lost", 0.1),
            late=rate("late", 0.06),
            slow=rate("slow", 0.05),
            flip=rate("flips", 0.03),
            twice=rate("twice", 0.06),
            stale=rate("stale", 0.5),
            lag_s=rate("lag", 3.0),
        )

    # Incidents

    def _plan_incidents(self) -> None:
        rng, incidents = self.simulation.rng, []
        incidents += [self._kill] * (6 if self.has("kills") else 0)
        incidents += [self._kill_compactor] * (3 if self.has("kills") and self.compactors else 0)
        incidents += [self._stop] * (4 if self.has("stops") else 0)
        incidents += [self._cut] * (5 if self.has("cuts") else 0)
        incidents += [self._fill] * (2 if self.has("full") else 0)
        incidents += [self._jump] * (4 if self.has("clocks") else 0)
        for incident in incidents:
            self.simulation.at(rng.uniform(0, self.profile.chaos_s), incident)

    def _victim(self) -> Process:
        alive = [p for p in self.simulation.processes if not p.is_dead and not p.is_done]
        return self.simulation.rng.choice(alive or self.simulation.processes)

    def _told(self, victim: Process, what: str) -> None:
        self.ground.note(victim.name, "--", "", what)
        self.counts[what] += 1

    def _kill_compactor(self) -> None:
        victim = self.simulation.rng.choice(self.compactors).process
        if victim is not None and not victim.is_dead:
            self._kill(victim)

    def _kill(self, victim: Process | None = None) -> None:
        victim = victim or self._victim()
        if not {"trainer", "reader", "gc", "compactor"} & {
            victim.name.split("/")[1].rstrip("0123456789")
        }:
            return
        self._told(victim, "killed")
        victim.kill()
        scene = next(s for s in self.scenes if s.model.run == victim.name.split("/")[0])
        reader = next((r for r in self.readers if r.process is victim), None)
        delay_s = self.simulation.rng.expovariate(1 / 4)
        if reader is not None:
            self.simulation.at(delay_s, partial(self._again, scene, reader))
        elif "/compactor" in victim.name:
            folding = next(f for f in self.compactors if f.process in (victim, None))
            self.simulation.at(delay_s, lambda: self._start(scene, "compactor", folding.work))
        elif "/trainer" in victim.name:
            work = Trainer(scene, had_death=True).work
            self.simulation.at(delay_s, lambda: self._start(scene, "trainer", work))

    def _again(self, scene: Scene, reader: Reader) -> None:
        assert reader.process is not None
        is_direct = reader.process.name in scene.model.readers
        process = self._start(scene, "reader", reader.work)
        reader.process = process
        if is_direct:
            scene.model.readers[process.name] = scene.model.keys.reader(name_of(process))

    def _stop(self) -> None:
        victim = self._victim()
        self._told(victim, "stopped")
        victim.stopped_until_s = self.simulation.now_s + self.simulation.rng.expovariate(1 / 20)

    def _cut(self) -> None:
        victim = self._victim()
        self._told(victim, "cut off")
        victim.cut_until_s = self.simulation.now_s + self.simulation.rng.expovariate(1 / 10)

    def _fill(self) -> None:
        self.ground.full_until_s = self.simulation.now_s + self.simulation.rng.expovariate(1 / 10)
        self.counts["store full"] += 1

    def _jump(self) -> None:
        victim = self._victim()
        self._told(victim, "clock jumps")
        victim.wall_offset_s += self.simulation.rng.choice((1.0, 700.0, -5_000.0, 100_000.0))

    # The end

    def _calm(self) -> None:
        """No more faults: everybody has to end at the newest version."""
        self.ground.troubles = Troubles()
        self.ground.full_until_s = 0.0
        for process in self.simulation.processes:
            process.cut_until_s = process.stopped_until_s = 0.0
        self.ground.note("--", "--", "", "calm")
        self.simulation.at(61.0, self._quieten)

    def _quieten(self) -> None:
        """What was late has arrived: one trainer publishes two more versions, then nobody does."""
        for scene in self.scenes:
            scene.is_quiet = True
            for process in self.simulation.processes:
                if process.name.startswith(f"{scene.model.run}/trainer"):
                    process.kill()
            self._start(scene, "trainer", Trainer(scene).work)

    def _check_end(self) -> None:
        for scene in self.scenes:
            if not scene.ends:
                raise ViolationError("I03", f"run '{scene.model.run}' was never published again")
            self._check_store(scene)
        for reader in self.readers:
            version = None if reader.subscriber is None else reader.subscriber.version
            newest = reader.scene.model.newest
            reader.check()
            if not reader.has_wrong_key:
                assert reader.process is not None
                text = f"{reader.process.name} ended at {version}, the newest version is {newest}"
                is_told = not reader.scene.model.is_strict and reader.is_told_to_start_anew
                self.counts.check("I03", version == newest or is_told, text)
                self.counts["readers told to start anew"] += is_told
        for name, number in self.ground.num_faults.items():
            self.counts[f"calls {name}"] += number
        self.counts["calls"] += len(self.ground.trace)
        self.counts["histories"] += 1

    def _check_closed(self) -> None:
        """Everybody goes: nothing of them stays."""
        for scene in self.scenes:
            scene.is_over = True
        self.simulation.run(120.0)
        contents = self.ground.contents()
        for process in self.simulation.processes:
            if not process.is_dead and process.name.split("/")[1].startswith(("reader", "comp")):
                lease = f"{process.name.split('/')[0]}/readers/{name_of(process)}"
                is_gone = not process.strands and lease not in contents
                self.counts.check("I61", is_gone, f"something of {process.name} stays")

    def _check_store(self, scene: Scene) -> None:
        """The store is whole; with a key, the key is nowhere."""
        contents = self.ground.contents()
        if scene.key is not None:
            shown = [KEY, KEY.hex().encode()]
            for blob in [*contents.values(), *(text.encode() for text in scene.texts)]:
                self.counts.check("I84", not any(key in blob for key in shown), "a key is shown")
        if "decay" not in self.profile.features:
            for name in STRAYS:
                is_same = contents.get(f"{scene.model.run}/{name}") == name.encode()
                self.counts.check("I27", is_same, f"'{name}' is not ours, and changed")
        if scene.model.is_strict:
            for folding in self.compactors:
                if folding.scene is scene:
                    self.counts.check("I21 folds", folding.is_done, f"{folding.told} is behind")
            reader = Process(self.simulation, "fsck")
            report = fsck(WayStore(self.ground, reader), scene.model.run, key=scene.key)
            self.counts.check("I26", not report.damage, f"fsck finds {report.damage}")
            is_newest = report.restorable == scene.model.newest
            self.counts.check("I26", is_newest, f"fsck restores {report.restorable}")


def play(profile: Profile, counts: Counts | None = None) -> History:
    """The history of a profile, played to its end."""
    history = History(profile, Counts() if counts is None else counts)
    history.play()
    return history
