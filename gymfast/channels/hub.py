"""Where the ranks of a group meet: rank 0 listens, all others call."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from gymfast.channels.control import Control
from gymfast.channels.handshake import Peer, check_key, greet, introduce
from gymfast.errors import ChannelError

_HANDSHAKE_S = 10.0
_RETRY_S = 0.05
_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104 - to refuse them
_log = logging.getLogger(__name__)


class Hub:
    """Where a group meets: rank 0 listens, at a port that is bound once, until it closes.

    A rank that lost its line may come again; whoever comes takes part from the next formation on.
    """

    def __init__(
        self,
        *,
        group: str = "weights",
        host: str = "127.0.0.1",
        port: int = 0,
        key: bytes | None = None,
    ) -> None:
        """Listens. Raises ValueError for an address that other hosts reach without a key.

        Raises ChannelError if the address cannot be had.
        """
        check_key(key, host)
        self._group, self._key = group, key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = socket.create_server((host, port), family=family, backlog=256)
        except OSError as error:
            raise ChannelError(f"cannot listen at {host} port {port}: {error}") from error
        self._server.settimeout(0.1)
        self.control = Control(0)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="gymfast-hub", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port."""
        return int(self._server.getsockname()[1])

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that other ranks connect to.

        Raises ValueError for a wildcard, which is no address.
        """
        host = str(self._server.getsockname()[0])
        if host in _WILDCARDS:
            raise ValueError(
                f"{host} is every address of this host and none to connect to: advertise the "
                f"name of the host and port {self.port}"
            )
        return host, self.port

    def close(self) -> None:
        """Listens no more and closes the control plane."""
        self._is_closed.set()
        self._thread.join()
        self._server.close()
        self.control.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            with contextlib.suppress(TimeoutError):
                sock, _ = self._server.accept()
                threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            peer = greet(sock, self._group, self._key, time.monotonic() + _HANDSHAKE_S)
        except ChannelError as error:
            _log.warning("a caller was refused: %s", error)
            sock.close()
            return
        if peer.rank < 1 or not self.control.add(peer.rank, sock):
            _log.warning("a second rank %d was refused: the first is there", peer.rank)
            sock.close()


def connect(
    address: tuple[str, int],
    rank: int,
    *,
    group: str = "weights",
    key: bytes | None = None,
    timeout_s: float = 60.0,
) -> Control:
    """The control plane of any rank but 0; rank 0 may begin to listen later.

    Raises ValueError for rank 0 or a wildcard address, ChannelError if nobody listens until the
    deadline or the other side refuses.
    """
    host = address[0]
    if rank < 1:
        raise ValueError(f"rank is {rank}, expected 1 or more: rank 0 makes a Hub")
    if host in _WILDCARDS:
        raise ValueError(f"{host!r} is no address to connect to: name the host of rank 0")
    deadline_s = time.monotonic() + timeout_s
    sock = _reach(address, deadline_s, f"rank 0 was not there within {timeout_s:g} s")
    try:
        introduce(sock, group, key, Peer(rank, 0), min(deadline_s, time.monotonic() + _HANDSHAKE_S))
    except BaseException:
        sock.close()
        raise
    control = Control(rank)
    control.add(0, sock)
    return control


def _reach(address: tuple[str, int], deadline_s: float, what: str) -> socket.socket:
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            return socket.create_connection(address, max(left_s, 0.001))
        except OSError as error:
            if left_s <= _RETRY_S:
                host, port = address
                raise ChannelError(f"{what}: {host} port {port}: {error}", (0,)) from error
            time.sleep(_RETRY_S)
