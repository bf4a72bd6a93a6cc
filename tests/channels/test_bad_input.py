"""What users and networks get wrong: one clear error on every side by the deadline."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import channel_victim
import numpy as np
import pytest
from bad_network import BadNetwork, Faults
from channel_group import Controls, in_threads
from channel_victim import PHASES, Phase, sent, take_part

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Control, Hub, Slot, agreement, connect
from gymfast.channels.handshake import Peer, fingerprint, introduce
from gymfast.channels.tcp import TcpChannel, open_tcp
from gymfast.errors import ChannelError
from gymfast.testing.channel_contract import noise

KEY = b"a key of some length"
IPV6 = pytest.mark.skipif(not socket.has_ipv6, reason="needs kernel feature IPv6")


@pytest.fixture
def controls() -> Iterator[list[Control]]:
    group = Controls(3)
    yield group.all
    group.close()


def transfers(controls: list[Control], plans: list[tuple[list[BucketTensor], int]]) -> list[Any]:
    """What each rank, with a plan of its own, got: a report or an exception."""

    def work(rank: int) -> Any:
        control, (share, bucket_bytes) = controls[rank], plans[rank]
        memory = {t.name: np.zeros(t.num_bytes, np.uint8) for t in share}
        with contextlib.closing(open_tcp(control, timeout_s=5)) as channel:
            try:
                transfer = BucketTransfer(control, channel, {0: share}, bucket_bytes, timeout_s=5)
            except ValueError:
                control.close()  # as a process that ends
                raise
            transfer.agree()
            return transfer.run(1, memory)

    return in_threads(*(partial(work, rank) for rank in range(3)))


def plan(*sizes: int, bucket_bytes: int = 4096) -> tuple[list[BucketTensor], int]:
    return [BucketTensor(f"t{i}", "U8", (n,), n) for i, n in enumerate(sizes)], bucket_bytes


def test_a_bucket_that_is_smaller_than_an_element_is_an_error_on_all(controls: list) -> None:
    found = transfers(controls, [plan(100), plan(100), plan(100, bucket_bytes=1)])
    assert isinstance(found[2], ValueError)
    assert "bucket_bytes is 1, expected a multiple of 256" in str(found[2])
    for one in found[:2]:
        assert isinstance(one, ChannelError)
        assert str(one) == "rank 2 is lost: it closed the line"


OTHER_PLANS = [
    (plan(100, 300), "tensor 1 is 't1' U8 [200] of 200 bytes here, 't1' U8 [300] of 300 bytes"),
    (plan(100), "tensor 1 is 't1' U8 [200] of 200 bytes here, missing there"),
    (plan(100, 200, bucket_bytes=512), "buckets have 4096 bytes here, 512 there"),
]


def test_plans_that_differ_are_an_error_on_all(controls: list) -> None:
    for other, words in OTHER_PLANS:
        found = transfers(controls, [plan(100, 200), other, plan(100, 200)])
        assert all(isinstance(one, ChannelError) for one in found)
        assert len({str(one) for one in found}) == 1
        assert str(found[0]).startswith("rank 1 cannot take part: in the plan of root 0, " + words)


OTHER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"depth": 5}, "its channel has depth 5, that of rank 0 3"),
    ({"streams": 4}, "streams is '4' there and '1' on rank 0"),
    ({"fanout": 1}, "fanout is '1' there and '2' on rank 0"),
    ({"key": KEY}, f"key is '{fingerprint(KEY)}' there and 'none' on rank 0"),
    ({"host": "no.such.host.invalid"}, "can be reached from other hosts: give a key"),
    ({"host": "192.0.2.7", "key": KEY}, "cannot listen at 192.0.2.7 port 0: "),
    ({"host": "0.0.0.0", "key": KEY}, "every address of this host and none to connect to"),
]


def test_settings_that_differ_are_an_error_on_all(controls: list) -> None:
    for options, words in OTHER_SETTINGS:
        settings = [{}, {}, options]
        found = in_threads(
            *(
                partial(open_tcp, control, timeout_s=5, **own)
                for control, own in zip(controls, settings, strict=True)
            )
        )
        assert all(isinstance(one, ChannelError | ValueError) for one in found), found
        assert all(words in str(one) for one in found), found
        assert all(str(one).startswith("rank 2 cannot take part: ") for one in found[:2]), found


def test_another_version_of_the_protocol_is_an_error_on_all(
    controls: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may offer things of another shape."""
    offer = agreement.Terms.offer
    two = controls[2]
    monkeypatch.setattr(
        agreement.Terms,
        "offer",
        lambda terms: [99] if threading.current_thread().name == "two" else offer(terms),
    )

    def named() -> Any:
        threading.current_thread().name = "two"
        return open_tcp(two, timeout_s=5)

    found = in_threads(
        partial(open_tcp, controls[0], timeout_s=5),
        partial(open_tcp, controls[1], timeout_s=5),
        named,
    )
    for one in found:
        assert isinstance(one, ChannelError)
        assert "rank 2 cannot take part: it speaks protocol [99], rank 0 speaks [2]" in str(one)


