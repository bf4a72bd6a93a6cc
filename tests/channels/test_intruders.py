"""I81: who does not have the key gets nowhere, and keeps nobody out: messages, payload, memory."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from channel_group import Controls, in_threads

from gymfast.channels import Channel, Hub, Slot, connect
from gymfast.channels.door import MAX_CALLERS, Door, is_wildcard
from gymfast.channels.handshake import Caller, Peer, introduce
from gymfast.channels.shm import make_ring
from gymfast.channels.tcp import TcpChannel, open_tcp
from gymfast.errors import ChannelError
from gymfast.testing.channel_contract import noise

KEY = b"a key of some length"
GROUP = "weights"
HELLO_BYTES, ANSWER_BYTES, VERDICT_BYTES = 51, 122, 33
REFUSED = b"\0"
Address = tuple[str, int]


class Target:
    """Something that listens, and a rank that has the key and gets in."""

    def __init__(self, address: Address, enter: Callable[[], None]) -> None:
        self.address, self.enter = address, enter

    def call(self) -> socket.socket:
        return socket.create_connection(self.address, 10)


def hub_target(stack: ExitStack) -> Target:
    hub = Hub(key=KEY)
    stack.callback(hub.close)

    def enter() -> None:
        control = connect(hub.address, 1, key=KEY, timeout_s=20)
        stack.callback(control.close)
        hub.control.wait_for(2, 10)

    return Target(hub.address, enter)


def tcp_target(stack: ExitStack) -> Target:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [listener.getsockname() for listener in listeners]
    channels: list[Channel] = [
        TcpChannel(rank, addresses, one, fanout=1, key=KEY, group=GROUP, timeout_s=20)
        for rank, one in enumerate(listeners)
    ]
    for channel in channels:
        stack.callback(channel.close)

    def enter() -> None:
        memory = [noise(1, 1000), np.zeros(1000, np.uint8)]

        def work(rank: int) -> None:
            channels[rank].begin([Slot(0, memory[rank])])
            channels[rank].finish()

        assert in_threads(partial(work, 0), partial(work, 1)) == [None, None]
        assert (memory[0] == memory[1]).all()

    return Target(addresses[0], enter)


@pytest.fixture(params=[hub_target, tcp_target], ids=["control", "payload"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with ExitStack() as stack:
        yield request.param(stack)


class Recorder:
    """A socket that keeps what was sent over it; one bit of it may be wrong."""

    def __init__(self, sock: socket.socket, flip_at: int | None = None) -> None:
        self.sent: list[bytes] = []
        self._sock, self._flip_at = sock, flip_at

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)
        said = bytearray(data)
        if self._flip_at is not None:
            said[self._flip_at] ^= 1
        self._sock.sendall(said)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, or fewer where the line ends."""
    data = b""
    while len(data) < num_bytes and (part := sock.recv(num_bytes - len(data))):
        data += part
    return data


def test_I81_a_replayed_handshake_is_refused(target: Target) -> None:
    """What a caller once said, said again by somebody who does not have the key."""
    with target.call() as sock:
        recorder = Recorder(sock)
        introduce(recorder, GROUP, KEY, Peer(1, 0), time.monotonic() + 5)
        assert [len(data) for data in recorder.sent] == [ANSWER_BYTES]
    for _ in range(20):
        with target.call() as sock:
            assert len(receive(sock, HELLO_BYTES)) == HELLO_BYTES
            sock.sendall(recorder.sent[0])
            assert receive(sock, VERDICT_BYTES) == REFUSED + bytes(32)
            assert receive(sock, 1) == b""


def test_I81_a_truncated_handshake_is_refused(target: Target) -> None:
    for num_bytes in range(0, ANSWER_BYTES, 11):
        with target.call() as sock:
            hello = receive(sock, HELLO_BYTES)
            answer = hello[:18] + bytes(ANSWER_BYTES)
            sock.sendall(answer[:num_bytes])
            sock.shutdown(socket.SHUT_WR)
            assert receive(sock, VERDICT_BYTES) == b""
    target.enter()


