"""Encoding: from a state and new weights to a frame, at once or section by section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gymfast.delta.backends import select
from gymfast.delta.encode_pass import EncodePass, EncodeStats, Options
from gymfast.delta.encode_plan import plan_frame, refuse_shared
from gymfast.delta.frame import PROFILES
from gymfast.delta.state import State, num_threads
from gymfast.delta.tensors import Weights
from gymfast.delta.undo import Undo, UndoMemory

__all__ = ["EncodeStats", "Encoder", "Profile", "encode", "profile_index"]
Profile = Literal["auto", "fast", "small"]


def profile_index(profile: str) -> int:
    """The number of a profile in HEADER; ValueError if there is none of this name."""
    if profile not in PROFILES:
        raise ValueError(f"profile {profile!r}, expected one of {', '.join(PROFILES)}")
    return PROFILES.index(profile)


def encode(
    old: Weights | State | None,
    new: Weights,
    *,
    profile: Profile = "auto",
    backend: str = "auto",
    threads: int | None = None,
    tiled: bool = False,
    key: bytes | None = None,
) -> bytes:
    """The frame that turns old into new; old None gives an anchor, which needs no base.

    Neither side is changed. `tiled` counts where old is no State, which has its own setting.
    With a key (16 bytes or more) the frame is authenticated, for stores that are not trusted.
    Raises TypeError and ValueError for weights that a frame cannot carry.
    """
    if isinstance(old, State):
        old.require_consistent()
        state = old
    elif old is None:
        state = State(tiled=tiled, backend=backend, threads=threads)
    else:
        state = State.reading(old, tiled=tiled, backend=backend, threads=threads)
    entries = plan_frame(state, new)
    options = Options(select(backend), num_threads(threads), profile_index(profile), key)
    return b"".join(EncodePass(state, entries, options, update=False).sections())


class Encoder:
    """Encodes versions against a state that it keeps up to date in the same pass.

    Between `encode` and `commit` the way back is kept: at most 4 bytes per changed unit of 2
    bytes (6 per unit of 4) or the changed blocks (on a GPU the old units and a bit for each unit),
    whichever is less (with Triton 8 bytes and the old unit per change), plus the tensors that were
    replaced or removed, plus 16 bytes per block and 4 per 65,536 units. Of it, memory up to a
    sixteenth of the state stays allocated for the next version. Tensors that are new, or no
    longer tied, get memory of the state's own. With several threads up to two sections (16 MiB
    of weights each) per thread are encoded ahead of the one taken. Not thread-safe.
    """

    def __init__(
        self,
        state: State,
        *,
        profile: Profile = "auto",
        backend: str | None = None,
        threads: int | None = None,
        key: bytes | None = None,
    ) -> None:
        """An encoder over a state; back end and threads are those of the state if not given.

        With a key (16 bytes or more) every frame is authenticated, for untrusted stores.
        """
        self._state = state
        self._options = Options(
            state.backend if backend is None else select(backend),
            state.threads if threads is None else num_threads(threads),
            profile_index(profile),
            key,
        )
        self._pass: EncodePass | None = None
        self._undo: Undo | None = None
        self._memory = UndoMemory(sum(s.tensor.num_bytes for s in state.slots.values()) // 16)
        self._stats = EncodeStats(0, 0, 0, 0, 0.0)

    @property
    def state(self) -> State:
        """The state that the next version is encoded against."""
        return self._state

    @property
    def undo_bytes(self) -> int:
        """Bytes that the way back from the open version takes so far; 0 if there is none."""
        return self._memory.num_bytes

    @property
    def stats(self) -> EncodeStats:
        """What the newest version cost (so far)."""
        return self._pass.stats if self._pass else self._stats

    def encode(self, new: Weights) -> Iterator[bytes]:
        """The sections of the frame for `new`, each as soon as it is known.

        The state holds `new` once the iterator is exhausted; then commit or rollback. Tensors on a
        GPU have to be ready on the current stream of the calling thread, which has to be the same
        stream for all sections.
        Raises ValueError if the version before is neither committed nor rolled back, or if new
        shares memory with the state; ChainError if the state is inconsistent; TypeError and
        ValueError for weights that no frame can carry.
        """
        if self._undo is not None:
            raise ValueError("the version before is still open: call commit() or rollback() first")
        self._state.require_consistent()
        if self._state.is_read_only:
            raise ValueError("the state is read-only: make it with State.copy_of")
        entries = plan_frame(self._state, new)
        refuse_shared(self._state, entries)
        undo = Undo(dict(self._state.slots), self._memory)
        one_pass = EncodePass(self._state, entries, self._options, update=True, undo=undo)
        self._undo, self._pass = undo, one_pass
        self._state.is_consistent = False
        return one_pass.sections()

    def commit(self) -> None:
        """Forgets the way back: the next version is encoded against the newest one.

        Raises ValueError if the newest frame is not complete.
        """
        if self._pass is not None and not self._pass.is_complete:
            raise ValueError("the frame is not complete: take all sections, or call rollback()")
        self._close()

    def rollback(self) -> None:
        """Puts the exact previous state back, after any number of sections; safe to repeat.

        Raises GymfastError in the one case where it cannot: an interrupt (signal) between the
        update of a block and the note of how to undo it. The state is then marked inconsistent.
        """
        if self._undo is not None:
            if self._pass is not None:
                self._pass.close()
            self._undo.run(self._state, self._options.backend, self._options.threads)
            self._state.is_consistent = True
        self._close()

    def _close(self) -> None:
        self._stats = self.stats
        if self._pass is not None:
            self._pass.close()
        self._undo = self._pass = None
        self._memory.clear()
