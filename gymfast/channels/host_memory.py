"""What a transfer does with memory: the CPU's, as NumPy arrays of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from gymfast._core import check64
from gymfast.buckets import Piece
from gymfast.channels.base import Arena, Memory


class HostMemory:
    """Flat bytes in CPU memory."""

    digest_name = "check64"

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def empty(self, num_bytes: int) -> Memory:
        return np.empty(num_bytes, np.uint8)

    def of_arena(self, arena: Arena) -> Memory | None:
        return np.asarray(arena) if arena.is_managed else None

    def pack(self, bucket: Memory, pieces: Sequence[Piece], tensors: Sequence[Memory]) -> int:
        for piece, tensor in zip(pieces, tensors, strict=True):
            _in_bucket(bucket, piece)[:] = _in_tensor(tensor, piece)
        return self.digest(bucket, pieces)

    def unpack(self, bucket: Memory, pieces: Sequence[Piece], tensors: Sequence[Memory]) -> int:
        found = self.digest(bucket, pieces)
        for piece, tensor in zip(pieces, tensors, strict=True):
            _in_tensor(tensor, piece)[:] = _in_bucket(bucket, piece)
        return found

    def digest(self, memory: Memory, pieces: Sequence[Piece]) -> int:
        return check64(*(_in_bucket(memory, piece).data for piece in pieces))


def _in_bucket(bucket: Memory, piece: Piece) -> Memory:
    return bucket[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]


def _in_tensor(tensor: Memory, piece: Piece) -> Memory:
    return tensor[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