def test_I81_an_answer_of_which_one_bit_is_wrong_is_refused(target: Target) -> None:
    for place in range(ANSWER_BYTES):
        with target.call() as sock:
            damaging = Recorder(sock, flip_at=place)
            with pytest.raises(ChannelError, match=r"refused the|closed the"):
                introduce(damaging, GROUP, KEY, Peer(1, 0), time.monotonic() + 5)
    target.enter()


def test_I81_a_challenge_that_is_reflected_proves_nothing(target: Target) -> None:
    """A rank is led to answer the challenge of one line; its answer is given on another."""

    def caller() -> None:
        with socket.create_connection(false.getsockname()) as sock:
            introduce(sock, GROUP, KEY, Peer(1, 0), time.monotonic() + 5)

    with (
        target.call() as one,
        target.call() as other,
        socket.create_server(("127.0.0.1", 0)) as false,
    ):
        hello = receive(one, HELLO_BYTES)
        receive(other, HELLO_BYTES)
        thread = threading.Thread(target=lambda: in_threads(caller), daemon=True)
        thread.start()
        led, _ = false.accept()
        with led:
            led.sendall(hello)
            other.sendall(receive(led, ANSWER_BYTES))
            assert receive(other, VERDICT_BYTES)[:1] == REFUSED
        thread.join(10)


def test_I81_a_rank_is_never_let_in_to_itself() -> None:
    """Its own answer, led back to it by somebody in between, opens no line for its bytes."""
    with ExitStack() as stack:
        target = tcp_target(stack)
        with target.call() as sock, pytest.raises(ChannelError, match="expects no rank 0"):
            introduce(sock, GROUP, KEY, Peer(0, 64), time.monotonic() + 5)
        target.enter()


def test_I81_lines_that_nobody_waits_for_are_refused() -> None:
    strangers = [(2, 0), (2**32 - 1, 0), (1, 1), (1, 64 * 2), (1, 2**32 - 1), (1, 64)]
    with ExitStack() as stack:
        target = tcp_target(stack)
        for rank, line in strangers:
            with (
                target.call() as sock,
                pytest.raises(ChannelError, match=f"expects no rank {rank}"),
            ):
                introduce(sock, GROUP, KEY, Peer(rank, line), time.monotonic() + 5)
        target.enter()


def test_I81_a_listener_that_does_not_have_the_key_is_found_out() -> None:
    """It says what it heard, reflects the proof of the caller, or makes one up."""

    def listen(server: socket.socket, answer: Callable[[bytes], bytes]) -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"gymfast channel 2\n" + bytes(32) + b"\1")
            sock.sendall(answer(receive(sock, ANSWER_BYTES)))
            receive(sock, 1)

    for answer in (lambda said: b"\2" + said[-32:], lambda _: b"\2" + bytes(32)):
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=listen, args=(server, answer), daemon=True)
            thread.start()
            with pytest.raises(ChannelError, match="could not prove that it has the key"):
                connect(server.getsockname(), 1, key=KEY, timeout_s=5)
            thread.join(5)


GARBAGE = [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(500), noise(1, 100_000).tobytes(), b"gymfast"]


def test_I81_garbage_disturbs_nobody(target: Target) -> None:
    with ExitStack() as stack:
        for said in GARBAGE:
            sock = stack.enter_context(target.call())
            with suppress(OSError):  # it was refused already
                sock.sendall(said)
        target.enter()


def test_I81_callers_that_are_gone_at_once_disturb_nobody(target: Target) -> None:
    for _ in range(50):
        sock = target.call()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()  # with RST, often before it was accepted
    target.enter()


def test_I81_a_host_without_files_to_open_lets_ranks_in_later() -> None:
    class Full:
        """A listener that cannot accept for a while."""

        def __init__(self, sock: socket.socket) -> None:
            self.num_failures, self._sock = 0, sock

        def accept(self) -> Any:
            if self.num_failures < 3:
                self.num_failures += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self._sock.accept()

        def __enter__(self) -> None:
            self._sock.__enter__()

        def __exit__(self, *error: object) -> None:
            self._sock.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sock, name)

    listener = socket.create_server(("127.0.0.1", 0))
    full, came = Full(listener), threading.Event()

    def let_in(caller: Caller, deadline_s: float) -> None:
        caller.welcome(deadline_s)
        came.set()

    door = Door(full, GROUP, KEY, let_in)  # type: ignore[arg-type]
    door.open()
    with socket.create_connection(listener.getsockname()) as sock:
        introduce(sock, GROUP, KEY, Peer(1, 0), time.monotonic() + 10)
    assert came.wait(5)
    assert full.num_failures == 3
    door.shut()
    door.join()


