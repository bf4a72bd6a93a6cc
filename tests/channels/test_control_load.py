"""The control plane beside a payload that does not get through, and among many."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from functools import partial

import pytest
from channel_group import Controls, in_threads

from gymfast.channels import Hub, connect


def start_and_form(num_ranks: int) -> None:
    hub = Hub()
    ranks = list(range(1, num_ranks))
    others = in_threads(*(partial(connect, hub.address, rank) for rank in ranks))
    hub.control.wait_for(num_ranks, 30)
    formed = in_threads(*(partial(control.form, 30) for control in [hub.control, *others]))
    assert formed == [tuple(range(num_ranks))] * num_ranks
    for control in others:
        control.close()
    hub.close()


def test_I54_32_ranks_come_at_once() -> None:
    for _ in range(5):
        start_and_form(32)


@pytest.mark.long
def test_I54_32_ranks_come_at_once_200_times() -> None:
    for _ in range(200):
        start_and_form(32)


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
