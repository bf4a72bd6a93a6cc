"""What transfers take of a process and give back: I60, I61, R90, R92, R94."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "channel_resources.py"
MIB = 1 << 20
RING_BYTES = 4 * MIB  # of a rank that sends in shared memory, mapped by all: docs/transfer.md
NOISE_BYTES = MIB  # stacks of threads, pieces of the heap
MAX_GROWTH_BYTES = 10_000  # of each transfer: I61

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs kernel feature /proc")


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    # One heap for all threads: with several, how full each is depends on which thread got which.
    # torch keeps its last 2000 operations otherwise, about 1 kB each: growth that ends later.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "TORCH_FR_BUFFER_SIZE": "0"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def result(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    try:
        said, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


LARGE = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("kind", "size_mib", "bucket_mib"),
    [
        ("star", 100, 2),
        pytest.param("shm", 100, 2, marks=pytest.mark.ci),
        # 6 GiB, with 256 MiB or less for buckets, half of them staged
        *(pytest.param(kind, 6144, 32, marks=LARGE) for kind in ("star", "chain", "shm")),
    ],
)
def test_I60_R90_R92_the_peak_of_a_transfer_is_its_plan(
    kind: str, size_mib: int, bucket_mib: int
) -> None:
    """One tensor that is never whole in memory, and as many small ones as fill all arenas twice."""
    root = start("budget", 0, 0, kind, size_mib, bucket_mib)
    try:
        assert root.stdout is not None
        port = json.loads(root.stdout.readline())["port"]
        other = start("budget", 1, port, kind, size_mib, bucket_mib)
        received, sent = result(other, 600), result(root, 600)
    finally:
        root.kill()
    assert received["num_right"] == size_mib * MIB
    for seen in (received, sent):
        plan = seen["staging"] + seen["own"] + (RING_BYTES if kind == "shm" else 0)
        assert plan <= 256 * MIB + RING_BYTES
        assert seen["peak"] <= 1.1 * plan + NOISE_BYTES
        assert seen["peak"] > bucket_mib * MIB  # the measurement sees something


@pytest.mark.parametrize(
    ("kind", "num_transfers", "is_lasting"),
    [
        ("star", 40, 1),
        pytest.param("shm", 40, 0, marks=pytest.mark.ci),
        *(
            pytest.param(kind, 300, is_lasting, marks=[pytest.mark.long, pytest.mark.timeout(900)])
            for kind in ("loopback", "star", "chain", "shm", "gloo")
            for is_lasting in (1, 0)
        ),
    ],
)
def test_I61_R94_transfers_leave_no_memory_descriptor_or_thread_behind(
    kind: str, num_transfers: int, is_lasting: int
) -> None:
    """Over connections that last, and with a new formation and new ones for each transfer."""
    counts = result(start("leak", kind, num_transfers, is_lasting), 600)["counts"]
    num_first = 30 if num_transfers > 100 else 20
    (first_bytes, *first), (last_bytes, *last) = counts[num_first // 10 - 1], counts[-1]
    assert last == first
    allowed_bytes = MAX_GROWTH_BYTES * (num_transfers - num_first)
    noise_bytes = (4 if num_transfers > 100 else 1) * NOISE_BYTES
    assert last_bytes - first_bytes <= allowed_bytes + noise_bytes
    if num_transfers > 100:  # a leak grows all the time; the heap grows by some MB once or twice
        resident = [num_bytes for num_bytes, *_ in counts[num_first // 10 - 1 :]]
        assert median(b - a for a, b in pairwise(resident)) <= 10 * MAX_GROWTH_BYTES
