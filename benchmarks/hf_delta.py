"""Payloads of the published directory format: zstd level 1, as slime makes them, and our frames."""

from __future__ import annotations

import time
from typing import ClassVar

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from benchmarks.codec import Buffers, Codec
from benchmarks.data import Pair
from gymfast import _core
from gymfast.delta.hf_delta.stored import store

Bytes = NDArray[np.uint8]


class Published(Codec):
    """Per changed tensor a frame and the xxh3-128 of its new bytes; no file, no snapshot update."""

    digest: ClassVar[str] = "xxh3-128 of the tensor"
    is_overwrite: ClassVar[bool]

    def __init__(self, pair: Pair, buffers: Buffers, threads: int = 1) -> None:
        super().__init__(pair, buffers, threads)
        self.digests: dict[str, bytes] = {}
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self) -> None:
        self.frame, self.digests = [], {}
        for name, new in self.new.items():
            a, b = self.work[name].view(np.uint8), new.view(np.uint8)
            frame = self._frame(name, a, b)
            self.frame.append(frame)
            if frame:
                self.digests[name] = xxhash.xxh3_128_digest(b)

    def _frame(self, name: str, old: Bytes, new: Bytes) -> bytes:
        """Empty if nothing changed."""
        raise NotImplementedError

    def apply(self) -> None:
        for (name, base), frame in zip(self.work.items(), self.frame, strict=True):
            if not frame:
                continue
            content = np.frombuffer(self._decompressor.decompress(frame), np.uint8)
            data = base.view(np.uint8)
            if self.is_overwrite:
                count = int(content[:4].view("<u4")[0])
                positions = content[4 : 4 + 4 * count].view("<u4")
                data[positions] = content[4 + 4 * count :]
            else:
                np.bitwise_xor(data, content, out=data)
            assert xxhash.xxh3_128_digest(data) == self.digests[name]

    def check(self) -> tuple[float, float]:
        self.reset_encode()
        seconds = []
        for run in (self.encode, self.apply):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        self._check_bits("apply")
        return seconds[0], seconds[1]

    @property
    def frame_bytes(self) -> int:
        return super().frame_bytes + 16 * len(self.digests)


class Level1Xor(Published):
    """slime's xor encoding on kept buffers."""

    name: ClassVar[str] = "xor, zstd level 1"
    is_overwrite: ClassVar[bool] = False

    def __init__(self, pair: Pair, buffers: Buffers, threads: int = 1) -> None:
        super().__init__(pair, buffers, threads)
        self._compressor = zstandard.ZstdCompressor(level=1)

    def _frame(self, name: str, old: Bytes, new: Bytes) -> bytes:
        xor = self.scratch[name].view(np.uint8)
        np.bitwise_xor(old, new, out=xor)
        return self._compressor.compress(xor) if xor.any() else b""


class Level1Overwrite(Published):
    """slime's overwrite encoding."""

    name: ClassVar[str] = "overwrite, zstd level 1"
    is_overwrite: ClassVar[bool] = True

    def __init__(self, pair: Pair, buffers: Buffers, threads: int = 1) -> None:
        super().__init__(pair, buffers, threads)
        self._compressor = zstandard.ZstdCompressor(level=1)

    def _frame(self, name: str, old: Bytes, new: Bytes) -> bytes:  # noqa: ARG002
        positions = np.flatnonzero(old != new)
        if positions.size == 0:
            return b""
        count = np.uint32(positions.size).tobytes()
        content = count + positions.astype("<u4").tobytes() + new[positions].tobytes()
        return self._compressor.compress(content)


class SparseXor(Published):
    """Ours: the xor straight to a frame, digests on the way, as a version is published."""

    name: ClassVar[str] = "gymfast xor"
    is_overwrite: ClassVar[bool] = False

    def encode(self) -> None:
        self.frame, self.digests = [], {}
        for name, new in self.new.items():
            a, b = self.work[name].view(np.uint8), new.view(np.uint8)
            stored = store(name, a, b, "xor", "xxh3-128", threads=self.threads)
            self.frame.append(stored.frame if stored else b"")
            if stored:
                self.digests[name] = bytes.fromhex(stored.digest)


class SparseOverwrite(Published):
    """Ours: the list of changes straight to a frame."""

    name: ClassVar[str] = "gymfast overwrite"
    is_overwrite: ClassVar[bool] = True

    def _frame(self, name: str, old: Bytes, new: Bytes) -> bytes:  # noqa: ARG002
        frame = _core.zstd_overwrite_frame(old, new, threads=self.threads)
        return b"" if len(frame) <= 18 and np.array_equal(old, new) else frame


HF_DELTA: tuple[type[Published], ...] = (Level1Xor, SparseXor, Level1Overwrite, SparseOverwrite)
