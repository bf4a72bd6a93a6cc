"""A trainer and its readers agree on a version, or none of them takes it."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from gymfast.errors import ChainError, ChannelError, DeadlineError
from gymfast.integrations import sync_round
from gymfast.integrations.sync_round import RoundLeader, RoundMember, Ticket


@pytest.fixture
def leader() -> Iterator[RoundLeader]:
    leader = RoundLeader("127.0.0.1")
    yield leader
    leader.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def take(member: RoundMember, work: Callable[[int], None] = lambda version: None) -> int:
    with member.taking(5.0) as version:
        work(version)
    return version


def members(leader: RoundLeader, num: int) -> list[RoundMember]:
    return [RoundMember(leader.ticket, rank, 5.0) for rank in range(num)]


def test_all_members_take_the_version_and_none_goes_on_before_the_last(
    leader: RoundLeader, start: Any
) -> None:
    slow = threading.Event()
    first, last = members(leader, 2)
    taken = [start(take, first), start(take, last, lambda version: slow.wait())]
    settled = start(leader.settle, 7, 2, 5.0)
    with pytest.raises(TimeoutError):
        taken[0].result(timeout=0.1)
    slow.set()
    assert [future.result() for future in taken] == [7, 7] and settled.result() is None


def test_the_failure_of_one_member_reaches_all_sides_with_its_reason(
    leader: RoundLeader, start: Any
) -> None:
    def fail(version: int) -> None:
        raise OSError("no space")

    good, bad = members(leader, 2)
    taken, failed = start(take, good), start(take, bad, fail)
    with pytest.raises(ChainError, match="version 3 is in the run, but not in use: reader 1: OSE"):
        leader.settle(3, 2, 5.0)
    with pytest.raises(OSError, match="no space"):
        failed.result()
    with pytest.raises(ChainError, match="version 3 was called off: reader 1: OSError: no space"):
        taken.result()


def test_a_member_that_leaves_and_one_that_never_came_are_named(
    leader: RoundLeader, start: Any, monkeypatch
) -> None:
    monkeypatch.setattr(sync_round, "_ADMIT_S", 0.2)
    good, gone = members(leader, 2)
    taken = start(take, good)
    gone.close()
    with pytest.raises(ChainError, match=r"reader 1: .* is gone: .*; reader 2: it did not connect"):
        leader.settle(3, 3, 5.0)
    with pytest.raises(ChainError, match="called off"):
        taken.result()


def test_a_member_that_is_killed_after_its_answer_does_not_call_the_version_off(
    leader: RoundLeader, start: Any
) -> None:
    where, killed = leader.ticket, threading.Event()
    (good,) = members(leader, 1)
    with socket.create_connection((where.host, where.port)) as bad:
        bad.sendall(json.dumps({"token": where.token, "rank": 1}).encode() + b"\n")
        taken = start(take, good, lambda version: killed.wait(5.0))
        settled = start(leader.settle, 3, 2, 5.0)
        assert bad.recv(100) == b'{"version":3}\n'
        bad.sendall(b'{"version":3}\n')
        bad.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    killed.set()
    assert taken.result() == 3
    with pytest.raises(ChainError, match=r"3 is in use, but not by all: reader 1: .* is gone"):
        settled.result()


def test_a_member_that_does_not_answer_is_an_error_after_the_timeout(leader: RoundLeader) -> None:
    silent = members(leader, 1)
    with pytest.raises(ChainError, match=r"reader 0: .* did not answer in time"):
        leader.settle(3, 1, 0.2)
    silent[0].close()


def test_a_leader_that_is_called_off_or_gone_does_not_leave_members_waiting(start: Any) -> None:
    leader = RoundLeader("127.0.0.1")
    taken = start(take, members(leader, 1)[0])
    leader.call_off("the store is away", 1)
    with pytest.raises(ChainError, match="the store is away"):
        taken.result()
    leader = RoundLeader("127.0.0.1")
    taken = start(take, members(leader, 1)[0])
    leader.close()
    with pytest.raises(ChannelError, match=r"the trainer at 127.0.0.1 .* is gone"):
        taken.result()
    with pytest.raises(ChannelError, match="cannot be reached"):
        members(leader, 1)


def test_a_leader_that_says_nothing_is_an_error_after_the_timeout(leader: RoundLeader) -> None:
    (member,) = members(leader, 1)
    with (
        pytest.raises(DeadlineError, match="did not answer in time"),
        member.taking(0.1),
    ):
        raise AssertionError


def test_a_version_that_came_late_leaves_a_member_its_time_to_wait_for_the_others(
    leader: RoundLeader, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, slow = [0.0], threading.Event()
    monkeypatch.setattr(sync_round, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    first, last = members(leader, 2)

    def take_late(version: int) -> None:
        now_s[0] = 6.0  # of the 5 that it has for the version, and anew for the others

    taken = [start(take, first, take_late), start(take, last, lambda version: slow.wait(5.0))]
    settled = start(leader.settle, 7, 2, 60.0)
    with pytest.raises(TimeoutError):
        taken[0].result(timeout=0.1)
    slow.set()
    assert [future.result() for future in taken] == [7, 7] and settled.result() is None


@pytest.mark.parametrize(
    "hello",
    [
        *(b"GET / HTTP/1.1\r\n\r\n", b"", b"x" * 2**17, b'{"rank":0}\n'),
        '{"token":"\u00e9","rank":0}\n'.encode(),
        b'{"token":"\xff","rank":0}\n',
    ],
)
def test_a_stranger_is_not_a_member(leader: RoundLeader, start: Any, hello: bytes) -> None:
    stranger = socket.create_connection((leader.ticket.host, leader.ticket.port))
    stranger.sendall(hello)
    stranger.shutdown(socket.SHUT_WR)
    forged = Ticket(leader.ticket.host, leader.ticket.port, "0" * 32)
    twice = RoundMember(forged, 0, 5.0)
    taken = start(take, members(leader, 1)[0])
    leader.settle(5, 1, 5.0)
    assert taken.result() == 5
    stranger.close()
    with pytest.raises(ChannelError):
        take(twice)


def test_a_second_member_of_the_same_rank_is_turned_away(leader: RoundLeader, start: Any) -> None:
    first, second = members(leader, 1) + members(leader, 1)
    other = RoundMember(leader.ticket, 1, 5.0)
    taken = [start(take, first), start(take, other)]
    leader.settle(5, 2, 5.0)
    assert [future.result() for future in taken] == [5, 5]
    with pytest.raises(ChannelError):
        take(second)


def test_a_long_reason_is_cut(leader: RoundLeader, start: Any) -> None:
    taken = start(take, members(leader, 1)[0])
    leader.call_off("x" * 2**20, 1)
    with pytest.raises(ChainError, match=r"^x{2000}$"):
        taken.result()


def test_connections_that_say_nothing_hold_no_member_up(leader: RoundLeader, start: Any) -> None:
    address = (leader.ticket.host, leader.ticket.port)
    silent = [socket.create_connection(address) for _ in range(30)]
    member = start(RoundMember, leader.ticket, 0, 5.0)
    settled = start(leader.settle, 7, 1, 5.0)
    assert take(member.result()) == 7
    assert settled.result(timeout=4) is None  # one after the other they would take 5 s each
    assert all(connection.recv(1) == b"" for connection in silent)
    for connection in silent:
        connection.close()
