"""One line of the control plane: a socket that carries small messages."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

_MAX_MESSAGE_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, array_like=True, frozen=True):
    """`formation` and `number` say which collective call a value belongs to."""

    kind: Literal["alive", "formed", "value", "trouble", "left"]
    formation: int = 0
    number: int = 0
    value: Any = None


class Line:
    """A socket that carries messages, each behind its length."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.heard_s = time.monotonic()
        self._received = bytearray()
        self._sending = threading.Lock()

    def send(self, message: Message, deadline_s: float) -> None:
        """Raises OSError if it cannot be sent by the deadline."""
        body = msgspec.msgpack.encode(message)
        if len(body) > _MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has {len(body)} bytes, at most {_MAX_MESSAGE_BYTES} go")
        data = memoryview(_LENGTH.pack(len(body)) + body)
        with self._sending:
            while data:
                try:
                    data = data[self.sock.send(data) :]
                except BlockingIOError:
                    self._wait_writable(deadline_s)

    def messages(self) -> Iterator[Message]:
        """What has arrived. Raises OSError at the end of the line, ValueError for rubbish."""
        data = self.sock.recv(1 << 16)
        if not data:
            raise ConnectionResetError("it closed the line")
        self.heard_s = time.monotonic()
        self._received += data
        while len(self._received) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._received)
            if size > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {size} bytes")
            end = _LENGTH.size + size
            if len(self._received) < end:
                return
            body = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            yield msgspec.msgpack.decode(body, type=Message)

    def leave(self, deadline_s: float) -> None:
        """Tells the other side that nothing more comes; what it says from here on is not heard."""
        with contextlib.suppress(OSError):  # it may have left, or be lost, at the same time
            self.send(Message("left"), deadline_s)
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(1 << 16):  # what lies unread would become a reset at a close
                pass

    def _wait_writable(self, deadline_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.sock, selectors.EVENT_WRITE)
            if not selector.select(max(deadline_s - time.monotonic(), 0)):
                raise TimeoutError("it takes no messages")
