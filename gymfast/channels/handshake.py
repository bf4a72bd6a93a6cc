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

_MAGIC = b"gymfast channel 1\n"
_NONCE_BYTES = 32
_TAG_BYTES = 32
_MIN_KEY_BYTES = 16
_HELLO = struct.Struct(f"<{len(_MAGIC)}s{_NONCE_BYTES}s?")
_ANSWER = struct.Struct(f"<{len(_MAGIC)}s{_NONCE_BYTES}s32sIH{_TAG_BYTES}s")


@dataclass(frozen=True)
class Peer:
    """What a caller says of itself: its rank and the number of its line."""

    rank: int
    line: int


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


def greet(sock: socket.socket, group: str, key: bytes | None, deadline_s: float) -> Peer:
    """The peer that called, once it proved the key; the side that listens.

    Raises ChannelError for another program, group or key, or an answer that does not come.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    send_all(sock, _HELLO.pack(_MAGIC, nonce, key is not None), deadline_s)
    magic, theirs, name, rank, line, tag = _ANSWER.unpack(
        receive_all(sock, _ANSWER.size, deadline_s)
    )
    if magic != _MAGIC:
        raise ChannelError(f"{_name(sock)} does not speak the protocol of gymfast channels")
    said = nonce + theirs + name + struct.pack("<IH", rank, line)
    if not hmac.compare_digest(tag, _tag(key, b"caller", said)):
        send_all(sock, b"\0" + bytes(_TAG_BYTES), deadline_s)
        raise ChannelError(f"{_name(sock)} (rank {rank}) has another key: it was refused", (rank,))
    if name != _group_bytes(group):
        send_all(sock, b"\1" + bytes(_TAG_BYTES), deadline_s)
        raise ChannelError(f"{_name(sock)} (rank {rank}) looks for another group", (rank,))
    send_all(sock, b"\2" + _tag(key, b"listener", said), deadline_s)
    return Peer(rank, line)


def introduce(
    sock: socket.socket, group: str, key: bytes | None, peer: Peer, deadline_s: float
) -> None:
    """Says who calls, and has the other side prove the key; the side that calls.

    Raises ChannelError as `greet` does.
    """
    magic, theirs, needs_key = _HELLO.unpack(receive_all(sock, _HELLO.size, deadline_s))
    if magic != _MAGIC:
        raise ChannelError(f"{_name(sock)} does not speak the protocol of gymfast channels")
    if needs_key != (key is not None):
        asked = "asks for a key, none is given here" if needs_key else "has no key, one is given"
        raise ChannelError(f"{_name(sock)} {asked}: give both sides the same")
    nonce, name = secrets.token_bytes(_NONCE_BYTES), _group_bytes(group)
    said = theirs + nonce + name + struct.pack("<IH", peer.rank, peer.line)
    answer = _ANSWER.pack(_MAGIC, nonce, name, peer.rank, peer.line, _tag(key, b"caller", said))
    send_all(sock, answer, deadline_s)
    verdict = receive_all(sock, 1 + _TAG_BYTES, deadline_s)
    if verdict[0] == 0:
        raise ChannelError(f"{_name(sock)} refused the key")
    if verdict[0] == 1:
        raise ChannelError(f"{_name(sock)} belongs to another group than {group!r}")
    if not hmac.compare_digest(verdict[1:], _tag(key, b"listener", said)):
        raise ChannelError(f"{_name(sock)} could not prove that it has the key")


def send_all(sock: socket.socket, data: bytes, deadline_s: float) -> None:
    """Raises ChannelError if the data is not sent by the deadline."""
    _set_timeout(sock, deadline_s)
    try:
        sock.sendall(data)
    except OSError as error:
        raise ChannelError(f"{_name(sock)} went away: {error}") from error


def receive_all(sock: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Exactly so many bytes. Raises ChannelError if they do not come by the deadline."""
    data = bytearray()
    while len(data) < num_bytes:
        _set_timeout(sock, deadline_s)
        try:
            part = sock.recv(num_bytes - len(data))
        except OSError as error:
            raise ChannelError(f"{_name(sock)} went away: {error}") from error
        if not part:
            raise ChannelError(
                f"{_name(sock)} closed the line after {len(data)} of {num_bytes} bytes"
            )
        data += part
    return bytes(data)


def _set_timeout(sock: socket.socket, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise ChannelError(f"{_name(sock)} did not answer by the deadline")
    sock.settimeout(left_s)


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