def test_I81_handshakes_that_never_end_keep_nobody_out(target: Target) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(MAX_CALLERS + 30):
            stack.enter_context(target.call())
        begin_s = time.monotonic()
        target.enter()
        assert time.monotonic() - begin_s < 8  # a handshake may take 10 s
        deadline_s = time.monotonic() + 5
        while threading.active_count() > (most := before + MAX_CALLERS + 20):
            assert time.monotonic() < deadline_s, f"{threading.active_count()} threads, not {most}"
            time.sleep(0.01)


@pytest.mark.ci
def test_I81_ranks_get_in_while_others_flood(target: Target) -> None:
    is_over = threading.Event()

    def flood() -> None:
        calls: list[socket.socket] = []
        while not is_over.is_set():
            try:
                calls.append(target.call())
            except OSError:  # the backlog is full
                is_over.wait(0.01)
            if len(calls) == 2 * MAX_CALLERS:
                calls.pop(0).close()
        for sock in calls:
            sock.close()

    threads = [threading.Thread(target=flood, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        target.enter()
    finally:
        is_over.set()
        for thread in threads:
            thread.join(20)


WILDCARDS = ["0.0.0.0", "::", "", "0", "0.0", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"]


def test_R115_a_wildcard_without_a_key_refuses_to_start() -> None:
    controls = Controls(1)
    for host in WILDCARDS:
        assert is_wildcard(host)
        with pytest.raises(ValueError, match="can be reached from other hosts: give a key"):
            Hub(host=host)
        with pytest.raises(ValueError, match="can be reached from other hosts: give a key"):
            open_tcp(controls.all[0], host=host)
    controls.close()


def test_R89_a_wildcard_is_never_advertised() -> None:
    controls = Controls(1)
    for host in WILDCARDS:
        for arguments in ({"host": host}, {"host": "127.0.0.1", "advertise": host or "0.0.0.0"}):
            with pytest.raises(ValueError, match="every address of this host and none to connect"):
                open_tcp(controls.all[0], key=KEY, **arguments)
        with pytest.raises(ValueError, match="no address to connect to"):
            connect((host, 7000), 1, key=KEY)
    controls.close()


def test_R89_a_wildcard_is_bound_and_a_name_advertised() -> None:
    controls = Controls(2)
    options = {"host": "0.0.0.0", "advertise": "localhost", "key": KEY, "timeout_s": 20}
    channels = in_threads(*(partial(open_tcp, one, **options) for one in controls.all))
    memory = [noise(1, 1000), np.zeros(1000, np.uint8)]

    def work(rank: int) -> None:
        channels[rank].begin([Slot(0, memory[rank])])
        channels[rank].finish()

    assert in_threads(partial(work, 0), partial(work, 1)) == [None, None]
    assert (memory[0] == memory[1]).all()
    in_threads(*(channel.close for channel in channels))
    controls.close()


def test_R115_loopback_needs_no_key() -> None:
    for host in ("127.0.0.1", "127.0.0.9", "localhost"):
        hub = Hub(host=host)
        connect(hub.address, 1, timeout_s=10).close()
        hub.close()


@pytest.mark.parametrize("key", [b"", b"fifteen bytes.."])
def test_I81_a_short_key_is_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match=r"the key has \d+ bytes, expected at least 16"):
        Hub(key=key)


READ = """
import os, sys
os.setgid(65534); os.setuid(65534)
try:
    os.open(sys.argv[1], os.O_RDWR)
except PermissionError:
    sys.exit(13)
"""


def test_I81_another_user_cannot_open_the_shared_memory_of_a_rank() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    ring, path = make_ring(0, 2)
    found = subprocess.run([sys.executable, "-I", "-c", READ, path], check=False)
    assert found.returncode == 13
    del ring
