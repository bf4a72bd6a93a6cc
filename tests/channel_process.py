"""One rank of a transfer in a process of its own: prints what became of it as a line of JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import time

import numpy as np

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Control, Hub, connect
from gymfast.channels.shm import open_shm
from gymfast.channels.tcp import open_tcp
from gymfast.errors import GymfastError

NUM_TENSORS, TENSOR_BYTES, BUCKET_BYTES = 8, 3_000_000, 1 << 20
START_S = 60.0  # for processes to start on a busy machine


def tensors_of(version: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(version)
    return {f"t{i}": rng.integers(0, 256, TENSOR_BYTES, dtype=np.uint8) for i in range(NUM_TENSORS)}


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def work(control: Control, kind: str, timeout_s: float, num_versions: int) -> None:
    share = [BucketTensor(f"t{i}", "U8", (TENSOR_BYTES,), TENSOR_BYTES) for i in range(NUM_TENSORS)]
    for version in range(num_versions):
        control.form(START_S if version == 0 else timeout_s)
        say(phase="formed", version=version, ranks=list(control.ranks))
        if kind == "shm":
            channel = open_shm(control, timeout_s=timeout_s)
        else:
            fanout = {"star": None, "chain": 1, "tree": 2}[kind]
            channel = open_tcp(control, fanout=fanout, timeout_s=timeout_s, depth=4)
        with contextlib.closing(channel):
            options = {"timeout_s": timeout_s}
            transfer = BucketTransfer(control, channel, {0: share}, BUCKET_BYTES, **options)
            transfer.agree()
            say(phase="agreed", version=version)
            expected = tensors_of(version)
            mine = {name: np.zeros_like(tensor) for name, tensor in expected.items()}
            if control.rank == 0:
                mine = expected
            report = transfer.run(version, mine)
        is_right = all((mine[name] == expected[name]).all() for name in mine)
        say(phase="done", version=version, failed=sorted(report.failed), is_right=is_right)


def main(rank: int, port: int, num_ranks: int, kind: str, timeout_s: float, versions: int) -> None:
    begin_s = time.monotonic()
    try:
        if rank == 0:
            hub = Hub(port=port)
            say(phase="listening", port=hub.port)
            hub.control.wait_for(num_ranks, START_S)
            work(hub.control, kind, timeout_s, versions)
        else:
            work(connect(("127.0.0.1", port), rank, timeout_s=START_S), kind, timeout_s, versions)
        say(phase="end", seconds=time.monotonic() - begin_s)
    except GymfastError as error:
        say(phase="error", error=str(error), kind=type(error).__name__)


if __name__ == "__main__":
    rank, port, num_ranks, kind, timeout_s, versions = sys.argv[1:]
    main(int(rank), int(port), int(num_ranks), kind, float(timeout_s), int(versions))
