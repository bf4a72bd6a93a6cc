"""The store under a campaign: what is really there, and the bad way to it that each process has."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gymfast.errors import ConflictError, NotFoundError, StoreError
from gymfast.stores.base import Blob, copied
from tests.campaign.simulation import KilledError, Process, Simulation

WRITES = ("put", "create", "delete")
Watch = Callable[[Process | None, str, str, bytes | None, bytes | None], None]


@dataclass(frozen=True)
class Troubles:
    """How often calls fail, per kind; `lag_s` is the longest delay until a write is visible.

    `twice`: a write is carried out a second time, before its answer comes; `stale`: the hint is an
    older one.
    """

    refused: float = 0.0
    lost: float = 0.0
    late: float = 0.0
    slow: float = 0.0
    flip: float = 0.0
    twice: float = 0.0
    stale: float = 0.0
    lag_s: float = 0.0


class Ground:
    """Bytes by key with their history. `watch` is told every effect: who, what, key, old, new."""

    url = "sim:"
    has_create_only = True
    num_ahead = 0

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.troubles = Troubles()
        self.full_until_s = 0.0
        self.shows_puts = False
        self.watch: Watch = lambda *_: None
        self.trace: list[tuple[float, str, str, str, str]] = []
        self.num_faults: dict[str, int] = {}
        self._history: dict[str, list[tuple[float, bytes | None]]] = {}
        self._keys: list[str] = []

    def now(self, key: str) -> bytes | None:
        """What is really there."""
        history = self._history.get(key)
        return history[-1][1] if history else None

    def seen(self, key: str) -> bytes | None:
        """What a reader sees."""
        now_s = self.simulation.now_s
        for visible_s, blob in reversed(self._history.get(key, ())):
            if visible_s <= now_s:
                return blob
        return None

    def old(self, key: str) -> bytes | None:
        """What was there once, or now."""
        return self.simulation.rng.choice(self._history.get(key, [(0.0, None)]))[1]

    def keys(self, prefix: str, look: Callable[[str], bytes | None]) -> list[str]:
        first = bisect_left(self._keys, prefix)
        last = bisect_left(self._keys, f"{prefix}\x7f")
        return [key for key in self._keys[first:last] if look(key) is not None]

    def _of(self, key: str) -> list[tuple[float, bytes | None]]:
        """The history of a key, to be added to."""
        if key not in self._history:
            self._history[key] = [(-math.inf, None)]
            insort(self._keys, key)
        return self._history[key]

    def effect(self, who: Process | None, operation: str, key: str, blob: bytes | None) -> None:
        """Carries a write out; ConflictError for a create of what is there."""
        old = self.now(key)
        if operation == "create" and old is not None:
            raise ConflictError(f"create '{key}': it exists already")
        lag_s = 0.0 if "/probe/" in key else self.simulation.rng.uniform(0, self.troubles.lag_s)
        if operation != "delete" or old is not None:
            self._of(key).append((self.simulation.now_s + lag_s, blob))
        self.watch(who, operation, key, old, blob)

    def contents(self) -> dict[str, bytes]:
        """Everything that is really there."""
        found = ((key, self.now(key)) for key in sorted(self._history))
        return {key: blob for key, blob in found if blob is not None}

    def restore(self, contents: dict[str, bytes]) -> None:
        """Puts an earlier content back, unseen by `watch`."""
        for key in sorted(self._history.keys() | contents.keys()):
            self._of(key).append((self.simulation.now_s, contents.get(key)))

    def note(self, who: str, operation: str, key: str, what: str) -> None:
        self.trace.append((self.simulation.now_s, who, operation, key, what))


class WayStore:
    """The store as one process sees it: slow, lossy, late, sometimes cut off.

    `is_atomic`: nobody else runs during a call, for caches that several processes share.
    A process with `num_ahead` is far away: its requests overlap, and so do their answers.
    """

    has_create_only = True

    def __init__(self, ground: Ground, process: Process, *, is_atomic: bool = False) -> None:
        self.ground = ground
        self.process = process
        self.url = ground.url
        self.is_atomic = is_atomic
        self.num_ahead = process.num_ahead
        self.shows_puts = process.num_ahead > 0 and ground.shows_puts

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        self._write("put", key, copied(data))

    def create(self, key: str, data: Blob) -> None:
        self._write("create", key, copied(data))

    def delete(self, key: str) -> None:
        self._write("delete", key, None)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        blob = self._read("get", key)
        if len(blob) > max_bytes:
            raise StoreError(f"get '{key}': {len(blob)} bytes, over the limit of {max_bytes}")
        return blob

    def get_range(self, key: str, start: int, length: int) -> bytes:
        blob = self._read("get_range", key)
        if start + length > len(blob):
            raise StoreError(f"get_range '{key}': it has only {len(blob)} bytes: truncated")
        return blob[start : start + length]

    def size(self, key: str) -> int:
        return len(self._read("size", key))

    def list(self, prefix: str) -> Iterator[str]:
        self._arrive("list", prefix)
        found = self.ground.keys(prefix, self.ground.seen)
        self.ground.note(self.process.name, "list", prefix, f"{len(found)} keys")
        self.ground.watch(self.process, "list", prefix, None, None)
        if self.num_ahead:
            self._return(prefix)
        return iter(found)

    def free_bytes(self) -> int | None:
        return None

    def _arrive(self, operation: str, key: str) -> str:
        """What happens to the call: "" for nothing; raises if it never gets there."""
        process, ground = self.process, self.ground
        if process.is_dead:
            raise KilledError
        if "/probe/" in key or not (self.is_atomic or process.is_running):
            return ""
        simulation, troubles = ground.simulation, ground.troubles
        rng = simulation.rng
        if not self.is_atomic:
            is_slow = rng.random() < troubles.slow
            rate = 1 / 3 if is_slow else 15 if self.num_ahead else 50
            simulation.pause(process, rng.expovariate(rate))
        is_write = operation in WRITES
        if process.cut_until_s > simulation.now_s:
            what = rng.choice(("refused", "lost")) if is_write else "refused"
        elif ground.full_until_s > simulation.now_s and operation in ("put", "create"):
            what = "full"
        else:
            drawn = rng.random()
            what = ""
            for kind in ("refused", "lost", "late"):
                drawn -= getattr(troubles, kind)
                if drawn < 0 and not what:
                    what = kind if is_write else "refused"
        if what:
            ground.num_faults[what] = ground.num_faults.get(what, 0) + 1
        if what in ("refused", "full"):
            ground.note(process.name, operation, key, what)
            if not self.is_atomic and what == "refused":
                simulation.pause(process, rng.expovariate(2))
            text = "No space left on device" if what == "full" else "the way is bad"
            raise StoreError(f"{operation} '{key}': {text}")
        return what

    def _write(self, operation: str, key: str, blob: bytes | None) -> None:
        how = self._arrive(operation, key)
        ground, process = self.ground, self.process
        if how == "late":
            ground.note(process.name, operation, key, "will be done later")
            ground.simulation.at(
                ground.simulation.rng.uniform(0.1, 60.0),
                lambda: self._done_late(operation, key, blob),
            )
            raise StoreError(f"{operation} '{key}': no answer")
        try:
            ground.effect(process, operation, key, blob)
            if self._happens(ground.troubles.twice, key, "twice"):
                ground.note(process.name, operation, key, "done, and asked for again")
                self._return(key)
                ground.effect(process, operation, key, blob)
        except ConflictError:
            ground.note(process.name, operation, key, "exists")
            ground.watch(process, "exists", key, None, None)
            raise
        ground.note(process.name, operation, key, how or "done")
        if how == "lost":
            if not self.is_atomic:
                ground.simulation.pause(process, ground.simulation.rng.expovariate(2))
            raise StoreError(f"{operation} '{key}': the reply is lost")
        self._return(key)

    def _return(self, key: str) -> None:
        """The way back of an answer."""
        if not self.is_atomic and "/probe/" not in key and self.process.is_running:
            rate = 15 if self.num_ahead else 100
            simulation = self.ground.simulation
            simulation.pause(self.process, simulation.rng.expovariate(rate))

    def _happens(self, rate: float, key: str, what: str) -> bool:
        """True if such a thing happens to this call; counts it."""
        if not rate or "/probe/" in key or self.ground.simulation.rng.random() >= rate:
            return False
        self.ground.num_faults[what] = self.ground.num_faults.get(what, 0) + 1
        return True

    def _done_late(self, operation: str, key: str, blob: bytes | None) -> None:
        try:
            self.ground.effect(self.process, operation, key, blob)
        except ConflictError:
            self.ground.note(self.process.name, operation, key, "late: exists")
        else:
            self.ground.note(self.process.name, operation, key, "late: done")

    def _read(self, operation: str, key: str) -> bytes:
        self._arrive(operation, key)
        ground = self.ground
        blob = ground.seen(key)
        if key.endswith("/hint") and self._happens(ground.troubles.stale, key, "stale"):
            blob = ground.old(key)
        ground.note(
            self.process.name, operation, key, "absent" if blob is None else f"{len(blob)} bytes"
        )
        ground.watch(self.process, operation, key, None, None)
        if self.num_ahead:
            self._return(key)
        if blob is None:
            raise NotFoundError(f"{operation} '{key}': no such object")
        rng = ground.simulation.rng
        is_content = operation != "size" and blob
        if is_content and self._happens(ground.troubles.flip, key, "flip"):
            ground.note(self.process.name, operation, key, "damaged on the way")
            return damaged(blob, rng)
        return blob


def damaged(blob: bytes, rng) -> bytes:
    """The bytes with a bit flipped, cut off, or with something behind them."""
    how = rng.choice(("flip", "flip", "cut", "tail"))
    if how == "cut":
        return blob[: rng.randrange(len(blob))]
    if how == "tail":
        return blob + b"\0"
    place = rng.randrange(len(blob))
    return blob[:place] + bytes([blob[place] ^ 1 << rng.randrange(8)]) + blob[place + 1 :]
