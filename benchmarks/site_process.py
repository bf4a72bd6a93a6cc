"""One process of benchmarks.site: the server of a store, or an engine that follows a run.

    site_process.py store ROOT HOST
    site_process.py engine STORE RUN NUM_BYTES RELAY_TIMEOUT_S RETRY_AFTER_S

Each says what it does in lines of JSON. An engine is told by lines too: a version to wait for, or
"pull" for one look; its answer has the SHA-256 of what it holds then, or the error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from gymfast.errors import GymfastError
from gymfast.key_file import read_key_file
from gymfast.stores import FileStore, fallback, open_store
from gymfast.stores.store_server import StoreServer
from gymfast.sync import LiveTarget, Subscriber

TENSOR = "w"
WAIT_S = 240.0


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def serve_store(root: str, host: str) -> None:
    key = read_key_file(os.environ["GYMFAST_RELAY_KEY_FILE"])
    with StoreServer(host, 0, FileStore(Path(root)), key) as server:
        say(url=server.url)
        server.serve_forever()


def follow(url: str, run: str, num_bytes: int, relay_timeout_s: float, retry_s: float) -> None:
    fallback.RETRY_AFTER_S = retry_s
    weights = np.zeros(num_bytes // 2, np.uint16)
    store = open_store(url, relay_timeout_s=relay_timeout_s)
    with Subscriber(store, run, LiveTarget({TENSOR: weights}, threads=1)) as subscriber:
        say(url=url)
        for line in sys.stdin:
            begin_s, error = time.monotonic(), ""
            try:
                if line.strip() == "pull":
                    subscriber.pull()
                else:
                    subscriber.wait(int(line), timeout_s=WAIT_S)
            except GymfastError as caught:
                error = f"{type(caught).__name__}: {caught}"
            say(
                version=subscriber.version,
                sha256=hashlib.sha256(weights).hexdigest(),
                seconds=time.monotonic() - begin_s,
                end_s=time.monotonic(),
                error=error,
            )


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "store":
        serve_store(*arguments)
    else:
        follow(*arguments[:2], int(arguments[2]), *map(float, arguments[3:]))
