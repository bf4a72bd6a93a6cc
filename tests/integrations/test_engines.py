"""Calls to engines and locks: whoever is silent is named by the deadline (I50, R86)."""

from __future__ import annotations

import os
from argparse import Namespace
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import slime_stubs

from gymfast.delta.files import wait_for_lock
from gymfast.errors import ChannelError, GymfastError
from gymfast.integrations.bucket_broadcast import acquire, release
from gymfast.integrations.disk_delta_updater import _timeout_s, check_options
from gymfast.integrations.engines import EngineError, Engines


def handle(answer: Any = None) -> Namespace:
    """An engine that gives an answer; a Future is one that may never come."""
    call = answer if isinstance(answer, Future) else slime_stubs.Call(answer)
    return Namespace(pull=Namespace(remote=lambda: call))


def test_I50_R86_a_silent_engine_is_named_and_the_answers_of_others_are_taken() -> None:
    late = Future[Any]()
    engines = Engines([handle(1), handle(late), handle(late), handle(4)], slime_stubs.get, 0.2)
    answers, failures = engines.wait(engines.start("pull"))
    assert answers == {0: 1, 3: 4}
    assert {number: str(error) for number, error in failures.items()} == {
        1: "no answer within 0.2 s",
        2: "no answer within 0.2 s",
    }
    words = r"engine 1 of 4 failed at pull: no answer within 0\.2 s \(also engines \[2\]\)"
    with pytest.raises(EngineError, match=words):
        engines.call("pull")


def test_a_time_out_of_the_engine_itself_is_told_in_its_own_words() -> None:
    failed = Future[Any]()
    failed.set_exception(TimeoutError("the store did not answer"))
    engines = Engines([handle(failed)], slime_stubs.get, 60)
    with pytest.raises(EngineError, match="TimeoutError: the store did not answer"):
        engines.call("pull")


def test_I50_a_lock_that_gives_no_answer_is_an_error() -> None:
    late = Namespace(remote=Future[Any])
    lock = Namespace(acquire=late, release=late)
    with pytest.raises(ChannelError, match="the lock on the engines gave no answer within"):
        acquire(lock, slime_stubs, -2.4)  # 0.2 s, with what others get on top
    with pytest.raises(ChannelError, match=r"gave no answer within 0\.1 s"):
        release(lock, slime_stubs, 0.1)


@pytest.mark.parametrize("value", [0, -1, "5", True])
def test_a_time_out_that_makes_no_sense_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"gymfast_timeout_s is .*, expected seconds above 0"):
        check_options(Namespace(gymfast_timeout_s=value))


def test_R86_engines_have_less_time_than_ranks_have_for_each_other() -> None:
    assert _timeout_s(Namespace(distributed_timeout_minutes=10)) == 540 < 600
    assert _timeout_s(Namespace(distributed_timeout_minutes=10, gymfast_timeout_s=700)) == 700


@pytest.mark.parametrize("is_shared", [True, False])
def test_I50_a_file_lock_that_is_never_free_is_an_error(tmp_path: Path, is_shared: bool) -> None:
    path = tmp_path / "lock"
    held, wanted = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    wait_for_lock(held, path)
    with pytest.raises(GymfastError, match=r"lock was not free for 0\.1 s: another process works"):
        wait_for_lock(wanted, path, is_shared=is_shared, timeout_s=0.1)
    os.close(held)
    wait_for_lock(wanted, path, is_shared=is_shared, timeout_s=0.1)
    os.close(wanted)
