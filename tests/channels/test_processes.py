"""Ranks as processes, which are killed and stopped: nobody hangs, nobody takes a wrong byte."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "channel_process.py"
SURVIVOR = SCRIPT.with_name("channel_survivor.py")
TIMEOUT_S = 6.0


class Rank:
    """A rank in a process; what it says can be waited for."""

    def __init__(
        self,
        *settings: Any,
        timeout_s: float = TIMEOUT_S,
        stop_at: str = "",
        script: Path = SCRIPT,
    ) -> None:
        """`settings`: rank, port, number of ranks, kind of channel, number of versions."""
        *others, versions = settings
        arguments = [*others, timeout_s, versions, stop_at]
        self.process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said: list[dict[str, Any]] = []
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, phase: str, timeout_s: float = 60) -> dict[str, Any]:
        """The first thing it says of this phase; or the last it says at all."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            line = self.next(deadline_s)
            if line is None:
                return self.said[-1] if self.said else {"phase": "silent"}
            if line["phase"] == phase:
                return line

    def next(self, deadline_s: float) -> dict[str, Any] | None:
        """The next thing it says, by a moment of time.monotonic(); None if it has ended."""
        line = self._lines.get(timeout=max(deadline_s - time.monotonic(), 0.01))
        if line is not None:
            self.said.append(line)
        return line

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)


@contextmanager
def group(
    num_ranks: int, kind: str, versions: int, *, stops: Mapping[int, str] = {}, **options: Any
) -> Iterator[list[Rank]]:
    """`stops` has ranks that stop themselves, and the phase at which they do."""

    def start(rank: int, port: int) -> Rank:
        stop_at = stops.get(rank, "")
        return Rank(rank, port, num_ranks, kind, versions, stop_at=stop_at, **options)

    ranks = [start(0, 0)]
    try:
        port = ranks[0].wait_for("listening")["port"]
        ranks += [start(rank, port) for rank in range(1, num_ranks)]
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()


@pytest.mark.parametrize("kind", ["star", "chain", "tree", "shm"])
def test_several_versions_arrive(kind: str) -> None:
    with group(4, kind, 2) as ranks:
        assert [rank.wait_for("end")["phase"] for rank in ranks] == ["end"] * 4
        done = [line for rank in ranks for line in rank.said if line["phase"] == "done"]
        assert [(line["failed"], line["is_right"]) for line in done] == [([], True)] * 8


@pytest.mark.parametrize("kind", ["star", "chain", "shm"])
@pytest.mark.parametrize("victim", [1, 2])
def test_I51_a_receiver_that_is_killed_is_named_and_the_others_finish(
    kind: str, victim: int
) -> None:
    with group(4, kind, 3) as ranks:
        ranks[victim].wait_for("agreed")
        time.sleep(random.Random(kind + str(victim)).random() * 0.2)
        os.kill(ranks[victim].process.pid, signal.SIGKILL)
        ends = [rank.wait_for("end") for rank in ranks if rank is not ranks[victim]]
        assert [end["phase"] for end in ends] == ["end"] * 3
        for rank in ranks:
            if rank is not ranks[victim]:
                done = [line for line in rank.said if line["phase"] == "done"]
                assert all(line["is_right"] for line in done)
                assert {tuple(line["failed"]) for line in done} <= {(), (victim,)}
        assert any(
            victim not in line["ranks"] for line in ranks[0].said if line["phase"] == "formed"
        )


@pytest.mark.parametrize("kind", ["star", "chain", "shm"])
def test_I51_a_sender_that_is_killed_is_an_error_on_all_others(kind: str) -> None:
    with group(3, kind, 50) as ranks:
        ranks[1].wait_for("agreed")
        os.kill(ranks[0].process.pid, signal.SIGKILL)
        begin_s = time.monotonic()
        ends = [rank.wait_for("end") for rank in ranks[1:]]
        assert [end["phase"] for end in ends] == ["error"] * 2
        assert time.monotonic() - begin_s < 2 * TIMEOUT_S


LIMIT_S = 30.0  # of I51: from a kill to a whole group that has a version
SURVIVOR_TIMEOUT_S = 10.0
NUM_KILLS = 25


