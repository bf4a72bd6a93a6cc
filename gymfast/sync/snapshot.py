"""The publisher's snapshot: the state that was committed last, and the way to the next one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from gymfast.delta.backends import select
from gymfast.delta.encode import Encoder, EncodeStats, Profile, profile_index
from gymfast.delta.encode_pass import EncodePass, Options
from gymfast.delta.encode_plan import plan_frame
from gymfast.delta.geometry import num_bytes_of
from gymfast.delta.memory import CPU, PINNED, allocated_bytes
from gymfast.delta.state import SnapshotPlace, State, check_snapshot, num_threads
from gymfast.delta.tensors import Weights, place_of_value, spec_of
from gymfast.errors import GymfastError


@dataclass(frozen=True)
class EncodeSettings:
    """How frames are made."""

    profile: Profile = "auto"
    backend: str = "auto"
    threads: int | None = None
    tiled: bool = False
    snapshot: SnapshotPlace = "beside"


class UndoTooLargeError(GymfastError):
    """The way back from a version outgrew its budget: publish an anchor instead."""


class Snapshot:
    """The committed state and one pending state after it; `promote` or `rollback` ends that.

    Without a committed state, `copy` makes the pending one; with one, `delta` does, in place.
    """

    def __init__(self, settings: EncodeSettings) -> None:
        """No state yet. Raises ValueError for settings that the codec does not know."""
        profile_index(settings.profile)
        check_snapshot(settings.snapshot)
        self._settings = settings
        self._committed: State | None = None
        self._pending: State | None = None
        self._encoder: Encoder | None = None
        self._committed_root: str | None = None
        self.stats = EncodeStats(0, 0, 0, 0, 0.0)

    @property
    def root(self) -> str | None:
        """The root of the committed state; None if there is none in memory."""
        return self._committed_root

    @property
    def new_root(self) -> str:
        """The root of the newest state: the pending one, else the committed one."""
        return self._new.root.hex()

    @property
    def host_bytes(self) -> int:
        """Bytes of CPU memory held."""
        states = {id(s): s for s in (self._committed, self._pending) if s is not None}
        sizes = [state.memory_bytes for state in states.values()]
        return sum(size.get(CPU, 0) + size.get(PINNED, 0) for size in sizes)

    def host_bytes_for(self, weights: Weights) -> int:
        """Bytes of CPU memory that a snapshot of these weights takes."""
        is_beside = self._settings.snapshot == "beside"
        num_bytes = 0
        for name, value in weights.items():
            size = num_bytes_of(*spec_of(value, str(name)))
            if place_of_value(value) == CPU:
                num_bytes += size
            elif not is_beside:
                num_bytes += allocated_bytes(size, PINNED)
        return num_bytes

    @property
    def num_tensors(self) -> int:
        """Tensors of the newest state, tied ones each."""
        return len(self._new.slots)

    @property
    def schema(self) -> str:
        """SHA-256 over names, dtypes and shapes of the newest state, in ascending order."""
        specs = sorted((name.encode(), *slot.spec) for name, slot in self._new.slots.items())
        return hashlib.sha256(repr(specs).encode()).hexdigest()

    def copy(self, weights: Weights) -> None:
        """Makes a copy of the weights the pending state."""
        s = self._settings
        self._pending = State.copy_of(
            weights, tiled=s.tiled, backend=s.backend, threads=s.threads, snapshot=s.snapshot
        )

    def delta(self, weights: Weights, undo_bytes: int) -> Iterator[bytes]:
        """Sections of the delta to `weights`, which become the pending state in the same pass.

        Raises UndoTooLargeError once the way back takes more than `undo_bytes`.
        """
        assert self._encoder is not None, "only a committed state has deltas"
        self._pending = self._committed
        kept_bytes = self._kept_bytes(weights)
        for section in self._encoder.encode(weights):
            self.stats = self._encoder.stats
            needed = kept_bytes + self._encoder.undo_bytes
            if needed > undo_bytes:
                raise UndoTooLargeError(f"the way back needs {needed} of {undo_bytes} bytes")
            yield section

    def anchor(self) -> Iterator[bytes]:
        """Sections of a full frame of the newest state, which stays as it is."""
        s, state = self._settings, self._new
        # All of a pinned snapshot goes out, which needs no GPU.
        backend = "auto" if s.snapshot == "pinned" else s.backend
        empty = State(tiled=s.tiled, backend=backend, threads=s.threads)
        options = Options(select(backend), num_threads(s.threads), profile_index(s.profile))
        one_pass = EncodePass(empty, plan_frame(empty, state.tensors), options, update=False)
        for section in one_pass.sections():
            self.stats = one_pass.stats
            yield section

    def promote(self) -> None:
        """The newest state is the committed one from now on."""
        s = self._settings
        if self._encoder is None:
            self._encoder = Encoder(
                self._new, profile=s.profile, backend=s.backend, threads=s.threads
            )
        else:
            self._encoder.commit()
        self._committed, self._committed_root = self._new, self.new_root
        self._pending = None

    def rollback(self) -> None:
        """Puts the exact committed state back; safe to repeat.

        If that fails (see Encoder.rollback) there is no committed state in memory any more.
        """
        self._pending = None
        if self._encoder is not None:
            try:
                self._encoder.rollback()
            except GymfastError:
                self.drop()

    def drop(self) -> None:
        """Gives the memory of all states back."""
        self._committed = self._pending = self._encoder = self._committed_root = None

    @property
    def _new(self) -> State:
        newest = self._pending or self._committed
        assert newest is not None, "there is no state in memory"
        return newest

    def _kept_bytes(self, weights: Weights) -> int:
        """Bytes of old tensors that are replaced or removed: the way back keeps them whole."""
        assert self._committed is not None
        new = {name: spec_of(value, name) for name, value in weights.items()}
        slots = self._committed.slots.items()
        return sum(s.tensor.num_bytes for name, s in slots if new.get(name) != s.spec)


def bytes_of(weights: Weights) -> int:
    """Bytes of all tensors, tied ones each, from their dtypes and shapes."""
    specs = (spec_of(value, str(name)) for name, value in weights.items())
    return sum(num_bytes_of(dtype, shape) for dtype, shape in specs)
