"""The channel in shared memory fulfils the contract, also between processes that are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest
from channel_group import Controls

from gymfast._core import ShmRing
from gymfast.channels import Channel, Slot, shm
from gymfast.channels.shm import ShmChannel, make_ring, open_shm
from gymfast.errors import ChannelError
from gymfast.testing.channel_contract import ChannelContract, Make, in_threads, noise

NUM_ROUNDS, SIZE = 30, 3_000_000


def make_channels(num_ranks: int, **options: Any) -> list[Channel]:
    rings = [make_ring(rank, num_ranks) for rank in range(num_ranks)]
    paths = [path for _, path in rings]
    return [ShmChannel(rank, ring, paths, **options) for rank, (ring, _) in enumerate(rings)]


class TestShm(ChannelContract):
    @pytest.fixture
    def make(self) -> Make:
        return make_channels


def read_rounds(path: str, rank: int, dies_at: int, results: Any) -> None:
    """A rank in a process of its own: reads rounds, and is killed at one of them."""
    ring = ShmRing.open(path, rank)
    memory = np.zeros(SIZE, np.uint8)
    for number in range(NUM_ROUNDS):
        if number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        ring.read(memory, 20.0)
        if not (memory == noise(number, SIZE)).all():
            results.put((rank, f"round {number} is wrong"))
            return
    results.put((rank, "all"))


def test_I51_a_process_that_is_killed_is_left_behind() -> None:
    ring, path = make_ring(0, 4)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=read_rounds, args=(path, rank, 7 if rank == 2 else -1, results))
        for rank in (1, 2, 3)
    ]
    for process in processes:
        process.start()
    lost: set[int] = set()
    for number in range(NUM_ROUNDS):
        lost.update(ring.write(noise(number, SIZE), 60.0))
    assert {results.get(timeout=60) for _ in range(2)} == {(1, "all"), (3, "all")}
    assert lost == {2}
    for process in processes:
        process.join(20)
    assert processes[1].exitcode == -signal.SIGKILL


def write_and_die(connection: Any) -> None:
    ring, path = make_ring(0, 2)
    connection.send(path)
    connection.recv()
    ring.write(noise(0, SIZE), 20.0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_is_killed_is_an_error_and_never_a_wait() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=write_and_die, args=(there,))
    process.start()
    ring = ShmRing.open(here.recv(), 1)
    here.send("go")
    memory = np.zeros(SIZE, np.uint8)
    ring.read(memory, 20.0)
    assert (memory == noise(0, SIZE)).all()
    with pytest.raises(ChannelError, match="the rank that sends is gone"):
        ring.read(memory, 60.0)
    process.join(20)


def test_a_group_is_made_over_the_control_plane() -> None:
    controls = Controls(3)
    channels = in_threads([partial(open_shm, control, timeout_s=20) for control in controls.all])
    memory = [noise(0, SIZE) if rank == 2 else np.zeros(SIZE, np.uint8) for rank in range(3)]

    def work(rank: int) -> None:
        channels[rank].begin([Slot(2, memory[rank])])
        channels[rank].finish()

    assert in_threads([partial(work, rank) for rank in range(3)]) == [None] * 3
    assert all((one == noise(0, SIZE)).all() for one in memory)
    in_threads([channel.close for channel in channels])
    controls.close()


def test_a_rank_without_memory_is_named_on_all_others(monkeypatch) -> None:
    def make(rank: int, num_ranks: int) -> tuple[ShmRing, str]:
        if rank == 1:
            raise ChannelError("cannot take shared memory: Cannot allocate memory")
        return make_ring(rank, num_ranks)

    monkeypatch.setattr(shm, "make_ring", make)
    controls = Controls(3)
    results = in_threads([partial(open_shm, control, timeout_s=600) for control in controls.all])
    words = "no channel in shared memory of ranks (0, 1, 2): rank 1 says: cannot take shared memory"
    assert [(str(r), r.ranks) for r in results] == [(f"{words}: Cannot allocate memory", (1,))] * 3
    controls.close()


def test_another_depth_is_named_on_all_ranks() -> None:
    controls = Controls(2)
    works = [partial(open_shm, c, depth=2 + c.rank, timeout_s=600) for c in controls.all]
    words = "rank 1 cannot take part: the depth of the channel is 3 there and 2 on rank 0"
    assert [(str(error), error.ranks) for error in in_threads(works)] == [(words, (1,))] * 2
    controls.close()


def test_what_is_no_ring_is_refused(tmp_path) -> None:
    for content in (b"", bytes(4096), bytes(100_000)):
        file = tmp_path / "file"
        file.write_bytes(content)
        with pytest.raises(ChannelError, match="no ring of this version"):
            ShmRing.open(str(file), 0)
    with pytest.raises(ChannelError, match="No such file"):
        ShmRing.open(str(tmp_path / "missing"), 0)
    ring, path = make_ring(0, 2)
    with pytest.raises(ChannelError, match="no ring of this version"):
        ShmRing.open(path, 2)  # a rank that is not in the group
    del ring


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 8])
def test_items_of_any_size_and_place_arrive_whatever_the_ring(num_chunks: int) -> None:
    """Around what is copied past the caches, at ends of cache lines and of chunks."""
    chunk = 256 << 10
    sizes = [0, 1, 63, 4097, chunk // 2 - 1, chunk // 2, chunk // 2 + 65, chunk, 3 * chunk + 7] * 2
    ring = ShmRing.create(0, 3, chunk, num_chunks)
    path = f"/proc/{os.getpid()}/fd/{ring.fd}"
    readers = [ShmRing.open(path, rank) for rank in (1, 2)]
    items = [noise(number, size + 64)[number:][:size] for number, size in enumerate(sizes)]

    def write() -> list[list[int]]:
        return [ring.write(item, 30.0) for item in items]

    def read(reader: ShmRing) -> list[bool]:
        found = []
        for number, item in enumerate(items):
            room = np.full(len(item) + 200, 7, np.uint8)
            begin = 64 - number
            reader.read(room[begin : begin + len(item)], 30.0)
            is_right = bool((room[begin : begin + len(item)] == item).all())
            around = np.delete(room, slice(begin, begin + len(item)))
            found.append(is_right and bool((around == 7).all()))
        return found

    results = in_threads([write, *(partial(read, reader) for reader in readers)])
    assert results == [[[]] * len(sizes), [True] * len(sizes), [True] * len(sizes)]


def test_a_reader_that_wants_more_than_comes_hears_of_it() -> None:
    ring, path = make_ring(0, 2)
    reader = ShmRing.open(path, 1)
    ring.write(np.zeros(100, np.uint8), 5.0)
    with pytest.raises(ChannelError, match="an item of 100 bytes came"):
        reader.read(np.zeros(SIZE, np.uint8), 5.0)


def test_a_writer_that_leaves_at_once_has_been_read() -> None:
    for number in range(300):
        ring, path = make_ring(0, 2)
        reader, memory = ShmRing.open(path, 1), np.zeros(64, np.uint8)

        def write(ring: ShmRing = ring, number: int = number) -> None:
            ring.write(noise(number, 64), 5.0)
            ring.leave()

        def read(reader: ShmRing = reader, memory: Any = memory) -> None:
            reader.read(memory, 5.0)

        assert in_threads([read, write]) == [None, None]
        assert (memory == noise(number, 64)).all()