def test_a_caller_of_another_version_is_told_apart_from_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            for said in (b"gymfast channel 1\n" + bytes(33), b"SSH-2.0-OpenSSH_9.2p1\r\n" * 3):
                sock, _ = server.accept()
                with sock:
                    sock.sendall(said[:51])
                    sock.recv(1)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        with pytest.raises(ChannelError, match="speaks 'gymfast channel 1', expected 'gymfast ch"):
            connect(server.getsockname(), 1, timeout_s=5)
        with pytest.raises(ChannelError, match="does not speak the protocol of gymfast channels"):
            connect(server.getsockname(), 1, timeout_s=5)
        thread.join(5)


def test_R84_one_of_nine_ranks_does_not_come_and_all_others_hear_which() -> None:
    hub = Hub()
    others = in_threads(*(partial(connect, hub.address, rank) for rank in range(1, 9) if rank != 5))
    words = "1 of 9 ranks did not come within 0.3 s: 5"
    found = in_threads(
        partial(hub.control.wait_for, 9, 0.3), *(partial(one.form, 0.6) for one in others)
    )
    assert isinstance(found[0], ChannelError)
    assert (str(found[0]), found[0].ranks) == (words, (5,))
    for one in found[1:]:
        assert isinstance(one, ChannelError)
        assert str(one) == f"rank 0 said nothing for 0.9 s; it said before: {words}"
    for control in others:
        control.close()
    hub.close()


def test_R84_a_caller_that_was_refused_is_in_the_error_about_its_rank() -> None:
    hub = Hub(key=KEY)
    with pytest.raises(ChannelError, match="refused the key"):
        connect(hub.address, 1, key=KEY[::-1])
    with pytest.raises(ChannelError, match=r"1 of 2 .*: 1; refused: .* \(rank 1\) has another key"):
        hub.control.wait_for(2, 0.2)
    hub.close()


def test_R86_a_rank_that_does_not_come_to_a_channel_is_named(controls: list) -> None:
    found = in_threads(*(partial(open_tcp, one, timeout_s=0.5) for one in controls[:2]))
    for one in found:
        assert isinstance(one, ChannelError)
        assert str(one) == "rank 2 is lost: it did not answer within 0.5 s"


@pytest.mark.ci
def test_R83_all_wait_for_a_receiver_that_is_late_before_anything_is_sent(controls: list) -> None:
    """It is later than a round may take; the rounds begin when it is there."""
    share, bucket_bytes = plan(300_000, bucket_bytes=1 << 16)
    channels = in_threads(*(partial(open_tcp, one, timeout_s=0.7) for one in controls))
    memory = [
        {"t0": noise(1, 300_000) if rank == 0 else np.zeros(300_000, np.uint8)} for rank in range(3)
    ]

    def work(rank: int) -> Any:
        transfer = BucketTransfer(
            controls[rank], channels[rank], {0: share}, bucket_bytes, timeout_s=20
        )
        transfer.agree()
        if rank == 2:
            time.sleep(1)
            assert not memory[1]["t0"].any()
        return transfer.run(1, memory[rank])

    found = in_threads(*(partial(work, rank) for rank in range(3)))
    assert [one.failed for one in found] == [{}] * 3
    assert all((one["t0"] == memory[0]["t0"]).all() for one in memory)
    in_threads(*(channel.close for channel in channels))


def test_R87_a_port_in_use_is_an_error_that_says_what_to_do() -> None:
    hub = Hub()
    with pytest.raises(
        ChannelError, match=r"cannot listen at 127\.0\.0\.1 port \d+: .* take another port, or 0"
    ):
        Hub(port=hub.port)
    hub.close()


@IPV6
def test_ipv6_carries_messages_and_payload() -> None:
    hub = Hub(host="::1", key=KEY)
    other = connect(hub.address, 1, key=KEY)
    hub.control.wait_for(2, 5)
    controls = [hub.control, other]
    in_threads(*(partial(one.form, 5) for one in controls))
    channels = in_threads(*(partial(open_tcp, c, host="::1", key=KEY) for c in controls))
    memory = [noise(1, 1000), np.zeros(1000, np.uint8)]

    def work(rank: int) -> None:
        channels[rank].begin([Slot(0, memory[rank])])
        channels[rank].finish()

    assert in_threads(partial(work, 0), partial(work, 1)) == [None, None]
    assert (memory[0] == memory[1]).all()
    in_threads(*(channel.close for channel in channels))
    other.close()
    hub.close()


