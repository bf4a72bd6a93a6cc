"""One zstd frame in a file, decoded piece by piece in bounded memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol

from gymfast.delta.files import os_errors, read_into
from gymfast.errors import FormatError, MissingDependencyError

_READ_BYTES = 2**18
_HEADER_BYTES = 18  # RFC 8878: the most that a frame header takes


class Zstd(Protocol):
    """What this package uses of Python's zstd module."""

    @property
    def ZstdError(self) -> type[Exception]:  # noqa: N802 - the name in the module
        """What it raises for a damaged frame."""

    def ZstdDecompressor(self) -> Any:  # noqa: N802 - the name in the module
        """A decoder of one frame."""

    def get_frame_info(self, frame_buffer: bytes) -> Any:
        """Content size and dictionary of a frame."""


def load_zstd() -> Zstd:
    """Python's own zstd module, from 3.14 on in the standard library.

    Raises MissingDependencyError without it.
    """
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise MissingDependencyError(
            "gymfast.delta.hf_delta needs a zstd module: install gymfast[interop]"
        ) from error
    module: Zstd = zstd
    return module


class ZstdFrame:
    """The content of one zstd frame at a place of an open file, read from its start to its end."""

    def __init__(self, fd: int, start: int, num_bytes: int, path: Path, where: str) -> None:
        """Reads the header of the frame only.

        Raises FormatError if it is none, or one that needs a dictionary.
        """
        self._zstd = load_zstd()
        self._fd, self._path, self._where = fd, path, where
        self._at, self._end = start, start + num_bytes
        self._decoder = self._zstd.ZstdDecompressor()
        self.content_bytes = self._read_header(min(_HEADER_BYTES, num_bytes))

    def read(self, num_bytes: int) -> bytes | bytearray:
        """The next bytes; raises FormatError if the frame is damaged or ends."""
        data = self._decode_more(num_bytes)
        if len(data) == num_bytes:  # as good as always: no second copy
            return data
        pieces = bytearray(data)
        while len(pieces) < num_bytes:
            pieces += self._decode_more(num_bytes - len(pieces))
        return pieces

    def skip(self, num_bytes: int) -> None:
        """Passes over bytes; raises like read."""
        while num_bytes:
            num_bytes -= len(self._decode_more(min(num_bytes, _READ_BYTES)))

    def drain(self) -> int:
        """Decodes all that is left; its bytes. Raises FormatError if the frame is damaged."""
        num_bytes = 0
        while not self._decoder.eof:
            num_bytes += len(self._decode(_READ_BYTES))
        self.finish()
        return num_bytes

    def finish(self) -> None:
        """Raises FormatError if there is more content, or anything behind the frame."""
        while not self._decoder.eof:
            if self._decode(1):
                raise self._error("it has more content than the tensor takes")
        extra = self._end - self._at + len(self._decoder.unused_data)
        if extra:
            raise self._error(f"{extra} bytes follow it")

    def _decode_more(self, most: int) -> bytes:
        if most and self._decoder.eof:
            raise self._error(f"it ends {most} bytes too early")
        return self._decode(most)

    def _decode(self, most: int) -> bytes:
        data = self._next_input() if self._decoder.needs_input else b""
        try:
            piece: bytes = self._decoder.decompress(data, max_length=most)
        except self._zstd.ZstdError as error:
            raise self._error(str(error)) from error
        return piece

    def _next_input(self) -> bytes:
        count = min(_READ_BYTES, self._end - self._at)
        if count == 0:
            raise self._error("it is cut off")
        data = self._read(count)
        self._at += count
        return data

    def _read_header(self, num_bytes: int) -> int | None:
        try:
            info = self._zstd.get_frame_info(self._read(num_bytes))
        except self._zstd.ZstdError as error:
            raise self._error(str(error)) from error
        if info.dictionary_id:
            raise self._error(f"it needs dictionary {info.dictionary_id}")
        size: int | None = info.decompressed_size
        return size

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        with os_errors("read", self._path):
            read_into(self._fd, memoryview(data), self._at, self._path)
        return bytes(data)

    def _error(self, what: str) -> FormatError:
        return FormatError(
            f"{self._where}: no sound zstd frame ({what}): damaged, or written wrong; copy or "
            "publish this version again"
        )
