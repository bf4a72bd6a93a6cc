"""A tensor of any size in bounded memory: only the part at hand is resident."""

from __future__ import annotations

import contextlib
import mmap  # noqa: TID251  # anonymous memory: there is no file that could shrink
from collections.abc import Callable

import numpy as np

from gymfast.delta.geometry import Geometry
from gymfast.delta.memory import U8
from gymfast.errors import BudgetError

Transfer = Callable[[int, U8], None]  # offset in the tensor, and bytes to fill or to take
_STEP_BYTES = 2**23
_KEEP_BYTES = 2**25  # smaller tensors stay resident until the next one
_HUGE_BYTES = 2**21  # pages of this size make fresh memory 7 times faster than those of 4 KiB
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # has a name since Python 3.13


def block_span(geometry: Geometry, first_block: int, num_blocks: int) -> tuple[int, int]:
    """First and end byte of a range of the tensor that covers some blocks.

    For flat tensors it is exact; for tiled ones it is the rows of the tiles, whole.
    """
    per_row = geometry.blocks_per_row
    first, first_col = divmod(first_block, per_row)
    last, last_col = divmod(first_block + num_blocks - 1, per_row)
    if geometry.tile_rows == 1:
        start = first * geometry.cols + first_col * geometry.tile_cols
        end = last * geometry.cols + min((last_col + 1) * geometry.tile_cols, geometry.cols)
    else:
        start = first * geometry.tile_rows * geometry.cols
        end = min((last + 1) * geometry.tile_rows, geometry.num_rows) * geometry.cols
    return start * geometry.unit_bytes, end * geometry.unit_bytes


class Window:
    """Memory that stands for one tensor after the other, each passed from start to end.

    `data` is as large as the tensor, so that blocks keep their offsets, but it is address space
    only: `load_to` takes pages, `pass_to` gives them back. Not thread-safe.
    """

    def __init__(self, most_bytes: int) -> None:
        """Address space for tensors of up to most_bytes; BudgetError if there is not so much."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self._memory = mmap.mmap(-1, _whole_pages(most_bytes) + _HUGE_BYTES, flags)
        except (OSError, OverflowError) as error:
            raise BudgetError(
                f"a tensor of {most_bytes} bytes needs that much address space, which the system "
                f"does not give ({error}): was the frame meant for tensors of that size?"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        whole: U8 = np.frombuffer(self._memory, np.uint8)
        self._start = -int(whole.__array_interface__["data"][0]) % _HUGE_BYTES
        self._all = whole[self._start :]
        self._dirty = 0
        self.begin(0, None)

    def begin(self, num_bytes: int, read: Transfer | None) -> None:
        """Turns to a tensor that is yet to be read; None reads zeros."""
        if read is None or self._dirty > _KEEP_BYTES:
            self._give_back(0, _whole_pages(self._dirty))
            self._dirty = 0
        self.data = self._all[:num_bytes]
        self._read = read
        self._loaded = self._passed = self._given = 0

    def rewind(self) -> None:
        """Turns to the start of the same tensor again."""
        if self._given:
            self.begin(self.data.size, self._read)
        self._passed = 0

    def load_to(self, end: int) -> None:
        """Makes all bytes up to an offset those of the tensor."""
        if end <= self._loaded:
            return
        if self._read is not None:
            self._read(self._loaded, self.data[self._loaded : end])
        self._loaded = end
        self._dirty = max(self._dirty, end)

    def pass_to(self, end: int, flush: Transfer | None = None) -> None:
        """Hands the bytes up to an offset to flush, in order; they are not needed afterwards."""
        while self._passed < end:
            step_end = min(end, self._passed + _STEP_BYTES)
            self.load_to(step_end)
            if flush is not None:
                flush(self._passed, self.data[self._passed : step_end])
            self._passed = step_end
            whole = step_end // _HUGE_BYTES * _HUGE_BYTES
            if self.data.size > _KEEP_BYTES:
                self._give_back(self._given, whole)
                self._given = whole

    def _give_back(self, start: int, end: int) -> None:
        """Drops whole pages, which read as zeros afterwards."""
        if end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, self._start + start, end - start)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _HUGE_BYTES) * _HUGE_BYTES
