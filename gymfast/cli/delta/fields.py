"""Reading bytes as named fields with offsets: what `gymfast delta inspect --bytes` is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gymfast.delta.source import Source
from gymfast.errors import FormatError

_TRUNCATED = 20
_BAD_ENCODING = 25
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True)
class Field:
    """`data` at `offset` of the frame, and what it means."""

    offset: int
    data: bytes
    name: str
    value: str


class FieldReader:
    """Reads fields one after the other and keeps them until `drain`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.position = 0
        self._fields: list[Field] = []

    def take(self, size: int, name: str, describe: Callable[[bytes], str] = bytes.hex) -> bytes:
        """The next `size` bytes, noted with the text that `describe` makes of them.

        Raises FormatError if there are fewer.
        """
        left = self._source.num_bytes - self.position
        if left < size:
            raise FormatError(
                f"offset {self.position}: {name} has {size} bytes, only {left} follow: "
                "the frame is cut, or a length before this is damaged",
                _TRUNCATED,
            )
        chunk = bytes(self._source.read(self.position, self.position + size))
        self._fields.append(Field(self.position, chunk, name, describe(chunk)))
        self.position += size
        return chunk

    def number(self, size: int, name: str, describe: Callable[[int], str] = str) -> int:
        """The next `size` bytes as an unsigned number."""
        chunk = self.take(size, name, lambda chunk: describe(int.from_bytes(chunk, "little")))
        return int.from_bytes(chunk, "little")

    def varint(self, name: str, describe: Callable[[int], str] = str) -> int:
        """The next varint; FormatError if it is longer than 10 bytes."""
        size = 1
        while size <= _MAX_VARINT_BYTES and self._is_continued(self.position + size - 1):
            size += 1
        if size > _MAX_VARINT_BYTES:
            where = f"offset {self.position}: {name}"
            raise FormatError(f"{where} is a varint of more than 10 bytes", _BAD_ENCODING)
        return _decode(self.take(size, name, lambda chunk: describe(_decode(chunk))))

    def text(self, name: str) -> str:
        """The next varint n and n bytes of UTF-8 (quoted; damaged bytes are escaped)."""
        size = self.varint(f"len({name})")
        chunk = self.take(size, name, lambda chunk: repr(chunk.decode(errors="backslashreplace")))
        return chunk.decode(errors="backslashreplace")

    def counted(self, size: int, name: str) -> None:
        """`size` bytes of which only the number is told; no field at all for 0."""
        if size:
            self.take(size, name, lambda chunk: f"{len(chunk)} bytes")

    def drain(self) -> list[Field]:
        """The fields read since the last call."""
        fields, self._fields = self._fields, []
        return fields

    def _is_continued(self, position: int) -> bool:
        if position >= self._source.num_bytes:
            return False
        return self._source.read(position, position + 1)[0] >= 128


def _decode(varint: bytes) -> int:
    return sum((byte & 127) << (7 * i) for i, byte in enumerate(varint))
