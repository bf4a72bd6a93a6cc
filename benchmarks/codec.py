"""What a row of the table does: one codec over one pair; buffers are made before the clock runs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from benchmarks.data import Arena, Bits, Pair, Tensors, room_for


class Buffers:
    """A mutable state of the pair's shape (snapshot or receiver) and scratch of its size."""

    def __init__(self, pair: Pair) -> None:
        self._work = Arena(room_for(pair.old))
        self._scratch = Arena(room_for(pair.old))
        self.work: Tensors = self._work.like(pair.old)
        self.scratch: Tensors = self._scratch.like(pair.old)

    @property
    def work_flat(self) -> Bits:
        return self._work.used

    @property
    def scratch_flat(self) -> Bits:
        return self._scratch.used


class Codec(ABC):
    """Encode and apply as a system would: diff, code, its own digests, snapshot kept up to date.

    `encode` reads the snapshot `work` (bits of `old`) and the live weights `new`, leaves the coded
    bytes in `self.frame` and the bits of `new` in `work`. `apply` turns `work` from old to new.
    """

    name: ClassVar[str]
    digest: ClassVar[str] = "none"

    def __init__(self, pair: Pair, buffers: Buffers, threads: int = 1) -> None:
        self.pair = pair
        self.threads = threads
        self.work = {name: buffers.work[name].reshape(-1) for name in pair.old}
        self.scratch = {name: buffers.scratch[name].reshape(-1) for name in pair.old}
        self.new = {name: array.reshape(-1) for name, array in pair.new.items()}
        self.frame: list[bytes] = []

    @abstractmethod
    def encode(self) -> None: ...

    @abstractmethod
    def apply(self) -> None: ...

    def reset_encode(self) -> None:
        """Back to before `encode`; not timed."""
        for name, array in self.work.items():
            np.copyto(array, self.pair.old[name].reshape(-1))

    def reset_apply(self) -> None:
        """Back to before `apply`; not timed."""
        self.reset_encode()

    @property
    def frame_bytes(self) -> int:
        return sum(len(part) for part in self.frame)

    def check(self) -> tuple[float, float]:
        """Seconds of one encode and one apply, both of which end with exactly the new bits.

        Raises AssertionError if they do not.
        """
        seconds = []
        for what, reset, run in (
            ("encode", self.reset_encode, self.encode),
            ("apply", self.reset_apply, self.apply),
        ):
            reset()
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
            self._check_bits(what)
        return seconds[0], seconds[1]

    def _check_bits(self, what: str) -> None:
        for name, array in self.work.items():
            if not np.array_equal(array, self.new[name]):
                wrong = np.flatnonzero(array != self.new[name])
                raise AssertionError(
                    f"{self.name}: after {what} tensor '{name}' differs in {wrong.size} elements, "
                    f"the first at {wrong[0]}: not lossless, so not timed"
                )