NO_ADDRESSES = [
    ("::zz", "cannot listen at ::zz port 0: "),
    ("fe80::1%no-such-device", "cannot listen at fe80::1%no-such-device port 0: "),
    ("2001:db8::1", r"cannot listen at 2001:db8::1 port 0: .*take an address of this host|: "),
    ("[::1]", r"cannot listen at \[::1\] port 0: "),
    ("a" * 300, "cannot listen at aaaa"),
]


def test_addresses_that_are_none_are_refused() -> None:
    for host, words in NO_ADDRESSES:
        with pytest.raises(ChannelError, match=words):
            Hub(host=host, key=KEY)
        with pytest.raises(ChannelError, match=r"rank 0 was not there within 0\.1 s"):
            connect((host, 1), 1, key=KEY, timeout_s=0.1)


@pytest.mark.parametrize("port", [-1, 65536, 1 << 40])
def test_ports_that_are_none_are_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"port is {port}, expected 0 to 65535"):
        Hub(port=port)
    with pytest.raises(ValueError, match=f"port is {port}, expected 1 to 65535"):
        connect(("127.0.0.1", port), 1)


@pytest.mark.ci
def test_a_stream_that_is_always_truncated_is_an_error_by_the_deadline() -> None:
    """Each line ends within the first item: nothing is ever complete."""
    controls = Controls(2)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    way = BadNetwork(listeners[0].getsockname(), Faults(cuts=True, period_bytes=50_000))
    addresses = [way.address, listeners[1].getsockname()]
    channels = [
        TcpChannel(rank, addresses, one, fanout=1, timeout_s=1)
        for rank, one in enumerate(listeners)
    ]
    share, bucket_bytes = plan(1 << 20, bucket_bytes=1 << 20)

    def work(rank: int) -> Any:
        memory = {"t0": noise(1, 1 << 20) if rank == 0 else np.zeros(1 << 20, np.uint8)}
        transfer = BucketTransfer(controls.all[rank], channels[rank], {0: share}, bucket_bytes)
        return transfer.run(1, memory)

    found = in_threads(partial(work, 0), partial(work, 1))
    assert all(isinstance(one, ChannelError) for one in found), found
    assert "a round was not complete within 1 s" in str(found[1])
    assert "[1]" in str(found[0])
    assert "rank 0" in str(found[1])
    in_threads(*(channel.close for channel in channels))
    way.close()
    controls.close()


def test_a_line_of_another_channel_is_refused(controls: list) -> None:
    """Ports are used again: a rank of an older formation may call the port of a newer one."""
    channels = in_threads(*(partial(open_tcp, one, timeout_s=5) for one in controls))
    port = channels[0]._addresses[0][1]
    with (
        socket.create_connection(("127.0.0.1", port)) as sock,
        pytest.raises(ChannelError, match="belongs to another group than 'weights 0000'"),
    ):
        introduce(sock, "weights 0000", None, Peer(1, 0), time.monotonic() + 5)
    in_threads(*(channel.close for channel in channels))


CI = {("open", 2), ("bucket", 0), ("bucket", 2), ("acknowledge", 2), ("close", 2)}
DEATHS = [
    pytest.param(phase, victim, marks=pytest.mark.ci if (phase, victim) in CI else pytest.mark.long)
    for phase in PHASES
    for victim in (0, 2)
]


@pytest.mark.parametrize(("phase", "victim"), DEATHS)
def test_I51_a_rank_that_is_killed_in_any_phase_is_named_on_all_sides(
    phase: Phase, victim: int
) -> None:
    hub = Hub() if victim else None
    command = [sys.executable, "-P", str(Path(channel_victim.__file__)), str(victim)]
    command += [str(hub.port if hub else 0), "3", phase]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    others: list[Control] = []
    try:
        if hub:
            others = [hub.control, connect(hub.address, 1)]
            deadline_s = time.monotonic() + 60
            while 2 not in hub.control._lines and time.monotonic() < deadline_s:
                time.sleep(0.01)
        else:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            others = [connect(("127.0.0.1", port), rank) for rank in (1, 2)]
        begin_s = time.monotonic()
        found = in_threads(*(partial(take_part, control) for control in others))
        assert time.monotonic() - begin_s < 3 * channel_victim.TIMEOUT_S
        assert process.wait(30) == -signal.SIGKILL
        assert process.stdout is not None
        assert process.stdout.read() == ""
        for one in found:
            if isinstance(one, ChannelError):
                assert f"rank {victim}" in str(one), found
                continue
            report, memory = one
            assert victim or phase == "close"
            assert set(report.failed) <= {victim}
            assert (memory == sent()).all()
        if victim and phase in ("ready", "bucket", "acknowledge"):
            assert [set(report.failed) for report, _ in found] == [{victim}] * 2
        elif phase in ("open", "agree") or (victim == 0 and phase != "close"):
            assert all(isinstance(one, ChannelError) for one in found), found
    finally:
        process.kill()
        process.wait()
        for control in others:
            control.close()
        if hub:
            hub.close()
