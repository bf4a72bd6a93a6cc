"""Declared budgets of memory, held by a publisher and a subscriber in processes of their own (I60,
I61), and what a small budget changes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from object_double import serve_bucket
from object_settings import s3_settings
from sync.harness import assert_same, history, publisher, reader, zeros_like

from gymfast.errors import BudgetError
from gymfast.stores.memory import MemoryStore
from gymfast.sync import budget as budgets
from gymfast.sync import objects
from gymfast.sync.budget import SECTION_BYTES, Reading

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs kernel feature /proc")
MIB = 1 << 20
SCRATCH = 48 * MIB  # of the codec, for its one thread: docs/wire-format.md section 9
WORK = Path(__file__).parents[1] / "sync_memory_work.py"


@dataclass
class Side:
    """One of the processes; `first` is what it holds before it has a publisher or subscriber."""

    process: subprocess.Popen[str]
    first: int = 0

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return json.loads(line)

    def step(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        seen = self.answer()
        return seen | {"peak": seen["peak"] - self.first}


@contextmanager
def sides(
    kind: str, tmp_path: Path, publish: tuple[object, ...], follow: tuple[object, ...]
) -> Iterator[tuple[Side, Side]]:
    """Publisher and subscriber of a run in a folder, or in a bucket that this process serves."""
    with ExitStack() as stack:
        # One arena: those of glibc grow with each new thread for a while, and leak nothing.
        store, environment = f"file:{tmp_path}", os.environ | {"MALLOC_ARENA_MAX": "1"}
        if kind == "s3":
            bucket = stack.enter_context(serve_bucket())
            store, environment = "s3://bucket/a", environment | s3_settings(bucket.endpoint)
        made = []
        for name, words in (("publish", publish), ("follow", follow)):
            command = [sys.executable, str(WORK), name, store, *map(str, words)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen(command, env=environment, **pipes))
            stack.callback(process.kill)
            made.append(Side(process))
        for side in made:
            side.first = side.answer()["memory"]
        yield made[0], made[1]


@linux
@pytest.mark.ci
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_I60_publisher_and_subscriber_keep_budgets_that_just_suffice(
    kind: str, tmp_path: Path
) -> None:
    """A second copy of the full state, anywhere, would be too much."""
    mib, object_mib = 80, 24
    budget = mib + 2 * object_mib + SECTION_BYTES // MIB + 1
    staging = mib + 18  # the frame, and one piece of 8 MiB in two copies
    with sides(kind, tmp_path, (mib, object_mib, budget), (mib, staging)) as (source, follower):
        kinds = []
        for line in ("full", "sparse", "dense"):
            sent = source.step(line)
            came = follower.step(str(sent["version"]))
            kinds.append((sent["kind"], came["kind"]))
            assert mib * MIB // 2 < sent["peak"] <= 1.1 * budget * MIB
            assert came["peak"] <= 1.1 * (staging * MIB + SCRATCH)
    assert kinds[0] == ("anchor", "anchor")
    assert kinds[1] == ("delta", "deltas")
    assert kinds[2][0] == "anchor"  # its way back does not fit


@linux
@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_I60_I61_three_hundred_versions_within_budget_leave_nothing_behind(
    kind: str, tmp_path: Path
) -> None:
    mib, object_mib, num_versions, num_first = 16, 12, 300, 20
    budget = mib + 2 * object_mib + SECTION_BYTES // MIB + 24
    staging = mib + 20
    seen: dict[str, list[dict[str, Any]]] = {"publisher": [], "subscriber": []}
    with sides(kind, tmp_path, (mib, object_mib, budget), (mib, staging)) as (source, follower):
        for number in range(num_versions):
            sent = source.step("dense" if number % 7 == 3 else "sparse")
            seen["publisher"].append(sent)
            seen["subscriber"].append(follower.step(str(sent["version"])))
    report = {}
    for name, limit in (("publisher", budget * MIB), ("subscriber", staging * MIB + SCRATCH)):
        steps = seen[name]
        peak = max(step["peak"] for step in steps)
        assert peak <= 1.1 * limit
        after = steps[num_first:]
        # What the heap keeps for the next full state it keeps from the first one on, at version 15.
        early, late = after[:70], after[-70:]
        slopes = {
            what: (
                statistics.median(step[what] for step in late)
                - statistics.median(step[what] for step in early)
            )
            / (len(after) - 70)
            for what in ("memory", "files", "tasks")
        }
        report[name] = {"peak_mib": peak / MIB, "limit_mib": limit / MIB, **slopes}
        print(name, report[name])
        assert slopes["memory"] <= 10_000
        assert max(step["files"] for step in late) <= max(step["files"] for step in early)
        assert max(step["tasks"] for step in late) <= max(step["tasks"] for step in early)
    assert {step["kind"] for step in seen["subscriber"]} >= {"anchor", "deltas"}


class FarStore(MemoryStore):
    """Wants reads ahead, and notes how long and how many at once they are."""

    num_ahead = 4

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []
        self.most = self._now = 0
        self._lock = threading.Lock()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._lock:
            self.lengths.append(length)
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            return super().get_range(key, start, length)
        finally:
            with self._lock:
                self._now -= 1


def test_reading_ahead_is_what_the_budget_leaves_room_for() -> None:
    piece = 8 * MIB
    assert Reading.within(None, 4, piece) == Reading(4, piece)
    assert Reading.within(10**12, 0, piece) == Reading(0, piece)
    assert Reading.within(0, 4, 1000) == Reading(0, 1000)
    for room, num_ahead, piece_bytes in (
        *((10 * piece, 4, piece), (10 * piece - 1, 3, piece), (4 * piece, 1, piece)),
        *((2 * piece, 0, piece), (2 * piece - 2, 0, piece - 1), (MIB, 0, MIB // 2)),
        *((MIB // 2, 0, MIB // 4), (1, 0, MIB // 4), (0, 0, MIB // 4)),
    ):
        found = Reading.within(room, 4, piece)
        assert found == Reading(num_ahead, piece_bytes)
        assert found.memory_bytes <= max(room, MIB // 2)


def test_a_small_budget_reads_less_ahead_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects, "_READ_BYTES", 10_000)
    monkeypatch.setattr(budgets, "_LEAST_PIECE_BYTES", 100)
    store, states = FarStore(), history(0, size=20_000)
    source = publisher(store)
    frame_bytes = source.publish(states[0]).frame_bytes
    for room, longest, most in ((200_000, 10_000, 4), (20_000, 10_000, 1), (4_000, 2_000, 1)):
        store.lengths.clear()
        store.most = 0
        live = zeros_like(states[0])
        reader(store, live, max_staging_bytes=frame_bytes + room).pull()
        assert_same(live, states[0])
        assert longest // 2 <= max(store.lengths) <= longest
        assert store.most <= most
    with pytest.raises(BudgetError, match=f"the limit is {frame_bytes - 1} bytes"):
        reader(store, zeros_like(states[0]), max_staging_bytes=frame_bytes - 1).pull()


def test_what_an_upload_holds_counts_in_the_budget_of_a_publisher() -> None:
    store, weights = MemoryStore(), history(0, size=5000)[0]
    store.put_memory_bytes = 64 * MIB
    size = sum(value.nbytes for value in weights.values())
    needed = size + SECTION_BYTES + 2 * MIB
    text = rf"{MIB} for an object, {MIB} for its upload .* {needed} in all"
    with pytest.raises(BudgetError, match=text):
        publisher(store, object_bytes=MIB, memory_budget_bytes=needed - 1).publish(weights)
    publisher(store, object_bytes=MIB, memory_budget_bytes=needed).publish(weights)
