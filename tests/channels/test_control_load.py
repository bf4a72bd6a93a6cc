"""The control plane beside a payload that does not get through, and among many."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from functools import partial

import numpy as np
import pytest
from channel_group import Controls, in_threads

from gymfast.channels import Control, Hub, Slot, connect
from gymfast.channels.control import HEARTBEAT_S, SILENCE_S
from gymfast.channels.tcp import open_tcp
from gymfast.errors import ChannelError

NUM_RANKS = 32


def start(seed: int) -> None:
    """Rank 0 and 31 receivers start together, in any order, one of them twice; then all get bytes.

    Every listener is bound once: nobody looks for a free port and takes it later.
    """
    order = random.Random(seed)
    with socket.create_server(("127.0.0.1", 0)) as probe:  # a caller may come before the hub
        port = probe.getsockname()[1] if seed % 4 == 0 else 0
    hubs = [] if port else [Hub()]
    address = ("127.0.0.1", port or hubs[0].port)
    ranks = [*range(1, NUM_RANKS), order.randrange(1, NUM_RANKS)]
    order.shuffle(ranks)

    def begin(rank: int) -> Control | ChannelError:
        if rank == 0:
            hubs.append(Hub(port=port))
            return hubs[0].control
        timeout_s = 60.0 if ranks.count(rank) == 1 else 3.0
        try:
            return connect(address, rank, timeout_s=timeout_s)
        except ChannelError as error:
            return error

    works = [partial(begin, rank) for rank in ranks]
    if port:
        works.insert(order.randrange(len(works)), partial(begin, 0))
    started = in_threads(*works)
    (refused,) = [one for one in started if isinstance(one, ChannelError)]
    assert "already: each rank calls once" in str(refused)
    hub = hubs[0]
    others = [one for one in started if isinstance(one, Control) and one.rank]
    hub.control.wait_for(NUM_RANKS, 60)
    controls = [hub.control, *others]
    formed = in_threads(*(partial(control.form, 60) for control in controls))
    assert formed == [tuple(range(NUM_RANKS))] * NUM_RANKS
    channels = in_threads(*(partial(open_tcp, one, fanout=4, timeout_s=60) for one in controls))
    memory = [np.full(1000, seed % 251 + 1 if c.rank == 0 else 0, np.uint8) for c in controls]

    def move(place: int) -> None:
        channels[place].begin([Slot(0, memory[place])])
        channels[place].finish()

    assert in_threads(*(partial(move, place) for place in range(NUM_RANKS))) == [None] * NUM_RANKS
    assert all((one == seed % 251 + 1).all() for one in memory)
    in_threads(*(channel.close for channel in channels))
    in_threads(*(control.close for control in others))
    hub.close()


@pytest.mark.ci
def test_I54_R87_32_ranks_start_at_once() -> None:
    start(seed=0)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_I54_R87_32_ranks_start_at_once_200_times() -> None:
    for seed in range(200):
        start(seed)


def test_I52_R82_messages_pass_a_payload_that_is_stuck() -> None:
    """Sockets of the payload are full and nobody reads them; messages take their own way."""
    controls = Controls(3)
    server = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(server.getsockname())
    receiver, _ = server.accept()

    def send() -> None:
        with contextlib.suppress(OSError):  # the end of the test
            sender.sendall(bytes(1 << 28))

    stuck = threading.Thread(target=send, daemon=True)
    stuck.start()
    worst_s = 0.0
    for number in range(50):
        begin_s = time.monotonic()
        in_threads(*(partial(c.gather, number, 5) for c in controls.all))
        assert in_threads(*(partial(c.share, number, 5) for c in controls.all)) == [number] * 3
        worst_s = max(worst_s, time.monotonic() - begin_s)
    assert stuck.is_alive()
    assert worst_s < 2
    assert controls.hub.control.lost == {}
    for sock in (receiver, sender, server):
        sock.close()
    controls.close()


@pytest.mark.ci
def test_I52_a_rank_that_takes_no_messages_delays_no_sign_of_life_of_others() -> None:
    """Rank 1 reads nothing while rank 0 has a large message for it; rank 2 hears rank 0 on time."""
    controls = Controls(3)
    hub, one, two = controls.all
    one._is_closed.set()  # its thread ends: nobody reads
    one._thread.join()
    heard: list[float] = []
    two._lines[0].heard_s = time.monotonic()

    def share() -> None:
        hub.share(bytes(30 << 20), 3 * HEARTBEAT_S)

    sharing = threading.Thread(target=share, daemon=True)
    sharing.start()
    deadline_s = time.monotonic() + 3 * HEARTBEAT_S
    while time.monotonic() < deadline_s and sharing.is_alive():
        heard.append(time.monotonic() - two._lines[0].heard_s)
        time.sleep(0.01)
    assert max(heard) < 2 * HEARTBEAT_S
    assert max(heard) < SILENCE_S
    sharing.join(20)
    assert list(hub.lost) == [1]
    controls.close()
