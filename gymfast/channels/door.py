"""Where callers come in: an address that is bound once, and handshakes that cannot crowd it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable

from gymfast.channels.handshake import Caller, greet
from gymfast.errors import ChannelError

HANDSHAKE_S = 10.0
MAX_CALLERS = 128  # whose handshake has not ended: one more, and the oldest has to go
_LEAST_S = 0.1  # that a caller has in any case
_LOOK_S = 0.1
_WARNING_PERIOD_S = 1.0
_ADVICE = {
    errno.EADDRINUSE: "take another port, or 0 for any",
    errno.EADDRNOTAVAIL: "take an address of this host",
}
_log = logging.getLogger(__name__)


def is_wildcard(host: str) -> bool:
    """Whether it means every address of a host, so that nobody can connect to it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        with contextlib.suppress(OSError):  # no short form of an IPv4 address either
            return socket.inet_aton(host) == bytes(4)
        return not host
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_unspecified


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free.

    Raises ValueError for a port out of range, ChannelError if the address cannot be had.
    """
    if not 0 <= port < 1 << 16:
        raise ValueError(f"port is {port}, expected 0 to {(1 << 16) - 1}")
    try:
        flags = socket.AI_PASSIVE
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
        families = {family for family, *_ in found}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, UnicodeError) as error:  # a name that no resolver takes
        advice = _ADVICE.get(getattr(error, "errno", None) or 0)
        words = f"cannot listen at {host} port {port}: {error}"
        raise ChannelError(f"{words}: {advice}" if advice else words) from error


class Door:
    """Greets whoever calls at a listener, side by side; the one who waits longest makes room.

    So callers that say nothing keep nobody out: a handshake takes a few milliseconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        group: str,
        key: bytes | None,
        let_in: Callable[[Caller, float], None],
    ) -> None:
        """`let_in` welcomes or refuses a caller that has the key, until a deadline."""
        self._listener, self._group, self._key, self._let_in = listener, group, key, let_in
        self._callers: dict[socket.socket, float] = {}  # since when; the oldest first
        self._lock = threading.Lock()
        self._is_shut = threading.Event()
        self.on_refusal: Callable[[str], None] | None = None
        """Told, in words, of each caller that was refused; from another thread."""
        self._next_warning_s = 0.0
        listener.settimeout(_LOOK_S)
        self._thread = threading.Thread(target=self._accept, name="gymfast-door", daemon=True)

    def open(self) -> None:
        """Begins to let callers in."""
        self._thread.start()

    def shut(self) -> None:
        """Lets nobody in any more, from any thread; the listener is closed soon."""
        self._is_shut.set()

    def join(self) -> None:
        """Waits until the listener is closed."""
        self._thread.join()

    def _accept(self) -> None:
        with self._listener:
            while not self._is_shut.is_set():
                try:
                    sock, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # the caller is gone, or there are too many open files
                    _log.warning("a caller could not be let in: %s", error)
                    self._drop_oldest()
                    self._is_shut.wait(_LOOK_S)
                    continue
                self._make_room()
                with self._lock:
                    self._callers[sock] = time.monotonic()
                threading.Thread(target=self._greet, args=(sock,), daemon=True).start()
        while self._callers:
            self._drop_oldest()

    def _make_room(self) -> None:
        while len(self._callers) >= MAX_CALLERS and not self._is_shut.is_set():
            oldest_s = next(iter(self._callers.values()), 0.0)
            if time.monotonic() - oldest_s > _LEAST_S:
                self._drop_oldest()
            else:
                self._is_shut.wait(_LEAST_S / 10)

    def _drop_oldest(self) -> None:
        with self._lock:
            sock = next(iter(self._callers), None)
            if sock is not None:
                del self._callers[sock]
                _hang_up(sock)

    def _greet(self, sock: socket.socket) -> None:
        deadline_s = time.monotonic() + HANDSHAKE_S
        try:
            caller = greet(sock, self._group, self._key, deadline_s)
            with self._lock:
                self._callers.pop(sock, None)  # from here on it is not dropped for another
            self._let_in(caller, deadline_s)
        except (ChannelError, OSError) as error:
            with self._lock:
                self._callers.pop(sock, None)
            sock.close()
            self._tell(str(error))

    def _tell(self, words: str) -> None:
        """Whoever calls again and again does not fill the log."""
        is_due = time.monotonic() >= self._next_warning_s
        _log.log(logging.WARNING if is_due else logging.DEBUG, "a caller was refused: %s", words)
        if is_due:
            self._next_warning_s = time.monotonic() + _WARNING_PERIOD_S
        if self.on_refusal is not None:
            self.on_refusal(words)


def _hang_up(sock: socket.socket) -> None:
    """Ends a line that another thread reads; that one closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
