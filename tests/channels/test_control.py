"""The control plane: who is there, what they say, and who is missing by when."""

from __future__ import annotations

import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
from channel_group import Controls, in_threads

from gymfast.channels import Hub, connect
from gymfast.channels.handshake import Peer, introduce
from gymfast.channels.line import Line, Message, pack
from gymfast.errors import ChannelError

KEY = b"a key of some length"


def framed(body: bytes) -> bytes:
    """Any bytes in the place of a message."""
    sizes = struct.pack("<II", len(body), zlib.crc32(body))
    return sizes + struct.pack("<I", zlib.crc32(sizes)) + body


@pytest.fixture
def controls() -> Iterator[Controls]:
    group = Controls(4)
    yield group
    group.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(key=KEY)
    yield hub
    hub.close()


def test_values_are_gathered_and_shared(controls: Controls) -> None:
    for round_number in range(20):
        gathered = in_threads(*(partial(c.gather, [c.rank, round_number], 5) for c in controls.all))
        assert gathered == [{r: [r, round_number] for r in range(4)}, {}, {}, {}]
        shared = in_threads(*(partial(c.share, round_number, 5) for c in controls.all))
        assert shared == [round_number] * 4


def test_R84_ranks_that_do_not_come_are_named_by_the_deadline(hub: Hub) -> None:
    control = connect(hub.address, 2, key=KEY)
    begin_s = time.monotonic()
    with pytest.raises(
        ChannelError, match=r"2 of 4 ranks did not come within 0\.3 s: 1, 3"
    ) as found:
        hub.control.wait_for(4, 0.3)
    assert found.value.ranks == (1, 3)
    assert time.monotonic() - begin_s < 2
    control.close()


def test_R86_a_rank_that_says_nothing_is_lost_after_the_deadline(controls: Controls) -> None:
    gathered = in_threads(*(lambda c=c: c.gather(c.rank, 0.3) for c in controls.all if c.rank != 2))
    assert gathered[0] == {0: 0, 1: 1, 3: 3}
    assert controls.hub.control.lost == {2: "it did not answer within 0.3 s"}


def test_a_rank_that_dies_is_lost_at_once_and_comes_again(controls: Controls) -> None:
    troubles: list[int] = []
    controls.hub.control.on_trouble = lambda rank, _: troubles.append(rank)
    controls.all[3].close()
    gathered = in_threads(*(lambda c=c: c.gather(c.rank, 30) for c in controls.all[:3]))
    assert gathered[0] == {0: 0, 1: 1, 2: 2}
    assert troubles == [3]
    controls.all.pop()
    assert controls.form() == [(0, 1, 2)] * 3
    controls.all.append(connect(controls.hub.address, 3))
    controls.hub.control.wait_for(4, 5)
    assert controls.form() == [(0, 1, 2, 3)] * 4
    assert in_threads(*(lambda c=c: c.share("again", 5) for c in controls.all)) == ["again"] * 4


def test_trouble_since_the_last_collective_call_is_told_to_whoever_watches_later(
    controls: Controls,
) -> None:
    hub, one = controls.all[:2]
    one.trouble("of an earlier call")
    in_threads(*(partial(c.gather, None, 5) for c in controls.all))
    in_threads(*(partial(c.share, None, 5) for c in controls.all))
    one.trouble("out of memory")
    in_threads(partial(one.gather, None, 5))  # comes behind it on the same line
    deadline_s = time.monotonic() + 5
    while not hub._values and time.monotonic() < deadline_s:
        time.sleep(0.01)
    told: list[tuple[int, str]] = []
    with hub.watching(lambda rank, text: told.append((rank, text))):
        assert told == [(1, "out of memory")]
    with hub.watching(lambda rank, text: told.append((rank, text))):
        assert len(told) == 1


def test_a_lost_hub_is_an_error_on_all_others(controls: Controls) -> None:
    controls.hub.close()
    errors = in_threads(*(lambda c=c: c.share(None, 30) for c in controls.all[1:]))
    assert all("rank 0 is lost" in str(error) for error in errors)


@pytest.mark.parametrize("key", [None, b"another key of a length"])
def test_I81_a_wrong_key_is_refused_on_both_sides(hub: Hub, key: bytes | None, caplog) -> None:
    with pytest.raises(ChannelError, match=r"refused the key|asks for a key, none is given"):
        connect(hub.address, 1, key=key, timeout_s=5)
    with pytest.raises(ChannelError, match="1 of 2 ranks did not come"):
        hub.control.wait_for(2, 0.2)


def test_I81_a_key_is_not_told_to_a_listener_without_one() -> None:
    hub = Hub()
    with pytest.raises(ChannelError, match="has no key, one is given: give both sides the same"):
        connect(hub.address, 1, key=KEY)
    hub.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_R115_other_hosts_need_a_key(host: str) -> None:
    with pytest.raises(ValueError, match="can be reached from other hosts: give a key"):
        Hub(host=host)


def test_R89_a_wildcard_is_no_address() -> None:
    hub = Hub(host="0.0.0.0", key=KEY)
    with pytest.raises(ValueError, match=r"0\.0\.0\.0 is every address of this host and none"):
        _ = hub.address
    with pytest.raises(ValueError, match="no address to connect to"):
        connect(("0.0.0.0", hub.port), 1, key=KEY)
    control = connect(("127.0.0.1", hub.port), 1, key=KEY)
    control.close()
    hub.close()


