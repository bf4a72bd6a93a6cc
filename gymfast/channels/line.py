"""One line of the control plane: a socket that carries small messages."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

_MAX_MESSAGE_BYTES = 64 << 20
_SIZES = struct.Struct("<II")  # bytes of the message, and their CRC-32
_CHECK = struct.Struct("<I")  # the CRC-32 of both
_LOOK_S = 0.1
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
        self._unsent: deque[memoryview] = deque()
        self._sending = threading.Lock()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for the other side to take them."""
        return bool(self._unsent)

    def post(self, data: bytes) -> None:
        """Adds a packed message, and sends what goes without a wait; may be called by any thread.

        Raises OSError at the end of the line.
        """
        with self._sending:
            self._unsent.append(memoryview(data))
            self._push()

    def push(self) -> None:
        """Sends what goes without a wait. Raises OSError at the end of the line."""
        with self._sending:
            self._push()

    def beat(self) -> None:
        """Gives a sign of life without a wait: not where other bytes are, which are one too.

        Raises OSError at the end of the line.
        """
        with self._sending:
            if not self._unsent:
                self._unsent.append(memoryview(pack(Message("alive"))))
            self._push()

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

    def _push(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                rest = self._unsent[0]
                num_sent = self.sock.send(rest)
                if num_sent < len(rest):
                    self._unsent[0] = rest[num_sent:]
                else:
                    self._unsent.popleft()


def flush(lines: Mapping[int, Line], deadline_s: float) -> dict[int, OSError]:
    """Sends what was posted, side by side: a rank that takes nothing delays no other.

    Returns the ranks whose lines broke, or still have bytes unsent at the deadline.
    """
    failed: dict[int, OSError] = {}
    waiting = {rank: line for rank, line in lines.items() if line.has_unsent}
    while waiting:
        left_s = deadline_s - time.monotonic()
        _wait_for_room([line.sock for line in waiting.values()], min(left_s, _LOOK_S))
        for rank, line in list(waiting.items()):
            try:
                line.push()
                if line.has_unsent and left_s <= 0:
                    raise TimeoutError("it takes no messages")
            except OSError as error:
                failed[rank] = error
            if rank in failed or not line.has_unsent:
                del waiting[rank]
    return failed


def _wait_for_room(socks: list[socket.socket], timeout_s: float) -> None:
    with selectors.DefaultSelector() as selector, contextlib.suppress(ValueError):
        for sock in socks:
            selector.register(sock, selectors.EVENT_WRITE)  # ValueError: it was closed meanwhile
        selector.select(max(timeout_s, 0))


def pack(message: Message) -> bytes:
    """A message as a line carries it. Raises ValueError for one that is too large."""
    body = msgspec.msgpack.encode(message)
    if len(body) > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has {len(body)} bytes, at most {_MAX_MESSAGE_BYTES} go")
    sizes = _SIZES.pack(len(body), zlib.crc32(body))
    return sizes + _CHECK.pack(zlib.crc32(sizes)) + body
