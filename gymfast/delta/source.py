"""Where the bytes of a frame come from: memory, or a file that is read in pieces."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol

from gymfast.delta.files import open_regular, os_errors, read_into
from gymfast.errors import ChecksumError

Body = memoryview | Callable[[], memoryview]
Check64 = Callable[..., int]
_SECTION_CHECK = 22
_BAD_AUTHENTICATION = 64
_CHECKED_BYTES = 8  # of a section header: those before its check
_HEADER_BYTES = 16


class Source(Protocol):
    """The bytes of one frame."""

    @property
    def num_bytes(self) -> int:
        """Size of the frame."""

    def read(self, start: int, end: int) -> memoryview:
        """The bytes from an offset to another one, both within the frame."""

    def body(self, header: bytes, section: int, start: int, end: int, /) -> Body:
        """What gives the bytes of a section from start to its end, now or on demand.

        `header` is the header of the section, which begins at `section` and ends at `end`.
        """


class MemorySource:
    """A frame in memory: everything is a slice of it."""

    def __init__(self, view: memoryview) -> None:
        """A source over bytes that stay unchanged."""
        self._view = view
        self.num_bytes = len(view)

    def read(self, start: int, end: int) -> memoryview:
        """A slice."""
        return self._view[start:end]

    def body(self, _header: bytes, _section: int, start: int, end: int, /) -> Body:
        """A slice."""
        return self._view[start:end]


class FileSource:
    """A frame in a file, of which one piece is kept; every section is read when it is needed.

    Section bodies are checked each time they are read. With `pins` a piece that differs from what
    it was when it was first read is an error, so that a tag that was checked goes on to count; 32
    bytes are kept for each piece. Not thread-safe.
    """

    PIECE_BYTES = 2**20

    def __init__(self, path: Path, check64: Check64, *, pins: bool = False) -> None:
        """Opens the file; raises NotFoundError, GymfastError, FormatError if it is no file."""
        self._path = path
        self._check64 = check64
        self._pins: dict[int, bytes] | None = {} if pins else None
        self._piece_number = -1
        self._piece = memoryview(b"")
        with os_errors("read", path):
            self._fd = open_regular(path)
            self.num_bytes = os.fstat(self._fd).st_size

    def read(self, start: int, end: int) -> memoryview:
        """Fresh memory, or part of the piece that is kept.

        Raises FormatError if the file became shorter, ChecksumError if it changed under a pin.
        """
        first, last = start // self.PIECE_BYTES, max(start, end - 1) // self.PIECE_BYTES
        if first == last:
            at = start - first * self.PIECE_BYTES
            return self._load(first)[at : at + end - start]
        out = memoryview(bytearray(end - start))
        for number in range(first, last + 1):
            at = number * self.PIECE_BYTES
            part = self._load(number)[max(0, start - at) : max(0, end - at)]
            to = max(start, at) - start
            out[to : to + len(part)] = part
        return out

    def body(self, header: bytes, section: int, start: int, end: int, /) -> Body:
        """A function that reads them; it raises ChecksumError if they are other ones then."""

        def load() -> memoryview:
            whole = self.read(section + _HEADER_BYTES, end)
            check = int.from_bytes(header[_CHECKED_BYTES:], "little")
            if self._check64(header[:_CHECKED_BYTES], whole) != check:
                raise ChecksumError(
                    f"{self._path}: the section at byte {section} is not what it was: the file "
                    "was changed while it was read; copy the frame again",
                    _SECTION_CHECK,
                )
            return whole[start - section - _HEADER_BYTES :]

        return load

    def close(self) -> None:
        """Closes the file; raises GymfastError for what the system says."""
        with os_errors("close", self._path):
            os.close(self._fd)

    def __enter__(self) -> FileSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _load(self, number: int) -> memoryview:
        if number != self._piece_number:
            start = number * self.PIECE_BYTES
            data = bytearray(max(0, min(self.PIECE_BYTES, self.num_bytes - start)))
            with os_errors("read", self._path):
                read_into(self._fd, memoryview(data), start, self._path)
            self._check_pin(number, data)
            self._piece_number, self._piece = number, memoryview(data).toreadonly()
        return self._piece

    def _check_pin(self, number: int, data: bytearray) -> None:
        if self._pins is None:
            return
        digest = hashlib.sha256(data).digest()
        if self._pins.setdefault(number, digest) != digest:
            raise ChecksumError(
                f"{self._path}: bytes {number * self.PIECE_BYTES} and on are not what they were "
                "when the tag was checked: the file was changed while it was read; nothing of the "
                "changed bytes was used",
                _BAD_AUTHENTICATION,
            )
