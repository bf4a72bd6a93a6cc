"""The channel over TCP fulfils the contract, as a star, a chain and a tree."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from gymfast.channels import Channel, Slot
from gymfast.channels.tcp import TcpChannel
from gymfast.errors import ChannelError
from gymfast.testing.channel_contract import ChannelContract, Make, in_threads, noise, opened


def make_channels(num_ranks: int, *, fanout: int = 64, **options: Any) -> list[Channel]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_ranks)]
    addresses = [listener.getsockname() for listener in listeners]
    try:
        return [
            TcpChannel(rank, addresses, listener, fanout=fanout, **options)
            for rank, listener in enumerate(listeners)
        ]
    except ValueError:
        for listener in listeners:
            listener.close()
        raise


class TestStar(ChannelContract):
    @pytest.fixture
    def make(self) -> Make:
        return make_channels


class TestChain(ChannelContract):
    @pytest.fixture
    def make(self) -> Make:
        return partial(make_channels, fanout=1)


class TestTreeOfFourStreams(ChannelContract):
    @pytest.fixture
    def make(self) -> Make:
        return partial(make_channels, fanout=2, streams=4)


NUM_ROUNDS, SIZE = 40, 300_000


def send_rounds(channel: Channel) -> bool:
    for number in range(NUM_ROUNDS):
        channel.begin([Slot(0, noise(number, SIZE))])
    channel.finish()
    return True


def receive_rounds(channel: Channel, *, dies_at: int | None = None) -> bool:
    """Whether all rounds arrived exactly; a rank that dies closes after some of them."""
    ring = [np.zeros(SIZE, np.uint8) for _ in range(channel.depth)]
    is_right = True
    for number in range(NUM_ROUNDS + channel.depth):
        memory = ring[number % channel.depth]
        if number >= channel.depth:
            channel.finish(min(channel.depth, NUM_ROUNDS - number + channel.depth) - 1)
            is_right &= bool((memory == noise(number - channel.depth, SIZE)).all())
        if number == dies_at:
            channel.close()
            return is_right
        if number < NUM_ROUNDS:
            memory[:] = 0
            channel.begin([Slot(0, memory)])
    return is_right


@pytest.mark.parametrize("fanout", [1, 2])
def test_nobody_is_warned_of_ranks_that_close_when_they_have_everything(
    caplog: pytest.LogCaptureFixture, fanout: int
) -> None:
    channels = make_channels(3, fanout=fanout, timeout_s=20)
    works = [send_rounds, receive_rounds, receive_rounds]
    results = in_threads([partial(work, c) for work, c in zip(works, channels, strict=True)])
    assert results == [True] * 3
    for rank in (2, 1):
        channels[rank].close()
        before = channels[0 if fanout == 2 else rank - 1]
        deadline_s = time.monotonic() + 30
        while rank not in before.lost:
            assert time.monotonic() < deadline_s, "it is not known that it left"
            time.sleep(0.01)
        assert before.lost[rank] == "it left"
    channels[0].close()
    assert caplog.records == []


@pytest.mark.parametrize(("fanout", "dying"), [(1, 1), (1, 2), (2, 1), (2, 2), (64, 3)])
@pytest.mark.parametrize("streams", [1, 3])
def test_I51_ranks_behind_one_that_dies_get_everything(
    fanout: int, dying: int, streams: int
) -> None:
    make = partial(make_channels, fanout=fanout, streams=streams, timeout_s=20)
    with opened(make, 6) as channels:
        works = [partial(send_rounds, channels[0])]
        for channel in channels[1:]:
            dies_at = 11 if channel.rank == dying else None
            works.append(partial(receive_rounds, channel, dies_at=dies_at))
        assert in_threads(works) == [True] * 6
        assert any(dying in channel.lost for channel in channels)


def test_two_that_die_one_behind_the_other_leave_the_rest_whole() -> None:
    with opened(partial(make_channels, fanout=1, timeout_s=20), 6) as channels:
        works = [partial(send_rounds, channels[0])]
        for channel in channels[1:]:
            dies_at = {1: 9, 2: 14}.get(channel.rank)
            works.append(partial(receive_rounds, channel, dies_at=dies_at))
        assert in_threads(works) == [True] * 6


class CuttingProxy:
    """A way to an address that is cut after so many bytes, again and again."""

    def __init__(self, address: tuple[str, int], cut_bytes: int) -> None:
        self.num_cuts = 0
        self._address, self._cut_bytes = address, cut_bytes
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            upstream = socket.create_connection(self._address)
            threading.Thread(target=self._pump, args=(client, upstream, None), daemon=True).start()
            args = (upstream, client, self._cut_bytes)
            threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        done = 0
        try:
            while data := source.recv(65536):
                target.sendall(data)
                done += len(data)
                if limit is not None and done > limit:
                    self.num_cuts += 1
                    break
        except OSError:
            pass
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@pytest.mark.parametrize("streams", [1, 2])
def test_I53_a_line_that_breaks_is_resumed(streams: int) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    proxy = CuttingProxy(listeners[0].getsockname(), 1_000_000)
    addresses = [proxy.address, listeners[1].getsockname()]
    options = {"fanout": 1, "streams": streams, "timeout_s": 20.0}
    channels = [
        TcpChannel(r, addresses, listener, **options) for r, listener in enumerate(listeners)
    ]
    works = [partial(send_rounds, channels[0]), partial(receive_rounds, channels[1])]
    assert in_threads(works) == [True, True]
    assert proxy.num_cuts >= 5
    in_threads([channel.close for channel in channels])
    proxy.close()


def test_a_key_is_needed_on_the_data_lines_too() -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [listener.getsockname() for listener in listeners]
    keys = [b"a key of some length", b"another key of a length"]
    channels = [
        TcpChannel(rank, addresses, listeners[rank], fanout=1, key=keys[rank], timeout_s=2)
        for rank in range(2)
    ]

    def work(channel: Channel) -> None:
        channel.begin([Slot(0, np.zeros(10, np.uint8))])
        channel.finish()

    results = in_threads([partial(work, channel) for channel in channels])
    assert all(isinstance(result, ChannelError) for result in results)
    assert "refused the key" in str(results[1])
    in_threads([channel.close for channel in channels])
