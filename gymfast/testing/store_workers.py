"""What the other processes of the store contract run; importable without pytest."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from gymfast.errors import ConflictError
from gymfast.stores import open_store
from gymfast.stores.base import Store

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue
    from multiprocessing.synchronize import Barrier

_DIGEST_BYTES = 32


def race_key(round_index: int) -> str:
    """The key that all writers of that round fight for."""
    return f"race/{round_index:06}"


def race(store: Store, writer: int, num_rounds: int, wait: Callable[[], object]) -> list[int]:
    """Rounds won by this writer; all writers start each round together."""
    won = []
    for index in range(num_rounds):
        wait()
        try:
            store.create(race_key(index), b"writer %d" % writer)
        except ConflictError:
            continue
        won.append(index)
    return won


def race_process(
    url: str, writer: int, num_rounds: int, barrier: Barrier, results: SimpleQueue[list[int]]
) -> None:
    """`race` in a process of its own; the rounds won go into the queue."""
    results.put(race(open_store(url), writer, num_rounds, barrier.wait))


def stamped(index: int, size_bytes: int) -> bytes:
    """An object that proves by itself that it is whole (`check_stamp`)."""
    body = b"%020d" % index * (size_bytes // 20)
    return hashlib.sha256(body).digest() + body


def check_stamp(blob: bytes) -> int:
    """The index in a stamped object; AssertionError if the object is torn."""
    digest, body = blob[:_DIGEST_BYTES], blob[_DIGEST_BYTES:]
    assert hashlib.sha256(body).digest() == digest, f"torn object of {len(blob)} bytes"
    return int(body[:20])


def write_forever(url: str, key: str, size_bytes: int) -> None:
    """Put stamped objects in pieces until killed; a line on stdout when the first is there."""
    store = open_store(url)
    index = 0
    while True:
        blob = stamped(index, size_bytes)
        pieces = [blob[at : at + 4096] for at in range(0, len(blob), 4096)]
        store.put(key, iter(pieces))
        if index == 0:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
        index += 1


if __name__ == "__main__":
    write_forever(sys.argv[1], sys.argv[2], int(sys.argv[3]))
