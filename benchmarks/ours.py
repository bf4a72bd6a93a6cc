"""gymfast itself: a resident publisher and a resident receiver, on the buffers of the peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from benchmarks import bounds
from benchmarks.codec import Buffers, Codec
from benchmarks.data import Pair
from gymfast.delta.apply import apply as delta_apply
from gymfast.delta.backends import BlockParams
from gymfast.delta.encode import Encoder, Profile
from gymfast.delta.encode import encode as delta_encode
from gymfast.delta.frame import PROFILES
from gymfast.delta.geometry import Geometry
from gymfast.delta.state import State


class Gymfast(Codec):
    """Fused encode (compare, code, digests, snapshot, undo log) and apply with digests.

    The State of publisher and receiver is `work`, attached before the clock starts; going back is
    not timed: rollback after an encode, a frame from new to old after an apply.
    """

    profile: ClassVar[Profile]
    digest: ClassVar[str] = "base before, result after, per block and tensor"
    backend: ClassVar[str] = "auto"

    def __init__(self, pair: Pair, buffers: Buffers, threads: int = 1) -> None:
        super().__init__(pair, buffers, threads)
        self._live = dict(self.work)
        self._way_back = b""
        self._is_new = False
        super().reset_encode()
        self.state = State.attach(self._live, backend=self.backend, threads=threads)
        self._encoder = Encoder(self.state, profile=self.profile, threads=threads)
        self._old_rows = {name: slot.rows.copy() for name, slot in self.state.slots.items()}
        self._old_params: dict[str, BlockParams] = {}
        self._bodies: list[bytes] = []

    def encode(self) -> None:
        self.frame = list(self._encoder.encode(self.new))

    def reset_encode(self) -> None:
        if self._is_new:
            self.reset_apply()
        self._encoder.rollback()

    def apply(self) -> None:
        delta_apply(self.state, self._message, threads=self.threads)
        self._is_new = True

    def reset_apply(self) -> None:
        self._encoder.rollback()
        if not self._way_back:
            old = {name: array.reshape(-1) for name, array in self.pair.old.items()}
            options = {"profile": "fast", "backend": self.backend, "threads": self.threads}
            self._message = b"".join(self.frame)
            self._way_back = delta_encode(self.new, old, **options)
        if self._is_new:
            delta_apply(self.state, self._way_back, threads=self.threads)
            self._is_new = False

    # The rows beside encode and apply.

    def attach(self) -> None:
        """What a receiver does once: digests of all bytes."""
        self._attached = State.attach(self._live, backend=self.backend, threads=self.threads)

    def verify(self) -> None:
        """The scrub: all digests again, compared with those kept."""
        self.state.verify()

    def first_apply(self) -> None:
        """Attach and apply, as after a restart."""
        self.attach()
        delta_apply(self._attached, self._message, threads=self.threads)

    def reset_first_apply(self) -> None:
        super().reset_encode()

    # The native part alone: what is left without frames, roots and Python per tensor.

    def encode_blocks(self) -> None:
        """Compare, code, snapshot and digests of all blocks."""
        backend, params = self.state.backend, self._params()
        self._bodies = []
        for name, slot in self.state.slots.items():
            new = self.new[name].view(np.uint8)
            for first, count in _sections(slot.geometry):
                encoded = backend.encode_blocks(
                    *(slot.tensor.data, new, slot.geometry, params[name], slot.rows, first, count),
                    update=True,
                    undo=False,
                    threads=self.threads,
                )
                self._bodies.append(encoded.body)

    def apply_blocks(self) -> None:
        """Decode, write, digests and their checks of all blocks."""
        backend, params = self.state.backend, self._params()
        bodies = iter(self._bodies)
        for name, slot in self.state.slots.items():
            for first, count in _sections(slot.geometry):
                if body := next(bodies):
                    backend.apply_blocks(
                        *(slot.tensor.data, body, slot.geometry, params[name], slot.rows),
                        *(first, count, self.threads),
                    )

    def fused_pass(self) -> None:
        """Compare, list of changes, snapshot and digests of all blocks, nothing packed."""
        for name, array in self._live.items():
            block_units = self.state.slots[name].geometry.tile_cols
            bounds.fused(array.reshape(-1), self.new[name].reshape(-1), block_units)

    def reset_blocks(self) -> None:
        """Old bytes and old digests; the State itself stays what it was."""
        super().reset_encode()
        for name, slot in self.state.slots.items():
            slot.rows[:] = self._old_rows[name]
        if not self._bodies:
            self.encode_blocks()
            self.reset_blocks()

    def _params(self) -> dict[str, BlockParams]:
        """Class parameters of the old tensors; computed once, before the clock starts."""
        if not self._old_params:
            profile = PROFILES.index(self.profile)
            for name, slot in self.state.slots.items():
                old = self.pair.old[name].reshape(-1).view(np.uint8)
                found = self.state.backend.class_params(old, slot.geometry.unit_bytes)
                self._old_params[name] = BlockParams(profile, *found, has_base=True)
        return self._old_params


def _sections(geometry: Geometry) -> Iterator[tuple[int, int]]:
    """First block and number of blocks of each section of a tensor."""
    step = geometry.section_blocks()
    for first in range(0, geometry.num_blocks, step):
        yield first, min(step, geometry.num_blocks - first)


class Fast(Gymfast):
    name: ClassVar[str] = "gymfast fast"
    profile: ClassVar[Profile] = "fast"


class Small(Gymfast):
    name: ClassVar[str] = "gymfast small"
    profile: ClassVar[Profile] = "small"


class Auto(Gymfast):
    name: ClassVar[str] = "gymfast auto"
    profile: ClassVar[Profile] = "auto"


OURS: tuple[type[Gymfast], ...] = (Fast, Small, Auto)
