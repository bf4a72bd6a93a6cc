"""Lists of positions and values."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from benchmarks.codec import Buffers, Codec
from benchmarks.data import Bits, Pair

Positions = NDArray[np.int64]


class Sparse(Codec):
    """Finds the changed elements of each tensor with a kept mask and updates the snapshot."""

    def changed(self, name: str) -> Positions:
        old, new = self.work[name], self.new[name]
        mask = self.scratch[name].view(np.bool_)[: old.size]
        np.not_equal(old, new, out=mask)
        return np.flatnonzero(mask)


class Int32Values(Sparse):
    """TRL, verl and vLLM sparse updates: int32 position and raw BF16 value, nothing coded."""

    name: ClassVar[str] = "int32+bf16"

    def __init__(self, pair: Pair, buffers: Buffers, threads: int = 1) -> None:
        super().__init__(pair, buffers, threads)
        self._lists: list[tuple[NDArray[np.int32], Bits]] = []

    def encode(self) -> None:
        self._lists = []
        for name, new in self.new.items():
            at = self.changed(name)
            self._lists.append((at.astype(np.int32), new[at]))
            self.work[name][at] = self._lists[-1][1]

    def apply(self) -> None:
        for base, (at, values) in zip(self.work.values(), self._lists, strict=True):
            base[at] = values

    @property
    def frame_bytes(self) -> int:
        return sum(at.nbytes + values.nbytes for at, values in self._lists)


class _Packed(Sparse):
    """All tensors' arrays in one zstd level 1 stream, with a small fixed record per tensor."""

    def __init__(self, pair: Pair, buffers: Buffers, threads: int = 1) -> None:
        super().__init__(pair, buffers, threads)
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()
        self._layout: list[tuple[int, list[np.dtype[np.generic]]]] = []

    def pack(self, arrays: list[list[NDArray[np.generic]]]) -> None:
        self._layout = [(group[0].size, [array.dtype for array in group]) for group in arrays]
        body = b"".join([array.tobytes() for group in arrays for array in group])
        self.frame = [self._compressor.compress(body)]

    def unpack(self) -> list[list[NDArray[np.generic]]]:
        body = self._decompressor.decompress(self.frame[0])
        groups, at = [], 0
        for count, dtypes in self._layout:
            group = []
            for dtype in dtypes:
                group.append(np.frombuffer(body, dtype, count, at))
                at += count * dtype.itemsize
            groups.append(group)
        return groups

    @property
    def frame_bytes(self) -> int:
        return super().frame_bytes + 8 * len(self._layout)


class CooZstd(_Packed):
    """PULSE / grail v3.1: row and column deltas in the smallest types, raw BF16 values, zstd-1.

    It takes xxh3-128 of the whole state on both sides. Source: arXiv 2602.03839 and grail's sparse
    codec, which compares floats and decodes column deltas row by row in Python; here bits are
    compared and all steps are whole-array operations.
    """

    name: ClassVar[str] = "coo+zstd-1+xxh3"
    digest: ClassVar[str] = "xxh3-128 of the state, both sides"

    def encode(self) -> None:
        arrays: list[list[NDArray[np.generic]]] = []
        for name, new in self.new.items():
            at = self.changed(name)
            values = new[at]
            arrays.append([*self._deltas(name, at), values])
            self.work[name][at] = values
        self.pack(arrays)
        self._digest = self._state_digest(self.new)

    def apply(self) -> None:
        for (name, base), (rows, cols, values) in zip(
            self.work.items(), self.unpack(), strict=True
        ):
            if rows.size:
                base[self._positions(name, rows, cols)] = values
        if self._state_digest(self.work) != self._digest:
            raise AssertionError("digest of the state")

    def _deltas(self, name: str, at: Positions) -> list[NDArray[np.generic]]:
        rows, cols = np.divmod(at, self._num_cols(name))
        row_steps = np.diff(rows, prepend=0)
        col_steps = np.diff(cols, prepend=0)
        np.copyto(col_steps, cols, where=row_steps != 0)
        return [_smallest(row_steps, np.uint8, np.int32), _smallest(col_steps, np.uint16, np.int32)]

    def _positions(
        self, name: str, rows: NDArray[np.generic], cols: NDArray[np.generic]
    ) -> Positions:
        sums = np.cumsum(cols, dtype=np.int64)
        is_start = rows != 0
        is_start[0] = True
        before = np.zeros(sums.size, np.int64)
        before[is_start] = sums[is_start] - cols[is_start]
        np.maximum.accumulate(before, out=before)
        sums -= before
        sums += np.cumsum(rows, dtype=np.int64) * self._num_cols(name)
        return sums

    def _num_cols(self, name: str) -> int:
        shape = self.pair.old[name].shape
        return int(np.prod(shape[1:])) if len(shape) > 1 else 1

    @staticmethod
    def _state_digest(state: dict[str, Bits]) -> bytes:
        digest = xxhash.xxh3_128()
        for array in state.values():
            digest.update(array)
        return digest.digest()


class Gap16XorZstd(_Packed):
    """NeMo-RL sparse refit: gaps in the smallest unsigned type, XOR of the values, zstd level 1.

    Its checksum covers the compressed bytes only.
    """

    name: ClassVar[str] = "gap16+xor+zstd-1"
    digest: ClassVar[str] = "xxh3-128 of the message"

    def encode(self) -> None:
        arrays: list[list[NDArray[np.generic]]] = []
        for name, new in self.new.items():
            at = self.changed(name)
            gaps = np.diff(at, prepend=-1)
            gaps -= 1
            old, values = self.work[name], new[at]
            arrays.append([_smallest(gaps, np.uint16, np.uint32), old[at] ^ values])
            old[at] = values
        self.pack(arrays)
        self._digest = xxhash.xxh3_128_digest(self.frame[0])

    def apply(self) -> None:
        if xxhash.xxh3_128_digest(self.frame[0]) != self._digest:
            raise AssertionError("digest of the message")
        for base, (gaps, values) in zip(self.work.values(), self.unpack(), strict=True):
            at = np.cumsum(gaps, dtype=np.int64)
            at += np.arange(at.size)
            base[at] ^= values.view(np.uint16)


def _smallest(
    values: Positions, small: type[np.generic], large: type[np.generic]
) -> NDArray[np.generic]:
    """The values in the small type if they fit; NumPy keeps their bits."""
    fits = not values.size or values.max() <= np.iinfo(np.dtype(small)).max
    return values.astype(small if fits else large)
