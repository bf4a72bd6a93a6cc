"""One rank that transfers version after version and makes the group anew after each loss.

Prints a line of JSON for each formation, version and error. A rank that is killed is started again
by whoever killed it; rank 0 then listens at the port that the one before it had.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from typing import Any

import numpy as np
from channel_process import BUCKET_BYTES, NUM_TENSORS, START_S, open_channel, say

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Control, Hub, connect
from gymfast.errors import GymfastError

TENSOR_BYTES = 500_000
SHARE = [BucketTensor(f"t{i}", "U8", (TENSOR_BYTES,), TENSOR_BYTES) for i in range(NUM_TENSORS)]


def tensors_of(version: int) -> dict[str, np.ndarray]:
    """Cheap, and unlike those of any version near it."""
    ramp = np.arange(TENSOR_BYTES, dtype=np.uint32)
    return {
        tensor.name: (ramp * (2 * version + 1) + number).astype(np.uint8)
        for number, tensor in enumerate(SHARE)
    }


def one_version(control: Control, kind: str, number: int, timeout_s: float) -> None:
    if control.form(timeout_s) == (0,):
        time.sleep(0.05)  # alone there is nothing to send
        return
    found = control.gather(os.getpid(), timeout_s)
    version, processes = control.share([number, sorted(found.values())], timeout_s)
    say(phase="formed", version=version, processes=processes)
    with contextlib.closing(open_channel(control, kind, timeout_s)) as channel:
        transfer = BucketTransfer(
            control, channel, {0: SHARE}, BUCKET_BYTES // 4, timeout_s=timeout_s
        )
        transfer.agree()
        expected = tensors_of(version)
        mine: dict[str, Any] = {name: np.zeros_like(tensor) for name, tensor in expected.items()}
        report = transfer.run(version, expected if control.rank == 0 else mine)
    is_right = control.rank == 0 or all((mine[name] == expected[name]).all() for name in mine)
    say(phase="done", version=version, failed=sorted(report.failed), is_right=is_right)


def main(rank: int, port: int, kind: str, timeout_s: float) -> None:
    if kind == "gloo":
        importlib.import_module("torch.distributed")  # takes longer than a time-out
    hub = Hub(port=port) if rank == 0 else None
    if hub is not None:
        say(phase="listening", port=hub.port)
    control = hub.control if hub else connect(("127.0.0.1", port), rank, timeout_s=START_S)
    number = 0
    while True:
        try:
            one_version(control, kind, number, timeout_s)
        except GymfastError as error:
            say(phase="error", error=str(error), ranks=list(getattr(error, "ranks", ())))
            if 0 in control.lost:
                control.close()
                control = connect(("127.0.0.1", port), rank, timeout_s=START_S)
        number += 1


if __name__ == "__main__":
    rank, port, _, kind, timeout_s, *_ = sys.argv[1:]
    main(int(rank), int(port), kind, float(timeout_s))