def test_a_replayed_handshake_is_refused(hub: Hub) -> None:
    """What a caller once said, said again by somebody who does not have the key."""
    recorded: list[bytes] = []

    class Recorder:
        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def sendall(self, data: bytes) -> None:
            recorded.append(data)
            self._sock.sendall(data)

        def __getattr__(self, name: str):
            return getattr(self._sock, name)

    with socket.create_connection(hub.address) as sock:
        introduce(Recorder(sock), "weights", KEY, Peer(1, 0), time.monotonic() + 5)
    with socket.create_connection(hub.address) as sock:
        hello = sock.recv(1000)
        assert len(hello) == 51
        sock.sendall(recorded[0])
        assert sock.recv(1)[0] == 0


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 200, b"gymfast"])
def test_other_programs_are_refused_and_disturb_nobody(hub: Hub, said: bytes) -> None:
    with socket.create_connection(hub.address) as sock:
        sock.sendall(said)
        control = connect(hub.address, 1, key=KEY, timeout_s=5)
    hub.control.wait_for(2, 5)
    control.close()


def test_another_group_is_refused() -> None:
    hub = Hub(group="a")
    with pytest.raises(ChannelError, match="belongs to another group than 'b'"):
        connect(hub.address, 1, group="b")
    hub.close()


def test_I54_a_second_rank_of_a_number_is_refused_until_the_first_is_gone(hub: Hub) -> None:
    first = connect(hub.address, 1, key=KEY)
    hub.control.wait_for(2, 5)
    with pytest.raises(ChannelError, match="has a rank 1 already: each rank calls once"):
        connect(hub.address, 1, key=KEY, timeout_s=0.3)
    ranks = in_threads(lambda: hub.control.form(5), lambda: first.form(5))
    assert ranks == [(0, 1), (0, 1)]
    first.close()
    second = connect(hub.address, 1, key=KEY, timeout_s=20)
    hub.control.wait_for(2, 5)
    ranks = in_threads(lambda: hub.control.form(5), lambda: second.form(5))
    assert ranks == [(0, 1), (0, 1)]
    second.close()


def test_a_port_in_use_is_one_clear_error(hub: Hub) -> None:
    with pytest.raises(ChannelError, match=f"cannot listen at 127.0.0.1 port {hub.port}"):
        Hub(port=hub.port)


def test_a_caller_may_come_before_rank_0_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    controls: list = []
    caller = threading.Thread(
        target=lambda: controls.append(connect(("127.0.0.1", port), 1, timeout_s=20))
    )
    caller.start()
    hub = Hub(port=port)
    hub.control.wait_for(2, 10)
    caller.join(10)
    controls[0].close()
    hub.close()


def test_nobody_listens_is_an_error_by_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    begin_s = time.monotonic()
    with pytest.raises(ChannelError, match=r"rank 0 was not there within 0\.3 s"):
        connect(address, 1, timeout_s=0.3)
    assert time.monotonic() - begin_s < 2


def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("needs kernel feature IPv6")
    hub = Hub(host="::1")
    control = connect(hub.address, 1)
    hub.control.wait_for(2, 5)
    assert in_threads(lambda: hub.control.form(5), lambda: control.form(5)) == [(0, 1)] * 2
    control.close()
    hub.close()


@pytest.mark.parametrize("said", [b"\xff" * 64, b"\x05\0\0\0\x94\xa6formed", b"\xc1", b"\0\0\0\0"])
def test_rubbish_of_a_rank_is_its_loss_and_ends_nothing_else(said: bytes) -> None:
    group = Controls(3)
    line = group.all[1]._lines[0]
    line.sock.send(framed(said))
    deadline_s = time.monotonic() + 5
    while 1 not in group.hub.control.lost and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert list(group.hub.control.lost) == [1]
    assert in_threads(*(partial(c.gather, c.rank, 5) for c in (group.all[0], group.all[2])))[0] == {
        0: 0,
        2: 2,
    }
    group.close()


def test_a_message_of_another_shape_is_the_loss_of_its_rank(controls: Controls) -> None:
    body = msgspec.msgpack.encode(["formed", 1, 0, 7])  # a number where ranks belong
    controls.all[1]._lines[0].sock.send(framed(body))
    deadline_s = time.monotonic() + 5
    while 1 not in controls.hub.control.lost and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert list(controls.hub.control.lost) == [1]


def wait_for_bytes(sock: socket.socket, num_bytes: int) -> None:
    """Leaves them where they are."""
    sock.setblocking(True)
    assert len(sock.recv(num_bytes, socket.MSG_PEEK | socket.MSG_WAITALL)) == num_bytes


def test_I53_any_flipped_bit_of_a_message_is_the_loss_of_its_rank_and_no_other_value() -> None:
    message = pack(Message("value", 3, 7, "words"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    with here, there:
        for place in range(8 * len(message)):
            damaged = bytearray(message)
            damaged[place // 8] ^= 1 << place % 8
            there.sendall(damaged + bytes(64))
            wait_for_bytes(here, len(message) + 64)
            with pytest.raises(ValueError, match=r"came damaged|at most"):
                list(Line(here).messages())
        there.sendall(message)
        wait_for_bytes(here, len(message))
        assert list(Line(here).messages()) == [Message("value", 3, 7, "words")]
