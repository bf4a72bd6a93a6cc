"""The bytes of a put, cut into the parts of an upload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gymfast.stores.base import Blob, chunks_of

PART_BYTES = 8 << 20


class Parts:
    """The bytes of the caller in parts; remembers the error that the caller's iterable raised."""

    def __init__(self, data: Blob | Iterable[Blob]) -> None:
        self.error: BaseException | None = None
        is_whole = isinstance(data, bytes | bytearray | memoryview)
        self._parts = _cut(chunks_of(data)) if is_whole else _gather(chunks_of(data))

    def __iter__(self) -> Iterator[Blob]:
        return self

    def __next__(self) -> Blob:
        try:
            return next(self._parts)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise


def _cut(chunks: Iterator[memoryview]) -> Iterator[Blob]:
    """Parts that are views: nothing is copied."""
    for chunk in chunks:
        for at in range(0, chunk.nbytes, PART_BYTES):
            yield chunk[at : at + PART_BYTES]


def _gather(chunks: Iterator[memoryview]) -> Iterator[Blob]:
    """Parts that are copies: the producer may reuse its buffers."""
    buffer = bytearray()
    for chunk in chunks:
        rest = chunk
        while rest.nbytes:
            taken = rest[: PART_BYTES - len(buffer)]
            buffer += taken
            rest = rest[taken.nbytes :]
            if len(buffer) == PART_BYTES:
                yield buffer
                buffer = bytearray()
    if buffer:
        yield buffer
