"""One direction of bytes over one connection, between a rank and one that it passes on to.

Items follow each other: a header, then bytes. The receiver answers for each item that it and all
behind it have; what is not answered is sent again on a new connection. Headers and answers have a
checksum: a damaged one ends the connection. Bytes of items have none here, see BucketTransfer.
A sender that has nothing to send says so now and then; silence is a connection that is no more.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from gymfast.channels.handshake import receive_all, send_all
from gymfast.errors import ChannelError

Place = tuple[int, int]  # round and slot

_HEADER = struct.Struct("<QIQ")  # round, slot, bytes
_ANSWER = struct.Struct("<QI")  # round, slot
_FROM = struct.Struct("<Q")  # the oldest round that the receiver needs
_CHECK = struct.Struct("<I")  # CRC-32 of each of these, behind it
_GOODBYE = 2**64 - 1
_ALIVE = (_GOODBYE, 0)  # an item without bytes that wants no answer
_WAIT = 2 / 3
_BEATS = 4  # signs of life in the silence that a receiver bears
_CHUNK_BYTES = 1 << 20
_PERIOD = struct.Struct("@ll")  # seconds and microseconds


class Sink(Protocol):
    """What a receiver does with items."""

    def memory_for(self, place: Place, num_bytes: int) -> memoryview | None:
        """Where to put an item, once its round has begun; None for one that is there already.

        Raises ChannelError for another size than expected, or when the channel is closed.
        """

    def received(self, place: Place) -> None:
        """An item is complete, or came again."""


class OutPipe:
    """Sends items to one rank, over the connections that it makes one after the other."""

    def __init__(
        self,
        answered: Callable[[Place], None],
        lost: Callable[[str], None],
        *,
        grace_s: float,
        silence_s: float,
    ) -> None:
        """`answered` is told of each item, `lost` once, when the other side has gone for good.

        That is when it has no line for `grace_s`. It bears `silence_s`.
        """
        self._answered, self._lost, self._grace_s = answered, lost, grace_s
        self._beat_s = silence_s / _BEATS
        self._sent_s = time.monotonic()
        self._items: OrderedDict[Place, memoryview] = OrderedDict()
        self._unsent: OrderedDict[Place, memoryview] = OrderedDict()
        self._changed = threading.Condition()
        self._sock: socket.socket | None = None
        self._alone_since_s = time.monotonic()
        self._is_met = self._is_closed = False
        self._threads = [threading.Thread(target=self._send, name="gymfast-tcp-send", daemon=True)]
        self._threads[0].start()

    def put(self, place: Place, memory: memoryview) -> None:
        """Adds an item; its memory stays as it is until it is answered."""
        with self._changed:
            self._items[place] = self._unsent[place] = memory
            self._changed.notify_all()

    def attach(self, sock: socket.socket, deadline_s: float) -> None:
        """Goes on over a new connection. Raises ChannelError if it breaks at once."""
        (oldest,) = _unpack(_FROM, receive_all(sock, _FROM.size + _CHECK.size, deadline_s))
        sock.settimeout(None)
        with self._changed:
            if self._is_closed:
                sock.close()
                return
            self._drop()
            self._sock, self._is_met = sock, True
            done = [place for place in self._items if place[0] < oldest]
            self._unsent = OrderedDict((p, m) for p, m in self._items.items() if p[0] >= oldest)
            self._changed.notify_all()
            reader = threading.Thread(
                target=self._read, args=(sock,), name="gymfast-tcp-answers", daemon=True
            )
            self._threads = [one for one in self._threads if one.is_alive()] + [reader]
            reader.start()
        for place in done:
            self._take_answer(place)

    def close(self) -> None:
        """Ends it, from any thread; items that are not answered are forgotten."""
        with self._changed:
            self._is_closed = True
            self._drop()
            self._changed.notify_all()

    def join(self) -> None:
        """Waits for the threads, which end soon after `close`; not to be called by one of them."""
        for thread in self._threads:
            thread.join()

    def _drop(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
            self._sock = None
        self._alone_since_s = time.monotonic()

    def _send(self) -> None:
        while (job := self._next()) is not None:
            sock, place, memory = job
            self._sent_s = time.monotonic()
            try:
                header = _pack(_HEADER, *place, len(memory))
                # One call for both: a header alone would wake the other side for nothing.
                sent = sock.sendmsg([header, memory])
                if sent < len(header):
                    sock.sendall(header[sent:])
                sock.sendall(memory[max(sent - len(header), 0) :])
            except OSError:
                self._break(sock)

    def _next(self) -> tuple[socket.socket, Place, memoryview] | None:
        """What to send next, and on what; None at the end."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or (self._sock is not None and bool(self._unsent)), 0.1
                )
                if self._is_closed:
                    return None
                if self._sock is not None and self._unsent:
                    return (self._sock, *self._unsent.popitem(last=False))
                if self._sock is not None and time.monotonic() - self._sent_s > self._beat_s:
                    return self._sock, _ALIVE, memoryview(b"")
                alone_s = time.monotonic() - self._alone_since_s
                is_gone = self._sock is None and self._is_met and alone_s > self._grace_s
            if is_gone:
                self._lost(f"it did not come back within {self._grace_s:g} s")
                return None

    def _read(self, sock: socket.socket) -> None:
        """Takes the answers of one connection."""
        data = bytearray()
        while True:
            try:
                part = sock.recv(4096)
            except OSError:
                part = b""
            if not part:
                self._break(sock)
                return
            data += part
            while len(data) >= (size := _ANSWER.size + _CHECK.size):
                try:
                    number, slot = _unpack(_ANSWER, data[:size])
                except ChannelError:  # the other side answers again
                    self._break(sock)
                    return
                del data[:size]
                if number == _GOODBYE:
                    self._lost("it left")
                    return
                self._take_answer((number, slot))

    def _take_answer(self, place: Place) -> None:
        with self._changed:
            is_new = self._items.pop(place, None) is not None
            self._unsent.pop(place, None)
        if is_new:
            self._answered(place)

    def _break(self, sock: socket.socket) -> None:
        with self._changed:
            if self._sock is sock:
                self._drop()
                self._unsent = OrderedDict(self._items)
            self._changed.notify_all()


