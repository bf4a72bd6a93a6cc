"""What transfers take of a process: prints peaks or growth as a line of JSON.

budget RANK PORT KIND MIB BUCKET_MIB: one of two ranks; the root makes its tensor as it is sliced,
the other drops it as it comes, so that nothing but buckets is in memory.
leak KIND NUM_TRANSFERS IS_LASTING: three ranks in threads, over one channel or new ones.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from channel_group import Controls, in_threads
from channel_process import open_channel

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Channel, Control, Hub, Loopback, connect

MIB = 1 << 20
START_S = 60.0
PATTERN = np.random.default_rng(0).integers(0, 256, MIB + 4096, dtype=np.uint8)
WORD = 8


def field(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{name}:\s+(\d+)", text)
    assert found is not None
    return 1024 * int(found[1])


def fill(memory: np.ndarray, begin: int) -> None:
    """What lies at some place of the tensor: a pattern that begins elsewhere in each MiB."""
    for at in range(0, len(memory), MIB):
        part = memory[at : at + MIB]
        first = (begin + at) // MIB % 4096
        part[:] = PATTERN[first : first + len(part)]
        part[: min(WORD, len(part))] = np.array([begin + at]).view(np.uint8)[: len(part)]


class Made:
    """A tensor whose bytes exist while somebody has a slice of them."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, part: slice) -> np.ndarray:
        memory = np.empty(part.stop - part.start, np.uint8)
        fill(memory, part.start)
        return memory


class Checked:
    """A tensor that looks at its slices when they have been filled, and drops them."""

    def __init__(self, num_bytes: int, num_under_way: int) -> None:
        self._num_bytes, self._num_under_way = num_bytes, num_under_way
        self._slices: deque[tuple[int, np.ndarray]] = deque()
        self.num_right = 0

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, part: slice) -> np.ndarray:
        self.check(self._num_under_way - 1)
        self._slices.append((part.start, np.empty(part.stop - part.start, np.uint8)))
        return self._slices[-1][1]

    def check(self, num_left: int = 0) -> None:
        while len(self._slices) > num_left:
            begin, found = self._slices.popleft()
            for at in range(0, len(found), MIB):
                expected = np.empty(min(MIB, len(found) - at), np.uint8)
                fill(expected, begin + at)
                self.num_right += int((found[at : at + MIB] == expected).sum())


def budget(rank: str, port: str, kind: str, mib: str, bucket_mib: str) -> dict[str, int]:
    size, bucket_bytes, small = int(mib) * MIB, int(bucket_mib) * MIB, 50_000
    if rank == "0":
        hub = Hub(port=int(port))
        print(json.dumps({"port": hub.port}), flush=True)
        hub.control.wait_for(2, START_S)
        control: Control = hub.control
    else:
        control = connect(("127.0.0.1", int(port)), 1, timeout_s=START_S)
    control.form(START_S)
    channel = open_channel(control, kind, START_S)
    num_small = 2 * channel.depth * bucket_bytes // small  # many small ones, for buckets in arenas
    names = [f"small{i}" for i in range(num_small)]
    share = [BucketTensor("large", "U8", (size,), size)]
    share += [BucketTensor(name, "U8", (small,), small) for name in names]
    transfer = BucketTransfer(control, channel, {0: share}, bucket_bytes, timeout_s=START_S)
    one = np.ones(small, np.uint8)
    tensors: dict[str, Any] = dict.fromkeys(names, one)
    large = Made(size) if rank == "0" else Checked(size, channel.depth)
    warm = [BucketTensor("warm", "U8", (small,), small)]
    BucketTransfer(control, channel, {0: warm}, 256).run(0, {"warm": one})
    transfer.agree()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
    before = field("VmHWM")
    transfer.run(1, {"large": large, **tensors})
    seen = {"peak": field("VmHWM") - before, "staging": transfer.staging_bytes}
    if isinstance(large, Checked):
        large.check()
        seen["num_right"] = large.num_right
    # One slice of the large tensor for each bucket under way is this script's own.
    return seen | {"own": channel.depth * bucket_bytes}


def counts() -> tuple[int, int, int]:
    """Resident bytes, descriptors, threads; a thread that was joined is listed for a moment."""
    num_tasks = []
    for _ in range(50):
        num_tasks.append(len(list(Path("/proc/self/task").iterdir())))
        time.sleep(0.01)
    return field("VmRSS"), len(list(Path("/proc/self/fd").iterdir())), min(num_tasks)


def leak(kind: str, num_transfers: str, is_lasting: str) -> dict[str, Any]:
    controls = Controls(3)
    share = [BucketTensor(f"t{i}", "U8", (n,), n) for i, n in enumerate([70_000] * 8 + [3 * MIB])]

    def opened() -> list[Channel]:
        if kind == "loopback":
            group = Loopback(3)
            return [group.channel(rank) for rank in range(3)]
        return in_threads(*(partial(open_channel, c, kind, START_S) for c in controls.all))

    def made(channels: list[Channel]) -> list[BucketTransfer]:
        pairs = zip(controls.all, channels, strict=True)
        return [BucketTransfer(c, channel, {0: share}, MIB) for c, channel in pairs]

    memory = [{t.name: np.full(t.num_bytes, r, np.uint8) for t in share} for r in range(3)]
    channels = opened()
    ranks = made(channels)
    seen = []
    for number in range(int(num_transfers)):
        if not int(is_lasting):
            in_threads(*(channel.close for channel in channels))
            controls.form()
            channels = opened()
            ranks = made(channels)
        for tensor in memory[0].values():
            tensor += 1
        pairs = zip(ranks, memory, strict=True)
        reports = in_threads(*(partial(r.run, number, m) for r, m in pairs))
        assert [report.failed for report in reports] == [{}] * 3
        if number % 10 == 9:
            seen.append(counts())
    assert all((memory[2][name] == tensor).all() for name, tensor in memory[0].items())
    return {"counts": seen}


if __name__ == "__main__":
    works = {"budget": budget, "leak": leak}
    print(json.dumps(works[sys.argv[1]](*sys.argv[2:])), flush=True)
    os._exit(0)  # nobody waits for lines to close
