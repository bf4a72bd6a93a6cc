"""A way to an address on which everything happens that happens to connections, for tests."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass

CHUNK_BYTES = 1 << 14
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: no goodbye


@dataclass(frozen=True)
class Faults:
    """What a connection suffers, each at a random place of `period_bytes`; at most `most` times."""

    delay_s: float = 0.0
    """Of all bytes, each way."""
    late_s: float = 0.0
    """Connections come as late as this, each by another time: out of their order."""
    stall_s: float = 0.0
    """Nothing passes for so long."""
    resets: bool = False
    cuts: bool = False
    half_open: bool = False
    """Nothing passes any more, and nobody is told."""
    flips: bool = False
    """One bit of what the listener sends."""
    flips_answers: bool = False
    """One bit of what the caller sends."""
    period_bytes: int = 400_000
    most: int = 1_000_000


class BadNetwork:
    """Listens at `address` and passes on to another one, with faults."""

    def __init__(self, target: tuple[str, int], faults: Faults, seed: int = 0) -> None:
        self._target, self._faults = target, faults
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.num_faults = self.num_passed = self.num_connections = 0
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address: tuple[str, int] = self._server.getsockname()
        self._is_closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()
        _end(self._server)
        with self._lock:
            for sock in self._sockets:
                _end(sock)

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with self._lock:
                self._sockets.append(client)
                self.num_connections += 1
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self._is_closed.wait(self._random.random() * self._faults.late_s)
        try:
            upstream = socket.create_connection(self._target)
        except OSError:
            _reset(client)
            return
        with self._lock:
            self._sockets.append(upstream)
        for sock in (client, upstream):
            sock.settimeout(0.02)
        dead = threading.Event()
        for source, target in ((client, upstream), (upstream, client)):
            args = (source, target, dead, source is upstream)
            threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(
        self, source: socket.socket, target: socket.socket, dead: threading.Event, is_payload: bool
    ) -> None:
        """Passes one direction on; what breaks a line does so where the payload is."""
        faults = self._faults
        flips = faults.flips if is_payload else faults.flips_answers
        # Answers are few: a place among the first of them.
        period = faults.period_bytes if is_payload else faults.period_bytes // 1000
        left = self._random.randrange(1, period)
        with contextlib.suppress(OSError):
            while data := bytearray(self._receive(source)):
                self._is_closed.wait(faults.delay_s)
                left -= len(data)
                if left < 0 and (is_payload or flips) and self._may_fail():
                    left = self._random.randrange(1, period)
                    if faults.resets:
                        _reset(source)
                        _reset(target)
                        return
                    if faults.cuts:
                        break
                    if faults.half_open:
                        dead.set()
                    if flips:
                        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
                    time.sleep(faults.stall_s)
                if dead.is_set():
                    continue
                _send(target, data)
                if is_payload:
                    with self._lock:
                        self.num_passed += len(data)
        if not dead.is_set():
            _end(source)
            _end(target)

    def _receive(self, source: socket.socket) -> bytes:
        """Looks up now and then: a socket that is closed under a reader would send no RST."""
        while True:
            with contextlib.suppress(TimeoutError):
                return source.recv(CHUNK_BYTES)

    def _may_fail(self) -> bool:
        with self._lock:
            if self.num_faults >= self._faults.most:
                return False
            self.num_faults += 1
            return True


def _send(target: socket.socket, data: bytearray) -> None:
    rest = memoryview(data)
    while rest:
        with contextlib.suppress(TimeoutError):
            rest = rest[target.send(rest) :]


def _reset(sock: socket.socket) -> None:
    """Ends a connection with RST, soon also where a thread reads it."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.close()


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