class InPipe:
    """Receives items over one connection."""

    def __init__(
        self, sock: socket.socket, oldest: int, deadline_s: float, silence_s: float
    ) -> None:
        """Asks for all items from round `oldest` on. Raises ChannelError if the line breaks.

        Silence for `silence_s` counts as a broken line.
        """
        self._sock, self._silence_s = sock, silence_s
        self._answering = threading.Lock()
        self.has_received = False
        """Whether an item came, or began to."""
        send_all(sock, _pack(_FROM, oldest), deadline_s)
        sock.settimeout(None)  # a time-out of Python's would take a call for each packet
        wait_s = _WAIT * silence_s  # the kernel begins anew after a part of an item
        period = _PERIOD.pack(int(wait_s), int(wait_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, period)

    def run(self, sink: Sink) -> None:
        """Receives items until the line ends.

        Raises EOFError when it ends between items, OSError within one, and what the sink raises;
        ChannelError for a damaged header.
        """
        header = bytearray(_HEADER.size + _CHECK.size)
        while True:
            self._fill(memoryview(header), is_start=True)
            number, slot, num_bytes = _unpack(_HEADER, header)
            if (number, slot) == _ALIVE:
                continue
            self.has_received = True
            memory = sink.memory_for((number, slot), num_bytes)
            if memory is None:
                self._skip(num_bytes)
            else:
                self._fill(memory)
            sink.received((number, slot))

    def answer(self, place: Place) -> None:
        """Says that this rank and all behind it have an item; a broken line does not matter."""
        with self._answering, contextlib.suppress(OSError):
            self._sock.sendall(_pack(_ANSWER, *place))

    def leave(self) -> None:
        """Tells the other side not to wait for this one, from any thread; it then hangs up."""
        self.answer((_GOODBYE, 0))
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends the line, from any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def drain(self, deadline_s: float) -> None:
        """Reads until the other side hangs up: bytes that are not read would undo a goodbye."""
        scratch = bytearray(_CHUNK_BYTES)
        with contextlib.suppress(OSError):
            while (left_s := deadline_s - time.monotonic()) > 0:
                self._sock.settimeout(left_s)
                if not self._sock.recv_into(scratch):
                    return

    def _skip(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _CHUNK_BYTES)))
        for begin in range(0, num_bytes, _CHUNK_BYTES):
            self._fill(scratch[: num_bytes - begin])

    def _fill(self, memory: memoryview, *, is_start: bool = False) -> None:
        while memory:
            try:
                num_bytes = self._sock.recv_into(memory, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError(f"nothing came for {self._silence_s:.3g} s") from None
            if not num_bytes:
                if is_start:
                    raise EOFError
                raise ConnectionResetError("the line ended within an item")
            memory = memory[num_bytes:]
            is_start = False


def _pack(layout: struct.Struct, *values: int) -> bytes:
    data = layout.pack(*values)
    return data + _CHECK.pack(zlib.crc32(data))


def _unpack(layout: struct.Struct, data: bytes | bytearray) -> tuple[int, ...]:
    """Raises ChannelError for damaged bytes."""
    body = data[: layout.size]
    if _CHECK.pack(zlib.crc32(body)) != data[layout.size :]:
        raise ChannelError("bytes came damaged: the line is made anew")
    return layout.unpack(body)
