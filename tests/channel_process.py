"""One rank of a transfer in a process of its own: prints what became of it as a line of JSON.

With a phase as the last argument it stops itself there, as by SIGSTOP: `open`, `agree`, `ready`,
`flight` (with buckets under way) or `acknowledge`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Channel, Control, Hub, connect
from gymfast.channels.gloo import open_gloo
from gymfast.channels.shm import open_shm
from gymfast.channels.tcp import open_tcp
from gymfast.errors import GymfastError

NUM_TENSORS, TENSOR_BYTES, BUCKET_BYTES = 8, 3_000_000, 1 << 20
METHODS = {"agree": "agree", "ready": "_refused", "acknowledge": "_acknowledge"}
START_S = 60.0  # for processes to start on a busy machine


def tensors_of(version: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(version)
    return {f"t{i}": rng.integers(0, 256, TENSOR_BYTES, dtype=np.uint8) for i in range(NUM_TENSORS)}


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class StopsInFlight(dict[str, Any]):
    """Tensors of a rank that stops while it packs or unpacks one of the later buckets."""

    num_left = 8

    def __getitem__(self, name: str) -> Any:
        self.num_left -= 1
        if self.num_left == 0:
            stop()
        return super().__getitem__(name)


def stops_before(owner: object, method: str) -> None:
    """Has the process stop when this method of an object is called."""
    original = getattr(owner, method)

    def stopping(*arguments: Any, **options: Any) -> Any:
        stop()
        return original(*arguments, **options)

    setattr(owner, method, stopping)


def open_channel(control: Control, kind: str, timeout_s: float) -> Channel:
    if kind == "shm":
        return open_shm(control, timeout_s=timeout_s)
    if kind == "gloo":
        return open_gloo(control, timeout_s=timeout_s)
    fanout = {"star": None, "chain": 1, "tree": 2}[kind]
    return open_tcp(control, fanout=fanout, timeout_s=timeout_s, depth=4)


def work(
    control: Control, kind: str, timeout_s: float, num_versions: int, stop_at: str = ""
) -> None:
    share = [BucketTensor(f"t{i}", "U8", (TENSOR_BYTES,), TENSOR_BYTES) for i in range(NUM_TENSORS)]
    for version in range(num_versions):
        control.form(START_S if version == 0 else timeout_s)
        say(phase="formed", version=version, ranks=list(control.ranks))
        if stop_at == "open":
            stop()
        with contextlib.closing(open_channel(control, kind, timeout_s)) as channel:
            options = {"timeout_s": timeout_s}
            transfer = BucketTransfer(control, channel, {0: share}, BUCKET_BYTES, **options)
            if method := METHODS.get(stop_at):
                stops_before(transfer, method)
            transfer.agree()
            say(phase="agreed", version=version)
            expected = tensors_of(version)
            mine = {name: np.zeros_like(tensor) for name, tensor in expected.items()}
            if control.rank == 0:
                mine = expected
            if stop_at == "flight":
                mine = StopsInFlight(mine)
            report = transfer.run(version, mine)
        is_right = all((mine[name] == expected[name]).all() for name in mine)
        say(phase="done", version=version, failed=sorted(report.failed), is_right=is_right)


def main(rank: int, port: int, num_ranks: int, *settings: Any) -> None:
    if settings[0] == "gloo":
        importlib.import_module("torch.distributed")  # takes longer than a time-out
    begin_s = time.monotonic()
    try:
        if rank == 0:
            hub = Hub(port=port)
            say(phase="listening", port=hub.port)
            hub.control.wait_for(num_ranks, START_S)
            work(hub.control, *settings)
        else:
            work(connect(("127.0.0.1", port), rank, timeout_s=START_S), *settings)
        say(phase="end", seconds=time.monotonic() - begin_s)
    except GymfastError as error:
        named = list(getattr(error, "ranks", ()))
        say(phase="error", error=str(error), kind=type(error).__name__, ranks=named)


if __name__ == "__main__":
    rank, port, num_ranks, kind, timeout_s, versions, stop_at = sys.argv[1:]
    main(int(rank), int(port), int(num_ranks), kind, float(timeout_s), int(versions), stop_at)
