"""Jobs run ahead on threads; results come in order, and after an error nothing runs any more."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from gymfast.delta.workers import OrderedWorkers


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_the_order_of_the_jobs(threads) -> None:
    turn = threading.Event()

    def job(number: int) -> int:
        if threads > 1 and number == 0:
            assert turn.wait(30)  # the first job ends after the second
        if number == 1:
            turn.set()
        return number

    workers = OrderedWorkers(threads, 100)
    items = ((n, None if n % 7 == 6 else partial(job, n)) for n in range(100))
    expected = [(n, None if n % 7 == 6 else n) for n in range(100)]
    assert list(workers.run(items)) == expected


def test_few_jobs_run_where_they_are_taken_with_all_threads_for_themselves() -> None:
    workers = OrderedWorkers(8, 15)
    assert workers.job_threads == 8
    assert list(workers.run([("here", threading.get_ident)])) == [("here", threading.get_ident())]
    assert OrderedWorkers(8, 16).job_threads == 1


def test_at_most_two_jobs_per_thread_run_ahead() -> None:
    started = []
    items = ((n, partial(started.append, n)) for n in range(50))
    run = OrderedWorkers(3, 50).run(items)
    next(run)
    assert len(started) <= 6
    run.close()
    assert len(started) <= 6


def test_an_error_is_raised_once_no_job_runs_any_more() -> None:
    running = threading.Semaphore(0)
    may_end = threading.Event()
    ended = []

    def slow() -> None:
        running.release()
        assert may_end.wait(30)
        ended.append("slow")

    def fails() -> None:
        assert running.acquire(timeout=30)
        threading.Timer(0.05, may_end.set).start()
        raise OSError("device lost")

    run = OrderedWorkers(2, 8).run([(0, fails), (1, slow), *((n, slow) for n in range(2, 8))])
    with pytest.raises(OSError, match="device lost"):
        list(run)
    assert ended
    assert not any(t.name.startswith("gymfast-delta") for t in threading.enumerate())


def test_stop_waits_for_the_jobs_of_an_iterator_that_was_left_alone() -> None:
    entered, may_end, ended = threading.Event(), threading.Event(), []

    def slow() -> None:
        entered.set()
        assert may_end.wait(30)
        ended.append(True)

    workers = OrderedWorkers(2, 4)
    run = workers.run([(0, lambda: None), *((n, slow) for n in range(1, 4))])
    next(run)
    assert entered.wait(30)
    threading.Timer(0.05, may_end.set).start()
    workers.stop()
    assert ended
    assert not any(t.name.startswith("gymfast-delta") for t in threading.enumerate())
