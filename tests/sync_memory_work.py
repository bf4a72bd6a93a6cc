"""A publisher or a subscriber that measures its own memory, a version for each line on stdin.

publish STORE MIB OBJECT_MIB BUDGET_MIB: publishes versions 0, 1, ... of so many MiB of weights.
follow STORE MIB STAGING_MIB IS_FRESH: installs each into live tensors.
Each line of stdin is a step; each answer is a line of JSON: resident bytes, files, threads, and the
peak since the line before. `{"budget": ...}` comes first, with what the process holds by then.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from pathlib import Path

import numpy as np

import gymfast.delta as delta
from gymfast.stores import open_store
from gymfast.sync import LiveTarget, Publisher, Subscriber

MIB = 1 << 20
THREADS = 1
NUM_TENSORS = 8


def field(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now


def tell(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def tell_counts(**more: object) -> None:
    gc.collect()
    tasks = []
    for _ in range(10):  # a thread that was joined is still listed for a moment
        tasks.append(len(list(Path("/proc/self/task").iterdir())))
        time.sleep(0.001)
    files = len(list(Path("/proc/self/fd").iterdir()))
    tell(memory=field("VmRSS"), peak=field("VmHWM"), files=files, tasks=min(tasks), **more)
    reset_peak()


def made(mib: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    units = mib * MIB // 2 // NUM_TENSORS
    return {f"w{i}": rng.integers(0, 2**16, units, np.uint16) for i in range(NUM_TENSORS)}


def warm(store: str) -> None:
    """What the first use of the codec and the store takes of a process is no part of a budget."""
    delta.apply({}, delta.encode(None, {"warm": np.ones(9)}), threads=THREADS)
    list(open_store(store).list("none/"))
    gc.collect()


def publish(store: str, mib: str, object_mib: str, budget_mib: str) -> None:
    weights, rng = made(int(mib)), np.random.default_rng(1)
    warm(store)
    reset_peak()
    tell(memory=field("VmRSS"))
    budget = int(float(budget_mib) * MIB)
    source = Publisher(
        store,
        "run",
        threads=THREADS,
        keep=20,
        anchor_every=10,
        object_bytes=int(float(object_mib) * MIB),
        memory_budget_bytes=budget,
    )
    for number, line in enumerate(sys.stdin):
        for array in weights.values():
            count = array.size // 2 if line.startswith("dense") else 200
            array[rng.integers(0, array.size, count)] ^= 1
        report = source.publish(weights, anchor=number % 25 == 15)
        tell_counts(version=report.version, kind=report.kind)


def follow(store: str, mib: str, staging_mib: str) -> None:
    weights = {name: np.zeros_like(array) for name, array in made(int(mib)).items()}
    for array in weights.values():
        array.fill(1)  # resident from the start
    warm(store)
    gc.collect()
    reset_peak()
    tell(memory=field("VmRSS"))
    limit = int(float(staging_mib) * MIB)
    target = LiveTarget(weights, threads=THREADS)
    follower = Subscriber(store, "run", target, max_staging_bytes=limit)
    for line in sys.stdin:
        report = follower.wait(int(line), 60.0)
        tell_counts(version=report.version, kind=report.kind)


if __name__ == "__main__":
    works = {"publish": publish, "follow": follow}
    works[sys.argv[1]](*sys.argv[2:])
