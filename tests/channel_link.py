"""One rank at a node of a shaped network: makes transfers, prints what became of them as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import time

import numpy as np

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Control, Hub, connect, line
from gymfast.channels.line import Message
from gymfast.channels.tcp import open_tcp
from gymfast.errors import GymfastError

KEY = b"a key of some length"
BUCKET_BYTES = 1 << 16


class Ear:
    """How long signs of life took from rank to rank, in seconds; all ranks share one clock."""

    def __init__(self, control: Control) -> None:
        self.delays: list[float] = []
        pack, take = line.pack, control._take

        def stamp(message: Message) -> bytes:
            now_s = time.monotonic()
            return pack(Message("alive", value=now_s) if message.kind == "alive" else message)

        def note(peer: int, message: Message) -> None:
            if message.kind == "alive" and message.value is not None:
                self.delays.append(time.monotonic() - message.value)
            take(peer, message)

        line.pack, control._take = stamp, note


def main(rank: int, num_ranks: int, host: str, root: str, size: int, count: int) -> None:
    timeout_s = 60 + size / 1e5
    if rank == 0:
        hub = Hub(host=host, key=KEY)
        print(json.dumps({"port": hub.port}), flush=True)
        control = hub.control
        control.wait_for(num_ranks, timeout_s)
    else:
        port = int(sys.stdin.readline())
        control = connect((root, port), rank, key=KEY, timeout_s=timeout_s)
    control.form(timeout_s)
    ear = Ear(control)
    share = [BucketTensor("t", "U8", (size,), size), BucketTensor("b", "U8", (99,), 99)]
    options = {"key": KEY, "fanout": 1, "streams": 2, "depth": 4, "timeout_s": timeout_s}
    num_right, begin_s = 0, time.monotonic()
    with contextlib.closing(open_tcp(control, host=host, **options)) as channel:
        for version in range(count):
            transfer = BucketTransfer(
                control, channel, {0: share}, BUCKET_BYTES, timeout_s=timeout_s
            )
            transfer.agree()
            rng = np.random.default_rng(version)
            sent = {t.name: rng.integers(0, 256, t.num_bytes, dtype=np.uint8) for t in share}
            mine = sent if rank == 0 else {n: np.zeros_like(m) for n, m in sent.items()}
            transfer.run(version, mine).require_all()
            num_right += all((mine[name] == sent[name]).all() for name in sent)
    seconds = time.monotonic() - begin_s
    print(json.dumps({"right": num_right, "seconds": seconds, "delays": ear.delays}), flush=True)


if __name__ == "__main__":
    rank, num_ranks, host, root, size, count = sys.argv[1:]
    try:
        main(int(rank), int(num_ranks), host, root, int(size), int(count))
    except GymfastError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
