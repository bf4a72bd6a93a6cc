"""gymfast itself: a resident publisher and a resident receiver, on the buffers of the peers."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.codec import Buffers, Codec
from benchmarks.data import Pair
from gymfast.delta.apply import apply as delta_apply
from gymfast.delta.encode import Encoder, Profile
from gymfast.delta.encode import encode as delta_encode
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
        for name, array in self.work.items():
            array[:] = self.pair.old[name].reshape(-1)


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
