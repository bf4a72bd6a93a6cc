"""What a stored tensor does to the old bytes: `xor` and `overwrite`, window by window."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from gymfast.delta.hf_delta.version import DeltaVersion, StoredTensor
from gymfast.delta.hf_delta.zstd_frame import ZstdFrame
from gymfast.delta.memory import U8
from gymfast.errors import FormatError

_CHUNK = 2**18  # positions at a time


class Patch(Protocol):
    """Changes the windows of one tensor in ascending order, without gaps."""

    def apply(self, old: U8, new: U8, start: int) -> None:
        """Fills new with what the old bytes become, from the byte start of the tensor.

        Raises FormatError if the stored tensor is unsound.
        """
        ...

    def finish(self) -> None:
        """Raises FormatError if the stored tensor holds more than the tensor has bytes."""
        ...


def open_patch(version: DeltaVersion, stored: StoredTensor, num_bytes: int) -> Patch:
    """What a version does to a tensor of num_bytes; raises FormatError if the sizes do not fit."""
    where = f"{version.file_of(stored)}: tensor {stored.name!r}"
    if version.encoding == "xor":
        return _Xor(_open_frame(version, stored, where), num_bytes, where)
    frames = [_open_frame(version, stored, where) for _ in range(2)]
    return _Overwrite(frames[0], frames[1], num_bytes, where)


def _open_frame(version: DeltaVersion, stored: StoredTensor, where: str) -> ZstdFrame:
    shard = version.shards[stored.shard]
    return ZstdFrame(shard.fd, stored.start, stored.num_bytes, shard.path, where)


class _Xor:
    def __init__(self, frame: ZstdFrame, num_bytes: int, where: str) -> None:
        _check_content(frame, num_bytes, f"the tensor has {num_bytes}", where)
        self._frame = frame

    def apply(self, old: U8, new: U8, start: int) -> None:  # noqa: ARG002 - of the protocol
        difference = np.frombuffer(self._frame.read(new.size), np.uint8)
        np.bitwise_xor(old, difference, out=new)

    def finish(self) -> None:
        self._frame.finish()


class _Overwrite:
    """u32 count, that many u32 positions, ascending, that many bytes; all little-endian.

    Positions and values are read by two decoders of the same frame, so that neither of the two
    lists is ever whole in memory. A writer that cuts positions of a tensor beyond 4 GiB to 32 bits
    (slime's does) is understood: a position below the one before it lies 4 GiB further on.
    """

    def __init__(self, positions: ZstdFrame, values: ZstdFrame, num_bytes: int, where: str) -> None:
        self._positions, self._values = positions, values
        self._num_bytes, self._where = num_bytes, where
        self._left = int.from_bytes(positions.read(4), "little")
        if self._left > num_bytes:
            raise FormatError(
                f"{where}: {self._left} positions, the tensor has {num_bytes} bytes: the version "
                "is of another checkpoint, or damaged; publish it again"
            )
        reason = f"its {self._left} positions need {4 + 5 * self._left}"
        _check_content(values, 4 + 5 * self._left, reason, where)
        values.skip(4 + 4 * self._left)
        self._last = -1
        self._at: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._bytes = np.empty(0, np.uint8)

    def apply(self, old: U8, new: U8, start: int) -> None:
        new[:] = old
        end = start + new.size
        while self._at.size or self._left:
            if not self._at.size:
                self._load()
            count = int(np.searchsorted(self._at, end))
            new[self._at[:count] - start] = self._bytes[:count]
            self._at, self._bytes = self._at[count:], self._bytes[count:]
            if self._at.size:
                return

    def finish(self) -> None:
        self._values.finish()

    def _load(self) -> None:
        count = min(_CHUNK, self._left)
        raw = np.frombuffer(self._positions.read(4 * count), "<u4")
        self._bytes = np.frombuffer(self._values.read(count), np.uint8)
        self._left -= count
        low = np.concatenate([[self._last % 2**32 if self._last >= 0 else -1], raw])
        num_wraps = np.cumsum(low[1:] <= low[:-1])
        base = max(self._last, 0) >> 32
        self._at = raw.astype(np.int64) + ((num_wraps + base) << 32)
        self._last = int(self._at[-1])
        if self._last >= self._num_bytes:
            first = int(self._at[np.searchsorted(self._at, self._num_bytes)])
            raise FormatError(
                f"{self._where}: position {first % 2**32} is not above the one before it, or not "
                f"below the tensor's {self._num_bytes} bytes: damaged, or of another checkpoint; "
                "publish this version again"
            )


def _check_content(frame: ZstdFrame, expected: int, reason: str, where: str) -> None:
    if frame.content_bytes not in (None, expected):
        raise FormatError(
            f"{where}: {frame.content_bytes} bytes of content, but {reason}: the version is of "
            "another checkpoint, or damaged; publish it again"
        )
