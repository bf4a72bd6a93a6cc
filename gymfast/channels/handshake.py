"""Who is at the other end of a socket: a challenge both ways, with a key that both hold."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import struct
import time
from dataclasses import dataclass

from gymfast.errors import ChannelError

_MAGIC = b"gymfast channel 2\n"
_FAMILY = b"gymfast channel "
_NONCE_BYTES = 32
_TAG_BYTES = 32
_MIN_KEY_BYTES = 16
_HELLO = struct.Struct(f"<{len(_MAGIC)}s{_NONCE_BYTES}s?")
_NUMBERS = struct.Struct("<II")  # rank, line
_ANSWER = struct.Struct(f"<{len(_MAGIC)}s{_NONCE_BYTES}s32sII{_TAG_BYTES}s")
_WRONG_KEY, _WRONG_GROUP, _WELCOME, _TAKEN, _UNKNOWN = range(5)  # what the listener says
_NO_PROOF = bytes(_TAG_BYTES)


class NotYetError(ChannelError):
    """The call was not taken, but may be later: the line broke, or the rank has another one."""


@dataclass(frozen=True)
class Peer:
    """What a caller says of itself: its rank and the number of its line."""

    rank: int
    line: int


@dataclass(frozen=True)
class Caller:
    """A peer that has the key and waits for an answer. One of the methods is called, once."""

    peer: Peer
    sock: socket.socket
    _proof: bytes

    def welcome(self, deadline_s: float) -> None:
        """Proves the key in turn. Raises ChannelError if the line breaks."""
        send_all(self.sock, bytes([_WELCOME]) + self._proof, deadline_s)

    def refuse(self, words: str, deadline_s: float, *, is_taken: bool = False) -> ChannelError:
        """The error to raise here; the caller is told too, and may try again if `is_taken`."""
        send_all(self.sock, bytes([_TAKEN if is_taken else _UNKNOWN]) + _NO_PROOF, deadline_s)
        return ChannelError(f"{_name(self.sock)} {words}", (self.peer.rank,))


def check_key(key: bytes | None, host: str) -> None:
    """Raises ValueError for a short key, or for no key where other hosts reach the address."""
    if key is not None:
        if len(key) < _MIN_KEY_BYTES:
            raise ValueError(f"the key has {len(key)} bytes, expected at least {_MIN_KEY_BYTES}")
        return
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if not is_local:
        raise ValueError(
            f"{host} can be reached from other hosts: give a key, or listen on 127.0.0.1"
        )


def greet(sock: socket.socket, group: str, key: bytes | None, deadline_s: float) -> Caller:
    """Who called, once it proved the key; the side that listens.

    Raises ChannelError for another program, group or key, or an answer that does not come.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    send_all(sock, _HELLO.pack(_MAGIC, nonce, key is not None), deadline_s)
    answer = receive_all(sock, _ANSWER.size, deadline_s)
    magic, theirs, name, rank, line, tag = _ANSWER.unpack(answer)
    _check_magic(sock, magic)
    said = nonce + theirs + name + _NUMBERS.pack(rank, line)
    if not hmac.compare_digest(tag, _tag(key, b"caller", said)):
        send_all(sock, bytes([_WRONG_KEY]) + _NO_PROOF, deadline_s)
        raise ChannelError(f"{_name(sock)} (rank {rank}) has another key: it was refused", (rank,))
    if name != _group_bytes(group):
        send_all(sock, bytes([_WRONG_GROUP]) + _NO_PROOF, deadline_s)
        raise ChannelError(f"{_name(sock)} (rank {rank}) looks for another group", (rank,))
    return Caller(Peer(rank, line), sock, _tag(key, b"listener", said))


def introduce(
    sock: socket.socket, group: str, key: bytes | None, peer: Peer, deadline_s: float
) -> None:
    """Says who calls, and has the other side prove the key; the side that calls.

    Raises ChannelError as `greet` does, NotYetError if the call may be taken later.
    """
    magic, theirs, needs_key = _HELLO.unpack(receive_all(sock, _HELLO.size, deadline_s))
    _check_magic(sock, magic)
    if needs_key != (key is not None):
        asked = "asks for a key, none is given here" if needs_key else "has no key, one is given"
        raise ChannelError(f"{_name(sock)} {asked}: give both sides the same")
    nonce, name = secrets.token_bytes(_NONCE_BYTES), _group_bytes(group)
    said = theirs + nonce + name + _NUMBERS.pack(peer.rank, peer.line)
    answer = _ANSWER.pack(_MAGIC, nonce, name, peer.rank, peer.line, _tag(key, b"caller", said))
    send_all(sock, answer, deadline_s)
    verdict = receive_all(sock, 1 + _TAG_BYTES, deadline_s)
    if verdict[0] == _TAKEN:
        raise NotYetError(f"{_name(sock)} has a rank {peer.rank} already: each rank calls once")
    refusals = {
        _WRONG_KEY: "refused the key",
        _WRONG_GROUP: f"belongs to another group than {group!r}",
        _UNKNOWN: f"expects no rank {peer.rank}",
    }
    if verdict[0] in refusals:
        raise ChannelError(f"{_name(sock)} {refusals[verdict[0]]}")
    if not hmac.compare_digest(verdict[1:], _tag(key, b"listener", said)):
        raise ChannelError(f"{_name(sock)} could not prove that it has the key")


def fingerprint(key: bytes | None) -> str:
    """A few digits by which ranks find out that they were given different keys."""
    return "none" if key is None else hmac.digest(key, b"gymfast fingerprint", "sha256").hex()[:8]


def send_all(sock: socket.socket, data: bytes, deadline_s: float) -> None:
    """Raises NotYetError if the data is not sent by the deadline."""
    _set_timeout(sock, deadline_s)
    try:
        sock.sendall(data)
    except TimeoutError as error:
        raise NotYetError(f"{_name(sock)} did not answer by the deadline") from error
    except OSError as error:
        raise NotYetError(f"{_name(sock)} went away: {error}") from error


def receive_all(sock: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Exactly so many bytes. Raises NotYetError if they do not come by the deadline."""
    data = bytearray()
    while len(data) < num_bytes:
        _set_timeout(sock, deadline_s)
        try:
            part = sock.recv(num_bytes - len(data))
        except TimeoutError as error:
            raise NotYetError(f"{_name(sock)} did not answer by the deadline") from error
        except OSError as error:
            raise NotYetError(f"{_name(sock)} went away: {error}") from error
        if not part:
            raise NotYetError(
                f"{_name(sock)} closed the line after {len(data)} of {num_bytes} bytes"
            )
        data += part
    return bytes(data)


def _set_timeout(sock: socket.socket, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise NotYetError(f"{_name(sock)} did not answer by the deadline")
    sock.settimeout(left_s)


def _check_magic(sock: socket.socket, magic: bytes) -> None:
    if magic == _MAGIC:
        return
    if magic.startswith(_FAMILY):
        raise ChannelError(
            f"{_name(sock)} speaks {magic.decode(errors='replace').strip()!r}, expected "
            f"{_MAGIC.decode().strip()!r}: install the same gymfast on both"
        )
    raise ChannelError(f"{_name(sock)} does not speak the protocol of gymfast channels")


def _name(sock: socket.socket) -> str:
    try:
        host, port, *_ = sock.getpeername()
    except OSError:
        return "the peer"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _group_bytes(group: str) -> bytes:
    return hmac.digest(b"gymfast group", group.encode(), "sha256")


def _tag(key: bytes | None, role: bytes, said: bytes) -> bytes:
    return hmac.digest(key or b"none", role + said, "sha256")
