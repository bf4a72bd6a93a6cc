"""How many bytes are asked for at once, on links of which each property is known."""

from __future__ import annotations

import heapq
import os
import signal
import threading
from collections import deque
from dataclasses import dataclass

import pytest

from gymfast.sync.flow import FIRST_BYTES, Flow, Window

MB = 1_000_000


@dataclass
class Link:
    """One queue, served at a rate: an answer takes a round trip, and its turn in the queue."""

    rate: float
    round_trip_s: float
    free_at_s: float = 0.0
    longest_queue_s: float = 0.0

    def answer_at(self, num_bytes: int, now_s: float) -> float:
        start_s = max(self.free_at_s, now_s + self.round_trip_s / 2)
        self.longest_queue_s = max(self.longest_queue_s, start_s - now_s - self.round_trip_s / 2)
        self.free_at_s = start_s + num_bytes / self.rate
        return self.free_at_s + self.round_trip_s / 2


def fetched(link: Link, windows: list[Window], piece_bytes: int, num_pieces: int) -> float:
    """Seconds in which readers with these windows fetch so many pieces each."""
    left = [num_pieces] * len(windows)
    under_way: list[tuple[float, int, int, tuple[float, int]]] = []
    now_s, number = 0.0, 0

    def start() -> None:
        nonlocal number
        for who, window in enumerate(windows):
            while left[who] and window.has_room(piece_bytes):
                left[who] -= 1
                number += 1
                begun = window.begin(piece_bytes, now_s)
                at_s = link.answer_at(piece_bytes, now_s)
                heapq.heappush(under_way, (at_s, number, who, begun))

    start()
    while under_way:
        now_s, _, who, begun = heapq.heappop(under_way)
        windows[who].end(piece_bytes, begun, now_s)
        start()
    return now_s


@pytest.mark.parametrize("round_trip_s", [0.01, 0.06, 0.2])
@pytest.mark.parametrize("rate", [12 * MB, 120 * MB, 1200 * MB])
@pytest.mark.parametrize("piece_bytes", [MB, 8 * MB])
def test_the_way_is_full_and_its_queue_is_not(rate, round_trip_s, piece_bytes) -> None:
    link, window = Link(rate, round_trip_s), Window()
    num_pieces = int(max(40, 40 * rate * round_trip_s / piece_bytes))
    seconds = fetched(link, [window], piece_bytes, num_pieces)
    at_line_rate = num_pieces * piece_bytes / rate
    assert seconds < 1.15 * at_line_rate + 3 * round_trip_s
    # Half a product of rate and shortest answer waits, two requests, at first what is always asked.
    queue_bytes = max(0.5 * rate * round_trip_s + 2.5 * piece_bytes, FIRST_BYTES)
    assert link.longest_queue_s * rate <= 1.35 * queue_bytes + piece_bytes


def test_readers_that_share_a_way_fill_it_once() -> None:
    rate, round_trip_s = 120 * MB, 0.06
    link, windows = Link(rate, round_trip_s), [Window(), Window()]
    seconds = fetched(link, windows, MB, 100)
    assert seconds < 1.15 * 200 * MB / rate + 3 * round_trip_s
    assert link.longest_queue_s < 1.5 * round_trip_s


def test_after_a_pause_little_is_asked_for_at_once() -> None:
    window = Window()
    fetched(Link(1200 * MB, 0.06), [window], MB, 500)
    assert window.limit > 2 * FIRST_BYTES
    window.begin(MB, 100.0)
    assert window.limit == FIRST_BYTES


def test_one_request_larger_than_the_window_may_begin_alone() -> None:
    window = Window()
    assert window.has_room(100 * FIRST_BYTES)
    window.begin(100 * FIRST_BYTES, 0.0)
    assert not window.has_room(1)


def test_what_failed_says_nothing_of_the_way() -> None:
    window = Window()
    for _ in range(8):
        window.end(8 * MB, window.begin(8 * MB, 1.0), 1.001, is_answered=False)
    assert (window.limit, window.under_way) == (FIRST_BYTES, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs kernel feature fork")
def test_a_forked_process_has_turns_of_its_own() -> None:
    flow = Flow()
    with flow.turn(100 * FIRST_BYTES):
        process = os.fork()
        if process == 0:
            signal.alarm(30)
            try:
                with flow.turn(1):
                    os._exit(0)
            finally:
                os._exit(2)
        _, status = os.waitpid(process, 0)
    assert status == 0


def test_turns_come_in_order_and_a_failure_gives_its_turn_back() -> None:
    flow, order, lock = Flow(), deque[int](), threading.Lock()
    gates = [threading.Event() for _ in range(4)]

    def ask(number: int) -> None:
        with flow.turn(FIRST_BYTES):
            with lock:
                order.append(number)
            gates[number].wait(60)
            if number % 2:
                raise OSError("lost")

    threads = []
    for number in range(4):
        threads.append(threading.Thread(target=lambda n=number: _quietly(ask, n), daemon=True))
        threads[-1].start()
        _wait_for(lambda: len(flow._waiting) == number or order)  # noqa: B023
    for gate in gates:
        gate.set()
    for thread in threads:
        thread.join(60)
    assert list(order) == [0, 1, 2, 3]
    assert flow._window.under_way == 0


def _quietly(ask, number: int) -> None:
    try:
        ask(number)
    except OSError:
        assert number % 2


def _wait_for(is_so) -> None:
    done = threading.Event()
    for _ in range(6000):
        if is_so():
            return
        done.wait(0.01)
    raise AssertionError("it did not happen")
