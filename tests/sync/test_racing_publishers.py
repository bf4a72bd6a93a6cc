"""Eight publishers at once on each kind of store; calls fail before and after their effect (I22).

Whoever is fenced takes the run over again. Nobody may be told of a place in the log that another
one was told of, and what somebody was told is what the log holds.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest
from object_proxy import Proxy, Trouble, serve_proxy
from object_servers import AZURE_ACCOUNT, AZURE_KEY, azurite, moto
from object_settings import az_settings, s3_settings
from sync.harness import RUN, FaultyStore, make_weights, publisher, step

from gymfast.errors import ConflictError, DeadlineError, StoreError
from gymfast.stores import FileStore, ObjectStore, Store, object_client, objects
from gymfast.sync import Publisher
from gymfast.sync.fsck import fsck
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import Log
from gymfast.sync.manifest import VersionRecord

NUM_RACERS = 8
FAULT_RATIO = 0.05
LIMIT_S = 3000.0
T = TypeVar("T")
MakeStore = Callable[[str, int], Store]
"""The store of a race, for a racer."""


@contextmanager
def files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
    def make(race: str, number: int) -> Store:
        store, rng = FaultyStore(FileStore(folder / race)), random.Random(number)

        def fault(_: int, operation: str, key: str) -> str:
            return rng.choice(("before", "after")) if rng.random() < FAULT_RATIO else ""

        store.arm(fault)
        return store

    yield make


ANSWERS = (
    Trouble("lose", "PUT"),
    Trouble("drop", "PUT"),
    Trouble("answer late", "PUT", status=409, code="ConditionalRequestConflict"),
    Trouble("answer", "PUT", status=409, code="ConditionalRequestConflict"),
    Trouble("answer late", "PUT", status=412, code="PreconditionFailed"),
    Trouble("answer late", "PUT", status=500),
    Trouble("answer", "PUT", status=503, code="SlowDown"),
)


@contextmanager
def behind_a_proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that has one of ANSWERS for some of the writes, at random."""
    for module in (objects, object_client):
        monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    with serve_proxy(endpoint) as proxy:
        rng, counts = random.Random(22), []

        def take(method: str, path: str) -> Trouble | None:
            with proxy.lock:
                if method != "PUT" or rng.random() >= FAULT_RATIO:
                    return None
                counts.append(rng.choice(ANSWERS))
                return counts[-1]

        proxy.take = take
        yield proxy
        assert len(counts) > NUM_RACERS // 2


@contextmanager
def s3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
    with moto() as endpoint, behind_a_proxy(endpoint, monkeypatch) as proxy:
        for name, value in s3_settings(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield lambda race, _: ObjectStore(f"s3://bucket/{race}")


@contextmanager
def azure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
    with azurite() as endpoint, behind_a_proxy(endpoint, monkeypatch) as proxy:
        for name, value in az_settings(proxy.endpoint, AZURE_ACCOUNT, AZURE_KEY).items():
            monkeypatch.setenv(name, value)
        yield lambda race, _: ObjectStore(f"az://bucket/{race}")


STORES = {"file": files, "moto": s3, "azurite": azure}


class Race:
    """`told` are the places of the log, each with the digest of the record that a racer has there.

    They have `num_places` in the end: commits, and claims of those who take over.
    """

    def __init__(self, make: MakeStore, num_places: int, pause_s: float) -> None:
        self.told: list[tuple[int, str]] = []
        self._name = secrets.token_hex(4)
        self._make, self._num_places, self._pause_s = make, num_places, pause_s
        self._end_s = time.monotonic() + LIMIT_S

    def store(self, number: int) -> Store:
        return self._make(self._name, number)

    def run(self) -> None:
        begin_s = time.monotonic()
        threads = [threading.Thread(target=self._race, args=(i,)) for i in range(NUM_RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S + 60)
        self.seconds = time.monotonic() - begin_s
        assert len(self.told) >= self._num_places

    def _race(self, number: int) -> None:
        """Publishes until fenced, then takes over again, soon."""
        store, rng = self.store(number), random.Random(number)
        weights = make_weights(number, num_tensors=1, size=40)
        while self._is_on():
            try:
                source = publisher(store, label=f"racer {number}", keep=10_000, timeout_s=20.0)
                self._note(source)
                while self._is_on():
                    weights = step(weights, rng.randrange(1 << 30))
                    source.publish(weights)
                    self._note(source)
            except (ConflictError, DeadlineError, StoreError):
                time.sleep(rng.random() * self._pause_s)

    def _is_on(self) -> bool:
        return len(self.told) < self._num_places and time.monotonic() < self._end_s

    def _note(self, source: Publisher) -> None:
        tip = source._committer.tip
        self.told.append((tip.seq, tip.record))


def patiently(look: Callable[[], T]) -> T:
    """What a look at the store finds; a server on a busy machine may be silent for long."""
    for _ in range(5):
        with suppress(StoreError):
            return look()
    return look()


def check(race: Race) -> int:
    """What became of a race; returns the number of versions that were committed."""
    race.run()
    places = {place for place, _ in race.told}
    assert len(places) == len(race.told), "two publishers were told of the same place"
    store = race.store(NUM_RACERS)
    if isinstance(store, FaultyStore):
        store.arm(None)
    log = patiently(lambda: Log(store, RunKeys(RUN)).load(lambda _: False))
    held = {entry.record.seq: entry.tip.record for entry in log}
    first = min(held)  # retention may have taken what was before the first version
    assert sorted(held) == list(range(first, first + len(held)))
    assert all(held[place] == digest for place, digest in race.told if place >= first)
    versions = [e.record.version for e in log if isinstance(e.record, VersionRecord)]
    assert versions == list(range(len(versions)))
    assert not patiently(lambda: fsck(store, RUN)).damage
    return len(versions)


def test_I22_eight_racing_publishers_and_lost_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files(tmp_path, monkeypatch) as make:
        assert check(Race(make, 24, pause_s=0.05)) > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", STORES)
def test_I22_a_thousand_places_of_eight_racing_publishers_and_lost_replies(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with STORES[kind](tmp_path, monkeypatch) as make:
        races = [Race(make, 100, pause_s=0.05 if kind == "file" else 1.0) for _ in range(10)]
        num_versions = sum(check(race) for race in races)
        num_places = sum(len(race.told) for race in races)
    print(f"{kind}: {num_places} places, {num_versions} versions")
    assert num_versions > 50
