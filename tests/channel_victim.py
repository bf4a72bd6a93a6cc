"""A rank in a process of its own that kills itself in a phase of a transfer; and what it does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Control, Hub, TransferReport, connect
from gymfast.channels.tcp import open_tcp

Phase = Literal["connect", "open", "agree", "ready", "bucket", "acknowledge", "close", "never"]
PHASES: tuple[Phase, ...] = ("connect", "open", "agree", "ready", "bucket", "acknowledge", "close")
SIZE, BUCKET_BYTES = 1_000_000, 1 << 16
SHARE = [BucketTensor("t", "U8", (SIZE,), SIZE)]
TIMEOUT_S = 6.0


def sent() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(owner: Any, name: str, call: int = 1) -> None:
    """Has a method kill the process when it is called for the `call`-th time."""
    method, count = getattr(owner, name), [0]

    def counted(*args: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == call:
            die()
        return method(*args, **options)

    setattr(owner, name, counted)


def take_part(control: Control, phase: Phase = "never") -> tuple[TransferReport, np.ndarray]:
    """One transfer from rank 0, in a star; ends in a phase."""
    deaths: dict[Phase, Callable[[], None]] = {
        "open": lambda: dying(control, "share", 2),
        "agree": lambda: dying(transfer, "agree"),
        "ready": lambda: dying(transfer, "_move"),
        "bucket": lambda: dying(channel, "finish", 5),
        "acknowledge": lambda: dying(transfer, "_acknowledge"),
        "close": lambda: dying(channel, "close"),
    }
    control.form(TIMEOUT_S)
    if phase == "open":
        deaths[phase]()
    channel = open_tcp(control, streams=2, timeout_s=TIMEOUT_S)
    try:
        transfer = BucketTransfer(
            control, channel, {0: SHARE}, BUCKET_BYTES, timeout_s=TIMEOUT_S + 2
        )
        if phase in deaths:
            deaths[phase]()
        transfer.agree()
        mine = sent() if control.rank == 0 else np.zeros(SIZE, np.uint8)
        return transfer.run(1, {"t": mine}), mine
    finally:
        channel.close()


def main(rank: int, port: int, num_ranks: int, phase: Phase) -> None:
    if rank == 0:
        hub = Hub()
        print(hub.port, flush=True)
        control = hub.control
        control.wait_for(num_ranks, 60)
    else:
        control = connect(("127.0.0.1", port), rank, timeout_s=60)
    if phase == "connect":
        die()
    take_part(control, phase)
    print("it did not die", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])  # type: ignore[arg-type]
