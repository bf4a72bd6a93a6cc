"""One line of the control plane: a socket that carries small messages."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

_MAX_MESSAGE_BYTES = 64 << 20
_SIZES = struct.Struct("<II")  # bytes of the message, and their CRC-32
_CHECK = struct.Struct("<I")  # the CRC-32 of both
_HEAD_BYTES = _SIZES.size + _CHECK.size


class Message(msgspec.Struct, array_like=True, frozen=True):
    """`formation` and `number` say which collective call a value belongs to."""

    kind: Literal["alive", "formed", "value", "trouble"]
    formation: int = 0
    number: int = 0
    value: Any = None


class Line:
    """A socket that carries messages, each behind its length and checksums."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.heard_s = time.monotonic()
        self._received = bytearray()
        self._rest = memoryview(b"")  # of a message that was begun
        self._sending = threading.Lock()

    def send(self, message: Message, deadline_s: float) -> None:
        """Raises OSError if it cannot be sent by the deadline."""
        data = pack(message)
        if not self._sending.acquire(timeout=max(deadline_s - time.monotonic(), 0)):
            raise TimeoutError("it takes no messages")
        try:
            self._push(deadline_s)
            self._rest = memoryview(data)
            self._push(deadline_s)
        finally:
            self._sending.release()

    def beat(self) -> None:
        """Gives a sign of life without a wait: not where other bytes are, which are one too.

        Raises OSError at the end of the line.
        """
        if not self._sending.acquire(blocking=False):
            return
        try:
            self._push(None)
            if not self._rest:
                self._rest = memoryview(pack(Message("alive")))
                self._push(None)
        finally:
            self._sending.release()

    def messages(self) -> Iterator[Message]:
        """What has arrived. Raises OSError at the end of the line, ValueError for rubbish."""
        data = self.sock.recv(1 << 16)
        if not data:
            raise ConnectionResetError("it closed the line")
        self.heard_s = time.monotonic()
        self._received += data
        while len(self._received) >= _HEAD_BYTES:
            size, check = _SIZES.unpack_from(self._received)
            if (zlib.crc32(self._received[: _SIZES.size]),) != _CHECK.unpack_from(
                self._received, _SIZES.size
            ):
                raise ValueError("bytes of its line came damaged, or are no messages")
            if size > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {size} bytes, at most {_MAX_MESSAGE_BYTES} go")
            end = _HEAD_BYTES + size
            if len(self._received) < end:
                return
            body = bytes(self._received[_HEAD_BYTES:end])
            del self._received[:end]
            if zlib.crc32(body) != check:
                raise ValueError(f"a message of {size} bytes came damaged")
            yield msgspec.msgpack.decode(body, type=Message)

    def _push(self, deadline_s: float | None) -> None:
        """Sends what is left of a message; without a deadline, as much as goes at once."""
        while self._rest:
            try:
                self._rest = self._rest[self.sock.send(self._rest) :]
            except BlockingIOError:
                if deadline_s is None:
                    return
                self._wait_writable(deadline_s)

    def _wait_writable(self, deadline_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.sock, selectors.EVENT_WRITE)
            if not selector.select(max(deadline_s - time.monotonic(), 0)):
                raise TimeoutError("it takes no messages")


def pack(message: Message) -> bytes:
    """A message as a line carries it. Raises ValueError for one that is too large."""
    body = msgspec.msgpack.encode(message)
    if len(body) > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has {len(body)} bytes, at most {_MAX_MESSAGE_BYTES} go")
    sizes = _SIZES.pack(len(body), zlib.crc32(body))
    return sizes + _CHECK.pack(zlib.crc32(sizes)) + body
