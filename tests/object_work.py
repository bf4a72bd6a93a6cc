"""A trainer that publishes through an address until it is killed: for tests of crashes."""

from __future__ import annotations

import sys

import numpy as np

from gymfast.stores import open_store
from gymfast.sync import Publisher

RUN = "demo"


def state_of(version: int) -> dict[str, np.ndarray]:
    """The weights of that version."""
    weights = {"a": np.arange(60_000, dtype=np.uint16), "b": np.zeros((50, 70), np.float32)}
    weights["a"][version::997] += version + 1
    weights["b"][version % 50] = version
    return weights


def publish_forever(url: str) -> None:
    """One version after the other; a line on stdout after each."""
    source = Publisher(open_store(url), RUN, threads=1, keep=3, anchor_every=4)
    version = 0 if source.version is None else source.version + 1
    while True:
        report = source.publish(state_of(version))
        assert report.version == version
        print(version, flush=True)
        version += 1


if __name__ == "__main__":
    publish_forever(sys.argv[1])
