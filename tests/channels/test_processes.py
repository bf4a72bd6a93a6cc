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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "channel_process.py"
TIMEOUT_S = 6.0


class Rank:
    """A rank in a process; what it says can be waited for."""

    def __init__(self, rank: int, port: int, num_ranks: int, kind: str, versions: int) -> None:
        arguments = [rank, port, num_ranks, kind, TIMEOUT_S, versions]
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), *map(str, arguments)],
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
            line = self._lines.get(timeout=max(deadline_s - time.monotonic(), 0.01))
            if line is None:
                return self.said[-1] if self.said else {"phase": "silent"}
            self.said.append(line)
            if line["phase"] == phase:
                return line

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)


@contextmanager
def group(num_ranks: int, kind: str, versions: int) -> Iterator[list[Rank]]:
    ranks = [Rank(0, 0, num_ranks, kind, versions)]
    try:
        port = ranks[0].wait_for("listening")["port"]
        ranks += [Rank(rank, port, num_ranks, kind, versions) for rank in range(1, num_ranks)]
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


@pytest.mark.parametrize("kind", ["star", "shm"])
@pytest.mark.parametrize("victim", [0, 1])
def test_I50_a_stopped_process_is_noticed_by_the_deadline(kind: str, victim: int) -> None:
    with group(3, kind, 50) as ranks:
        ranks[victim].wait_for("agreed")
        os.kill(ranks[victim].process.pid, signal.SIGSTOP)
        begin_s = time.monotonic()
        if victim == 0:
            ends = [rank.wait_for("end") for rank in ranks[1:]]
            assert [end["phase"] for end in ends] == ["error"] * 2
        else:
            while all(victim not in line.get("failed", []) for line in ranks[0].said):
                assert ranks[0].wait_for("done")["phase"] == "done"
        # The sign of life is missed after 10 s; each wait of a transfer has its own deadline.
        assert time.monotonic() - begin_s < 10 + 3 * TIMEOUT_S
        os.kill(ranks[victim].process.pid, signal.SIGCONT)


def test_I54_R87_many_start_at_once() -> None:
    """Rank 0 listens at a port that is bound once; 15 others come when they like."""
    with group(16, "star", 1) as ranks:
        assert [rank.wait_for("end")["phase"] for rank in ranks] == ["end"] * 16
