"""What a transfer does with memory: the CPU's, as NumPy arrays of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gymfast._core import check64
from gymfast.buckets import Piece
from gymfast.channels.base import Memory


class HostMemory:
    """Allocates, copies and digests flat bytes in CPU memory."""

    def empty(self, num_bytes: int) -> Memory:
        """Memory that holds anything."""
        return np.empty(num_bytes, np.uint8)

    def pack(self, bucket: Memory, piece: Piece, tensor: Memory) -> None:
        """Copies a piece of a tensor to its bucket."""
        _in_bucket(bucket, piece)[:] = _in_tensor(tensor, piece)

    def unpack(self, bucket: Memory, piece: Piece, tensor: Memory) -> None:
        """Copies a piece from its bucket to its tensor."""
        _in_tensor(tensor, piece)[:] = _in_bucket(bucket, piece)

    def digest(self, memory: Memory, pieces: Sequence[Piece]) -> int:
        """64 bits that change with any byte of the pieces; padding between them does not count."""
        return check64(*(_in_bucket(memory, piece).data for piece in pieces))


def _in_bucket(bucket: Memory, piece: Piece) -> Memory:
    return bucket[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]


def _in_tensor(tensor: Memory, piece: Piece) -> Memory:
    return tensor[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
