"""Pieces of a bucket moved and summed by one kernel of gymfast._cuda."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, SupportsInt

import numpy as np

from gymfast.buckets import Piece
from gymfast.channels.base import Memory

_MOST_TABLES = 4096  # some KiB each
_SUMS = 1024  # digests that are cleared in one go


def kernels_of(device_type: str) -> ModuleType | None:
    """gymfast._cuda for tensors of such a device, where it is built."""
    if device_type != "cuda":
        return None
    try:
        return import_module("gymfast._cuda")
    except ImportError:
        return None


class PieceKernels:
    """The kernel on torch tensors of bytes, on the stream that is current.

    A bucket is one launch. Its table of pieces goes to the device the first time: tensors that stay
    where they are need no other one.
    """

    def __init__(self, module: Any, torch: Any, device: Any, stream: Callable[[], int]) -> None:
        self._module, self._torch, self._device, self._stream = module, torch, device, stream
        self._tables: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self._sums: Any = None
        self._num_sums = _SUMS

    def move(
        self, bucket: Memory, pieces: Sequence[Piece], tensors: Sequence[Memory], is_packing: bool
    ) -> SupportsInt:
        """Copies pieces into the bucket or out of it, each of the tensor beside it; their digest.

        Without tensors the bucket is summed alone. Raises ValueError, before anything is copied,
        for memory that the kernel cannot work on.
        """
        table, num_tiles = self._table(bucket, pieces, tensors, is_packing)
        total = self._next_sum()
        self._module.move_pieces(bucket, table, num_tiles, is_packing, total, self._stream())
        value: SupportsInt = total
        return value

    def _table(
        self, bucket: Memory, pieces: Sequence[Piece], tensors: Sequence[Memory], is_packing: bool
    ) -> tuple[Any, int]:
        places = tuple((p.tensor_offset, p.bucket_offset, p.num_bytes) for p in pieces)
        # All that was checked when the table was made, and all that it holds.
        memory = tuple((t.data_ptr(), t.numel(), t.is_contiguous()) for t in tensors)
        key = (bucket.numel(), places, memory, is_packing)
        if (found := self._tables.pop(key, None)) is None:
            rows = np.empty((len(pieces), 5), np.uint64)
            arguments = (bucket, list(tensors), list(places), is_packing, rows)
            num_tiles = int(self._module.fill_pieces(*arguments))
            found = self._to_device(rows), num_tiles
        self._tables[key] = found  # the newest is the last
        if len(self._tables) > _MOST_TABLES:
            self._tables.popitem(last=False)
        return found

    def _to_device(self, rows: Any) -> Any:
        host = self._torch.from_numpy(rows.view(np.int64))
        if self._device.type != "cuda":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)

    def _next_sum(self) -> Any:
        """A number on the device that is 0 and that nobody else has."""
        if self._num_sums == _SUMS:
            self._sums = self._torch.zeros(_SUMS, dtype=self._torch.int64, device=self._device)
            self._num_sums = 0
        self._num_sums += 1
        return self._sums[self._num_sums - 1 : self._num_sums]
