"""pcodec, the best codec that does not look at the old weights."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

from benchmarks.codec import Buffers
from benchmarks.data import Bits, Pair
from benchmarks.peers.sparse import Sparse


class Pcodec(Sparse):
    """pcodec level 8 on the gaps and on the steps in units of the last place, over all tensors.

    One call for the whole model (its tables are then paid once); the spec is fixed to the
    choice that its automatic search makes, without the search. No digest.
    """

    name: ClassVar[str] = "pcodec"

    def __init__(self, pair: Pair, buffers: Buffers, threads: int = 1) -> None:
        super().__init__(pair, buffers, threads)
        self._counts: list[int] = []
        self._config = ChunkConfig(
            compression_level=8, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op()
        )

    def encode(self) -> None:
        gaps: list[NDArray[np.uint32]] = []
        steps: list[Bits] = []
        for name, new in self.new.items():
            at = self.changed(name)
            gap = np.diff(at, prepend=-1)
            gap -= 1
            old, values = self.work[name], new[at]
            gaps.append(gap.astype(np.uint32))
            steps.append(_order(values) - _order(old[at]))
            old[at] = values
        self._counts = [gap.size for gap in gaps]
        self.frame = [
            standalone.simple_compress(np.concatenate(gaps), self._config),
            standalone.simple_compress(np.concatenate(steps).view(np.int16), self._config),
        ]

    def apply(self) -> None:
        total = sum(self._counts)
        gaps, steps = np.empty(total, np.uint32), np.empty(total, np.int16)
        standalone.simple_decompress_into(self.frame[0], gaps)
        standalone.simple_decompress_into(self.frame[1], steps)
        start = 0
        for base, count in zip(self.work.values(), self._counts, strict=True):
            part = slice(start, start + count)
            at = np.cumsum(gaps[part], dtype=np.int64)
            at += np.arange(count)
            base[at] = _unorder(_order(base[at]) + steps[part].view(np.uint16))
            start += count

    @property
    def frame_bytes(self) -> int:
        return super().frame_bytes + 8 * len(self._counts)


def _order(bits: Bits) -> Bits:
    """All bit patterns in numerical order, modulo 2^16."""
    return bits ^ ((bits >> 15) * np.uint16(0x7FFF) | np.uint16(0x8000))


def _unorder(order: Bits) -> Bits:
    return order ^ ((~order >> 15) * np.uint16(0x7FFF) | np.uint16(0x8000))
