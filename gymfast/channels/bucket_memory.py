"""What a transfer needs of memory, wherever it lies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, SupportsInt

from gymfast.buckets import Piece
from gymfast.channels.base import Arena, Memory


class BucketMemory(Protocol):
    """Allocates, copies and digests flat bytes; copies may be under way when a call returns."""

    digest_name: str
    """All ranks of a transfer have the same."""

    def in_use(self) -> AbstractContextManager[None]:
        """What a transfer runs in; at its end all copies count as done for the caller."""

    def empty(self, num_bytes: int) -> Memory:
        """Memory that holds anything."""

    def of_arena(self, arena: Arena) -> Memory | None:
        """Memory of a channel as this one sees it; None if it does not reach it."""

    def pack(
        self, bucket: Memory, pieces: Sequence[Piece], tensors: Sequence[Memory]
    ) -> SupportsInt:
        """Copies pieces, each of the tensor beside it, to their bucket; their digest."""

    def unpack(
        self, bucket: Memory, pieces: Sequence[Piece], tensors: Sequence[Memory]
    ) -> SupportsInt:
        """Copies pieces from their bucket, each to the tensor beside it; their digest."""

    def digest(self, memory: Memory, pieces: Sequence[Piece]) -> SupportsInt:
        """64 bits that change with any byte of the pieces; padding between them does not count."""
