"""Where the ranks of a group meet: rank 0 listens, all others call."""

from __future__ import annotations

import socket
import threading
import time

from gymfast.channels.control import Control
from gymfast.channels.door import HANDSHAKE_S, Door, is_wildcard, listen
from gymfast.channels.handshake import Caller, NotYetError, Peer, check_key, introduce
from gymfast.errors import ChannelError

_RETRY_S, _MAX_RETRY_S = 0.05, 0.25


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
        """Listens.

        Raises ValueError for an address that other hosts reach without a key, or a port out of
        range, ChannelError if the address cannot be had.
        """
        check_key(key, host)
        self._server = listen(host, port)
        self.control = Control(0)
        self._adding = threading.Lock()
        self._door = Door(self._server, group, key, self._let_in)
        self._door.on_refusal = self.control.note_refusal
        self._door.open()

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
        if is_wildcard(host):
            raise ValueError(
                f"{host} is every address of this host and none to connect to: advertise the "
                f"name of the host and port {self.port}"
            )
        return host, self.port

    def close(self) -> None:
        """Listens no more and closes the control plane."""
        self._door.shut()
        self._door.join()
        self.control.close()

    def _let_in(self, caller: Caller, deadline_s: float) -> None:
        rank = caller.peer.rank
        if rank < 1:
            raise caller.refuse(f"says that it is rank {rank}, as this one is", deadline_s)
        with self._adding:
            if self.control.has(rank):
                words = f"says that it is rank {rank}, which is here already: it was refused"
                raise caller.refuse(words, deadline_s, is_taken=True)
            caller.welcome(deadline_s)
            if not self.control.add(rank, caller.sock):
                raise ChannelError("rank 0 is closed")


def connect(
    address: tuple[str, int],
    rank: int,
    *,
    group: str = "weights",
    key: bytes | None = None,
    timeout_s: float = 60.0,
) -> Control:
    """The control plane of any rank but 0; rank 0 may begin to listen later.

    A call that breaks off is made again, and so is that of a rank which rank 0 still thinks is
    there: it may have died a moment ago.
    Raises ValueError for rank 0, a wildcard address or a port out of range, ChannelError if nobody
    takes the call until the deadline or the other side refuses.
    """
    host, port = address
    if rank < 1:
        raise ValueError(f"rank is {rank}, expected 1 or more: rank 0 makes a Hub")
    if is_wildcard(host):
        raise ValueError(f"{host!r} is no address to connect to: name the host of rank 0")
    if not 0 < port < 1 << 16:
        raise ValueError(f"port is {port}, expected 1 to {(1 << 16) - 1}")
    deadline_s, pause_s = time.monotonic() + timeout_s, _RETRY_S
    why: Exception | None = None
    while True:
        try:
            sock = _call(address, group, key, rank, deadline_s)
            break
        except (OSError, UnicodeError, NotYetError) as error:
            left_s = deadline_s - time.monotonic()
            why = error if why is None or left_s > 0 else why  # the last call may be cut short
            if left_s <= pause_s:
                words = f"rank 0 was not there within {timeout_s:g} s: {host} port {port}: {why}"
                raise ChannelError(words, (0,)) from why
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _MAX_RETRY_S)
    control = Control(rank)
    control.add(0, sock)
    return control


def _call(
    address: tuple[str, int], group: str, key: bytes | None, rank: int, deadline_s: float
) -> socket.socket:
    sock = socket.create_connection(address, max(deadline_s - time.monotonic(), 0.001))
    try:
        until_s = min(deadline_s, time.monotonic() + HANDSHAKE_S)
        introduce(sock, group, key, Peer(rank, 0), until_s)
    except BaseException:
        sock.close()
        raise
    return sock
