"""The contract of channels as importable tests: what a new channel must pass.

    class TestMyChannel(ChannelContract):
        @pytest.fixture
        def make(self): return lambda num_ranks, **options: [MyChannel(...) for rank in ...]

`make` gives the channels of all ranks of a group in this process; `options` are those of Channel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from gymfast.channels.base import Channel, Memory, Slot
from gymfast.errors import ChannelError

Make = Callable[..., list[Channel]]
SIZES = [0, 1, 255, 256, 4097, (1 << 20) + 1]


def in_threads(works: list[Callable[[], Any]], *, timeout_s: float = 60.0) -> list[Any]:
    """What each work returned, or the exception it raised; a rank that hangs is a failure."""
    results: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[number] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for number, thread in enumerate(threads):
        thread.join(max(deadline_s - time.monotonic(), 0))
        assert not thread.is_alive(), f"rank {number} hangs"
    return results


@contextmanager
def opened(make: Make, num_ranks: int, **options: Any) -> Iterator[list[Channel]]:
    """The channels of a group, closed at the end."""
    channels = make(num_ranks, **options)
    try:
        yield channels
    finally:
        in_threads([channel.close for channel in channels])


def noise(seed: int, size: int) -> Memory:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def memory_of(rank: int, root: int, seed: int, size: int) -> Memory:
    """What a rank passes for a slot: random bytes at the root, zeros elsewhere."""
    return noise(seed, size) if rank == root else np.zeros(size, np.uint8)


class ChannelContract:
    """Every channel passes these."""

    @pytest.fixture
    def make(self) -> Make:
        """Makes the channels of all ranks of a new group."""
        raise NotImplementedError("a channel contract needs a fixture `make`")

    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
    @pytest.mark.parametrize("root", [0, -1])
    def test_memory_of_any_size_arrives_exactly(
        self, make: Make, num_ranks: int, root: int
    ) -> None:
        root %= num_ranks
        with opened(make, num_ranks) as channels:

            def work(channel: Channel) -> list[bytes]:
                memory = [memory_of(channel.rank, root, i, n) for i, n in enumerate(SIZES)]
                for one in memory:
                    channel.begin([Slot(root, one)])
                channel.finish()
                return [one.tobytes() for one in memory]

            expected = [noise(i, n).tobytes() for i, n in enumerate(SIZES)]
            results = in_threads([lambda c=c: work(c) for c in channels])  # type: ignore[misc]
            assert results == [expected] * num_ranks

    def test_a_round_may_have_several_roots(self, make: Make) -> None:
        with opened(make, 3) as channels:

            def work(channel: Channel) -> list[bytes]:
                taken = []
                for number in range(6):
                    roots = [root for root in range(3) if number % (root + 1) == 0]
                    memory = [memory_of(channel.rank, r, 10 * number + r, 5000) for r in roots]
                    slots = [Slot(r, one) for r, one in zip(roots, memory, strict=True)]
                    channel.begin(slots)
                    taken += memory
                channel.finish()
                return [one.tobytes() for one in taken]

            results = in_threads([lambda c=c: work(c) for c in channels])  # type: ignore[misc]
            assert results[0] == results[1] == results[2]
            assert len(results[0]) == 11

    @pytest.mark.parametrize("depth", [1, 2, 5])
    def test_memory_is_free_when_its_round_is_finished(self, make: Make, depth: int) -> None:
        with opened(make, 2, depth=depth) as channels:

            def work(channel: Channel) -> bool:
                ring = [np.zeros(3000, np.uint8) for _ in range(depth)]
                is_right = True
                for number in range(20 + depth):
                    memory = ring[number % depth]
                    if number >= depth:
                        channel.finish(depth - 1)
                        is_right &= bool((memory == (number - depth) % 251).all())
                    if number < 20:
                        memory[:] = number % 251 if channel.rank == 0 else 255
                        channel.begin([Slot(0, memory)])
                    else:
                        channel.finish(max(depth - 1 - (number - 20) - 1, 0))
                channel.finish()
                return is_right

            assert in_threads([lambda c=c: work(c) for c in channels]) == [True, True]  # type: ignore[misc]

    def test_a_round_without_slots_is_a_round(self, make: Make) -> None:
        with opened(make, 2) as channels:

            def work(channel: Channel) -> None:
                for _ in range(3):
                    channel.begin([])
                channel.finish()

            assert in_threads([lambda c=c: work(c) for c in channels]) == [None, None]  # type: ignore[misc]

    def test_a_rank_that_does_not_come_is_an_error_by_the_deadline(self, make: Make) -> None:
        with opened(make, 3, timeout_s=0.5) as channels:

            def work(channel: Channel) -> None:
                channel.begin([Slot(0, memory_of(channel.rank, 0, 0, 1000))])
                channel.finish()

            begin_s = time.monotonic()
            results = in_threads([lambda: work(channels[1]), lambda: work(channels[2])])
            assert all(isinstance(result, ChannelError) for result in results), results
            assert time.monotonic() - begin_s < 10

    def test_a_rank_that_dies_is_an_error_or_is_left_behind(self, make: Make) -> None:
        with opened(make, 3, timeout_s=5) as channels:

            def work(channel: Channel) -> bytes:
                memory = memory_of(channel.rank, 0, 0, 1 << 20)
                for _ in range(8):
                    channel.begin([Slot(0, memory)])
                channel.finish()
                return bytes(memory.tobytes())

            def die(channel: Channel) -> None:
                channel.begin([Slot(0, np.zeros(1 << 20, np.uint8))])
                channel.finish()
                channel.close()

            works = [lambda: work(channels[0]), lambda: work(channels[1]), lambda: die(channels[2])]
            results = in_threads(works)
            if type(channels[0]).survives_loss:
                assert results[0] == results[1] == noise(0, 1 << 20).tobytes()
                assert any(2 in channel.lost for channel in channels[:2])
            else:
                assert any(isinstance(result, ChannelError) for result in results[:2])

    def test_a_root_that_dies_is_an_error_on_all_others(self, make: Make) -> None:
        with opened(make, 3, timeout_s=5) as channels:

            def work(channel: Channel) -> None:
                for _ in range(8):
                    channel.begin([Slot(0, np.zeros(1 << 20, np.uint8))])
                channel.finish()

            works = [channels[0].close, lambda: work(channels[1]), lambda: work(channels[2])]
            results = in_threads(works)
            assert all(isinstance(result, ChannelError) for result in results[1:]), results

    def test_sizes_that_differ_are_an_error_and_never_a_short_read(self, make: Make) -> None:
        with opened(make, 2, timeout_s=2) as channels:

            def work(channel: Channel) -> None:
                channel.begin([Slot(0, memory_of(channel.rank, 0, 0, 1000 + 24 * channel.rank))])
                channel.finish()

            results = in_threads([lambda c=c: work(c) for c in channels])  # type: ignore[misc]
            assert isinstance(results[1], ChannelError)

    def test_abort_wakes_whoever_waits(self, make: Make) -> None:
        with opened(make, 2, timeout_s=30) as channels:

            def work(channel: Channel) -> None:
                channel.begin([Slot(1, np.zeros(1000, np.uint8))])
                channel.finish()

            timer = threading.Timer(0.2, channels[0].abort, ["enough"])
            timer.start()
            begin_s = time.monotonic()
            (result,) = in_threads([lambda: work(channels[0])])
            assert isinstance(result, ChannelError)
            assert "enough" in str(result)
            assert time.monotonic() - begin_s < 10
            timer.join()

    def test_what_failed_once_stays_failed(self, make: Make) -> None:
        with opened(make, 2, timeout_s=5) as channels:
            channels[0].abort("enough")
            for _ in range(2):
                with pytest.raises(ChannelError, match="enough"):
                    channels[0].finish()
            with pytest.raises(ChannelError, match="enough"):
                channels[0].begin([Slot(0, np.zeros(1, np.uint8))])

    def test_it_may_be_closed_twice_and_while_it_is_busy(self, make: Make) -> None:
        channels = make(2, timeout_s=30)
        channels[0].begin([Slot(0, np.zeros(1 << 20, np.uint8))])
        begin_s = time.monotonic()
        for _ in range(2):
            in_threads([channel.close for channel in channels])
        assert time.monotonic() - begin_s < 10

    def test_nothing_is_left_of_a_closed_group(self, make: Make) -> None:
        def use() -> None:
            with opened(make, 3) as channels:

                def work(channel: Channel) -> None:
                    channel.begin([Slot(0, memory_of(channel.rank, 0, 0, 1000))])
                    channel.finish()

                in_threads([lambda c=c: work(c) for c in channels])  # type: ignore[misc]

        use()
        before = threading.active_count()
        for _ in range(3):
            use()
        deadline_s = time.monotonic() + 5
        while threading.active_count() > before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert threading.active_count() <= before

    @pytest.mark.parametrize(
        "options", [{"depth": 0}, {"timeout_s": 0}, {"timeout_s": -1}, {"timeout_s": float("nan")}]
    )
    def test_impossible_settings_are_refused(self, make: Make, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="expected"):
            make(2, **options)
