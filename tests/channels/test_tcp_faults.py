"""I53: over lines that are slow, late, stalled, cut, reset, dead or damaged every byte is right."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from bad_network import BadNetwork, Faults
from channel_group import Controls, in_threads

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Channel, Control, Slot, TransferReport
from gymfast.channels.tcp import TcpChannel
from gymfast.errors import ChannelError, ChecksumError
from gymfast.testing.channel_contract import noise

SIZES = [1_500_000, 70_000, 3, 400_000]
BUCKET_BYTES = 1 << 17
TIMEOUT_S = 6.0  # so that three quarters of a second of silence are a broken line
FAULTS = {
    "delay": Faults(delay_s=0.002),
    "late": Faults(late_s=0.1, resets=True),
    "stalls": Faults(stall_s=0.1),
    "long stalls": Faults(stall_s=1.0, period_bytes=6_000_000),
    "resets": Faults(resets=True),
    "cuts": Faults(cuts=True),
    "half-open": Faults(half_open=True, period_bytes=5_000_000),
}
SHARE = [BucketTensor(f"t{i}", "U8", (size,), size) for i, size in enumerate(SIZES)]
Outcome = TransferReport | Exception


@contextmanager
def group(faults: Faults, *, seed: int, streams: int = 2, fanout: int = 1) -> Iterator[list]:
    """Transfers of three ranks, each of which is reached over a bad network of its own."""
    controls = Controls(3)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ways = [BadNetwork(one.getsockname(), faults, seed + i) for i, one in enumerate(listeners)]
    addresses = [way.address for way in ways]
    options = {"fanout": fanout, "streams": streams, "timeout_s": TIMEOUT_S}
    channels: list[Channel] = [
        TcpChannel(rank, addresses, one, **options) for rank, one in enumerate(listeners)
    ]
    try:
        yield [controls.all, channels, ways]
    finally:
        in_threads(*(channel.close for channel in channels))
        for way in ways:
            way.close()
        controls.close()


def transfer(controls: list[Control], channels: list[Channel], version: int) -> list[Outcome]:
    """What each rank returned or raised; a rank that returned has every byte, or this fails."""
    expected = {t.name: noise(version * 10 + i, t.num_bytes) for i, t in enumerate(SHARE)}

    def work(rank: int) -> TransferReport:
        moved = BucketTransfer(
            controls[rank], channels[rank], {0: SHARE}, BUCKET_BYTES, timeout_s=5 * TIMEOUT_S
        )
        moved.agree()
        mine = expected if rank == 0 else {t.name: np.zeros(t.num_bytes, np.uint8) for t in SHARE}
        report = moved.run(version, mine)
        for name, memory in mine.items():
            assert (memory == expected[name]).all(), f"rank {rank} took wrong bytes of {name}"
        return report

    return in_threads(*(partial(work, rank) for rank in range(3)), timeout_s=120)


def transfers(faults: Faults, count: int, seed: int) -> int:
    """Makes so many that have to succeed; returns the faults that they met."""
    with group(faults, seed=seed, streams=1 + seed % 3, fanout=1 + seed % 2) as (
        controls,
        channels,
        ways,
    ):
        for version in range(count):
            for found in transfer(controls, channels, version):
                assert isinstance(found, TransferReport), found
                assert found.failed == {}
        return sum(way.num_faults for way in ways)


QUICK = {"resets", "cuts"}
SOME = [pytest.param(name, marks=() if name in QUICK else pytest.mark.ci) for name in FAULTS]


@pytest.mark.parametrize("name", SOME)
def test_I53_every_byte_is_right_over_a_bad_network(name: str) -> None:
    faults = replace(FAULTS[name], most=2, period_bytes=300_000)
    assert transfers(faults, 3, seed=len(name)) >= 1


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FAULTS)
def test_I53_every_byte_is_right_in_40_transfers(name: str) -> None:
    met = sum(transfers(FAULTS[name], 4, seed) for seed in range(10))
    assert met >= 10


def flipped(faults: Faults, count: int, first_seed: int) -> tuple[int, int]:
    """How many transfers succeeded, and how many found damage and said so."""
    right = found = 0
    for seed in range(first_seed, first_seed + count):
        with group(faults, seed=seed) as (controls, channels, ways):
            outcomes = transfer(controls, channels, seed)
            assert sum(way.num_faults for way in ways) >= 1
        errors = [one for one in outcomes if isinstance(one, Exception)]
        assert all(isinstance(one, ChecksumError | ChannelError) for one in errors), errors
        if errors:
            found += 1
            report = outcomes[0]
            assert isinstance(report, TransferReport)
            assert report.failed, "rank 0 knows nothing of it"
        else:
            right += 1
    return right, found


def test_I53_a_flipped_bit_of_a_bucket_is_found_and_never_taken() -> None:
    assert flipped(Faults(flips=True, most=1), 2, first_seed=100) == (0, 2)


def test_I53_a_flipped_bit_of_a_handshake_or_an_answer_costs_a_line_and_no_transfer() -> None:
    right, found = flipped(Faults(flips_answers=True, most=1), 2, first_seed=100)
    assert (right, found) == (2, 0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_I53_a_flipped_bit_is_found_and_never_taken_in_100_transfers() -> None:
    right, found = flipped(Faults(flips=True, most=1), 60, first_seed=200)
    assert right + found == 60
    assert found >= 50  # one in a header costs a line and no transfer
    assert flipped(Faults(flips_answers=True, most=1), 40, first_seed=300) == (40, 0)


@pytest.mark.parametrize("kind", ["resets", pytest.param("half-open", marks=pytest.mark.ci)])
def test_I53_a_transfer_is_resumed_at_the_stripe_that_broke(kind: str) -> None:
    """Only what was under way passes twice: depth x bucket, and what the sockets hold of it."""
    controls = Controls(2)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    faults = Faults(resets=kind == "resets", half_open=kind == "half-open", most=1)
    way = BadNetwork(listeners[0].getsockname(), faults)
    addresses = [way.address, listeners[1].getsockname()]
    channels = [
        TcpChannel(rank, addresses, one, fanout=1, timeout_s=TIMEOUT_S, depth=2)
        for rank, one in enumerate(listeners)
    ]
    size = 8_000_000
    share = [BucketTensor("t", "U8", (size,), size)]
    memory = [noise(1, size), np.zeros(size, np.uint8)]

    def work(rank: int) -> TransferReport:
        moved = BucketTransfer(controls.all[rank], channels[rank], {0: share}, 1 << 18)
        return moved.run(1, {"t": memory[rank]})

    outcomes = in_threads(partial(work, 0), partial(work, 1))
    assert [one.failed for one in outcomes] == [{}, {}]
    assert (memory[0] == memory[1]).all()
    assert way.num_faults == 1
    assert way.num_connections == 2
    assert size < way.num_passed < size + 3 * (1 << 18)
    in_threads(*(channel.close for channel in channels))
    way.close()
    controls.close()


@pytest.mark.long
def test_I53_a_rank_behind_one_that_got_its_bytes_late_is_not_given_up() -> None:
    """The root begins when a middle rank would have given up those behind, had it had the bytes."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    addresses = [listener.getsockname() for listener in listeners]
    channels = [
        TcpChannel(rank, addresses, one, fanout=1, timeout_s=20)
        for rank, one in enumerate(listeners)
    ]
    memory = [noise(1, 1000), np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)]

    def work(rank: int) -> None:
        if rank == 0:
            time.sleep(15)
        channels[rank].begin([Slot(0, memory[rank])])
        channels[rank].finish()

    assert in_threads(*(partial(work, rank) for rank in range(3))) == [None] * 3
    assert all((one == memory[0]).all() for one in memory)
    assert [dict(channel.lost) for channel in channels] == [{}] * 3
    in_threads(*(channel.close for channel in channels))
