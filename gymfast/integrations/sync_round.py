"""One sync between a trainer and its readers, over TCP: all of them take the version, or none.

A reader that fails or goes away is an error at the trainer and at every other reader, before any
of them touches its engine.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import msgspec

from gymfast.errors import ChainError, ChannelError, DeadlineError, FormatError, GymfastError

_MAX_MESSAGE_BYTES = 2**16
_MAX_FAILURE_CHARS = 2000
_ADMIT_S = 60.0
"""Members connect before the round begins: how long one that is alive may take to say so."""
_Step = Callable[["_Line"], object]


class Ticket(msgspec.Struct, frozen=True):
    """Where the leader of a round listens, and what a member has to say there."""

    host: str
    port: int
    token: str


class _Message(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    token: str = ""
    rank: int = -1
    version: int = -1
    failure: str = ""


class _Line:
    """A connection to `who` that carries messages, each a line of JSON."""

    def __init__(self, connection: socket.socket, who: str) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")
        self.who = who

    def send(self, message: _Message) -> None:
        """Raises ChannelError if the other side is gone."""
        try:
            self._socket.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as error:
            raise ChannelError(f"{self.who} is gone: {error}") from error

    def receive(self, end_s: float) -> _Message:
        """The next message; ChannelError if the other side is gone, DeadlineError, FormatError."""
        self._socket.settimeout(max(0.001, end_s - time.monotonic()))
        try:
            line = self._file.readline(_MAX_MESSAGE_BYTES)
        except TimeoutError as error:
            raise DeadlineError(f"{self.who} did not answer in time") from error
        except OSError as error:
            raise ChannelError(f"{self.who} is gone: {error}") from error
        if not line.endswith(b"\n"):
            raise ChannelError(f"{self.who} is gone: the connection ended")
        try:
            return msgspec.json.decode(line, type=_Message)
        except msgspec.DecodeError as error:
            raise FormatError(f"{self.who} sent {line[:80]!r}, no message: {error}") from error

    def require_success(self, end_s: float) -> _Message:
        """The next message; raises ChainError if it is of a failure, and as `receive`."""
        message = self.receive(end_s)
        if message.failure:
            raise ChainError(message.failure)
        return message

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class RoundLeader:
    """The trainer's side. Not thread-safe."""

    def __init__(self, host: str) -> None:
        """Listens on a free port of that address of this machine; members may connect at once."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self.ticket = Ticket(host, self._socket.getsockname()[1], secrets.token_hex(16))
        self._lines: dict[int, _Line] = {}
        self._failures: dict[int, str] = {}

    def settle(self, version: int, num_members: int, timeout_s: float) -> None:
        """Returns once all members hold the version and were told to use it; ends the round.

        Raises ChainError that names the members which failed. Then the others were told so, unless
        it says that they use the version: one went away after all had answered.
        """
        end_s = time.monotonic() + timeout_s
        with closing(self):
            self._admit(num_members)
            self._each(lambda line: line.send(_Message(version=version)))
            self._each(lambda line: line.require_success(end_s))
            verdict, outcome = _Message(version=version), "is in use, but not by all"
            if self._failures:
                verdict = _Message(failure=f"version {version} was called off: {self._failed}")
                outcome = "is in the run, but not in use"
            self._each(lambda line: line.send(verdict))
            if self._failures:
                raise ChainError(
                    f"version {version} {outcome}: {self._failed}; the next sync goes on from there"
                )

    def call_off(self, reason: str, num_members: int) -> None:
        """Tells all members that no version comes; ends the round."""
        with closing(self):
            self._admit(num_members)
            self._each(lambda line: line.send(_Message(failure=_cut(reason))))

    def close(self) -> None:
        """Ends the round: a member that still waits gets an error."""
        self._socket.close()
        for line in self._lines.values():
            line.close()
        self._lines = {}

    @property
    def _failed(self) -> str:
        return "; ".join(f"reader {r}: {t}" for r, t in sorted(self._failures.items()))

    def _admit(self, num_members: int) -> None:
        """Takes a line of each member; whoever connects and says nothing holds nobody up."""
        end_s = time.monotonic() + _ADMIT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while missing := set(range(num_members)) - self._lines.keys():
                left_s = end_s - time.monotonic()
                ready = selector.select(left_s) if left_s > 0 else []
                if not ready:
                    self._failures |= dict.fromkeys(missing, "it did not connect in time")
                    break
                for key, _ in ready:
                    if key.fileobj is self._socket:
                        connection, (address, *_) = self._socket.accept()
                        line = _Line(connection, f"the process at {address}")
                        selector.register(connection, selectors.EVENT_READ, line)
                    else:
                        selector.unregister(key.fileobj)
                        self._take_hello(key.data, end_s, missing)
            for key in selector.get_map().values():
                if key.data is not None:
                    key.data.close()

    def _take_hello(self, line: _Line, end_s: float, missing: set[int]) -> None:
        try:
            hello = line.receive(min(end_s, time.monotonic() + 5.0))
        except GymfastError:  # somebody else, or a member that is gone: then it is missing
            line.close()
            return
        is_ours = secrets.compare_digest(hello.token.encode(), self.ticket.token.encode())
        if not is_ours or hello.rank not in missing or hello.rank in self._lines:
            line.close()
            return
        self._lines[hello.rank] = line

    def _each(self, step: _Step) -> None:
        for rank, line in list(self._lines.items()):
            try:
                step(line)
            except GymfastError as error:
                self._failures[rank] = str(error)
                self._lines.pop(rank).close()


class RoundMember:
    """A reader's side. Not thread-safe."""

    def __init__(self, ticket: Ticket, rank: int, timeout_s: float) -> None:
        """Connects; raises ChannelError if nobody listens there."""
        where = f"the trainer at {ticket.host} port {ticket.port}"
        try:
            connection = socket.create_connection((ticket.host, ticket.port), timeout_s)
        except OSError as error:
            raise ChannelError(
                f"{where} cannot be reached: {error}; trainer and rollout workers have to reach "
                "each other over the network"
            ) from error
        self._line = _Line(connection, where)
        self._line.send(_Message(token=ticket.token, rank=rank))

    @contextmanager
    def taking(self, timeout_s: float) -> Iterator[int]:
        """The version to take; left once every member took it, or with an error at all of them.

        `timeout_s` bounds the wait for the version, and then the wait for the other members.
        Raises ChainError if the trainer or another member failed, ChannelError, DeadlineError.
        """
        version = self._line.require_success(time.monotonic() + timeout_s).version
        try:
            yield version
        except BaseException as error:
            with suppress(ChannelError):
                self._line.send(_Message(failure=_cut(f"{type(error).__name__}: {error}")))
            raise
        self._line.send(_Message(version=version))
        self._line.require_success(time.monotonic() + timeout_s)

    def close(self) -> None:
        """Leaves the round."""
        self._line.close()


def _cut(text: str) -> str:
    return text[:_MAX_FAILURE_CHARS]