def read_until_whole(rank: Rank, victim: int, processes: list[int], deadline_s: float) -> None:
    """Reads what a rank says until it has a version that these processes took together.

    All it says until then is right bytes, or an error that names the victim.
    """
    is_whole = False
    while True:
        line = rank.next(deadline_s)
        assert line is not None, f"a rank that was not killed ended: {rank.said[-3:]}"
        if line["phase"] == "formed":
            is_whole = line["processes"] == processes
        elif line["phase"] == "done":
            assert line["is_right"], line
            assert set(line["failed"]) <= {victim}, line
            if is_whole and not line["failed"]:
                return
        elif line["phase"] == "error":
            assert line["ranks"] == [victim] or f"rank {victim}" in line["error"], line


@pytest.mark.parametrize(
    ("kind", "num_kills"),
    [
        ("chain", 2),
        *(pytest.param(kind, 2, marks=pytest.mark.ci) for kind in ("star", "shm")),
        *(
            pytest.param(kind, NUM_KILLS, marks=[pytest.mark.long, pytest.mark.timeout(1800)])
            for kind in ("star", "chain", "shm", "gloo")
        ),
    ],
)
def test_I51_R78_a_group_is_whole_again_after_any_kill(kind: str, num_kills: int) -> None:
    """At a random moment of a stream of versions a random rank is killed and started anew."""
    rng = random.Random(f"{kind} {num_kills}")
    options = {"timeout_s": SURVIVOR_TIMEOUT_S, "script": SURVIVOR}
    with group(4, kind, 0, **options) as ranks:
        victim, port = 0, ranks[0].said[0]["port"]
        for number in range(num_kills + 1):
            deadline_s = time.monotonic() + (60 if number == 0 else LIMIT_S)
            processes = sorted(rank.process.pid for rank in ranks)
            for rank in ranks:
                read_until_whole(rank, victim, processes, deadline_s)
            if number == num_kills:
                return
            time.sleep(0.3 * rng.random())
            victim = rng.randrange(4)
            ranks[victim].process.kill()
            ranks[victim].process.wait()
            ranks[victim] = Rank(victim, port, 4, kind, 0, **options)


STOP_TIMEOUT_S = 4.0
STOPS = {  # by phase: deadlines that others wait for in turn, in units of the time-out
    "open": 1.5,
    "agree": 1.5,
    "ready": 1.5,
    "flight": 1 + 3,  # a round, then the acknowledgement
    "acknowledge": 3,  # rank 0 may wait for the end of its rounds before
}
BUSY_S = 20.0  # for a busy machine to run what is ready: without a deadline it takes for ever


@pytest.mark.parametrize(
    ("kind", "victim", "phase"),
    [
        ("star", 1, "flight"),
        pytest.param("shm", 0, "acknowledge", marks=pytest.mark.ci),
        *(
            pytest.param(kind, victim, phase, marks=pytest.mark.long)
            for kind in ("star", "chain", "shm", "gloo")
            for victim in (0, 1)
            for phase in STOPS
        ),
    ],
)
def test_I50_R86_every_other_rank_returns_by_the_deadline_and_names_the_stopped_one(
    kind: str, victim: int, phase: str
) -> None:
    """Without the deadline they would wait for ever: a stopped process keeps its connections."""
    options = {"timeout_s": STOP_TIMEOUT_S, "stops": {victim: phase}}
    with group(3, kind, 1, **options) as ranks:
        _, status = os.waitpid(ranks[victim].process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        begin_s = time.monotonic()
        others = [rank for rank in ranks if rank is not ranks[victim]]
        ends = [rank.wait_for("end") for rank in others]
        limit_s = 1.1 * STOPS[phase] * STOP_TIMEOUT_S + BUSY_S
        assert time.monotonic() - begin_s < limit_s
        for rank, end in zip(others, ends, strict=True):
            done = [line for line in rank.said if line["phase"] == "done"]
            if end["phase"] == "end":
                found = [(line["failed"], line["is_right"]) for line in done]
                assert found == [([victim], True)], [one.said for one in ranks]
            else:
                assert (end["phase"], done) == ("error", [])
                assert end["ranks"] == [victim] or f"rank {victim}" in end["error"]
        if victim == 1 and kind != "gloo" and STOPS[phase] > 1 and phase not in ("open", "agree"):
            assert [end["phase"] for end in ends] == ["end", "end"], "the others finish"


def test_I54_R87_many_start_at_once() -> None:
    """Rank 0 listens at a port that is bound once; 15 others come when they like."""
    with group(16, "star", 1) as ranks:
        assert [rank.wait_for("end")["phase"] for rank in ranks] == ["end"] * 16
