"""A site of several engines behind one slow link, with a relay and without it.

python -m benchmarks.relay, as root: bytes that the link carried for each byte of the objects, and
seconds from the commit of a version until the last engine holds it. Every engine is compared with
what was published before a row is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.environment import environment
from benchmarks.namespaces import PAYLOAD_RATIO, why_not
from benchmarks.site import RUN, Process, Sites
from benchmarks.site_process import TENSOR
from gymfast.stores import FileStore
from gymfast.sync import Publisher

WARM_UP = 1


@dataclass(frozen=True)
class Row:
    """One number of engines, with a relay or without."""

    num_engines: int
    has_relay: bool
    copies: float
    seconds: list[float]
    least_s: float

    @property
    def cells(self) -> list[str]:
        """The row of the table."""
        p10, p50, p90 = np.percentile(self.seconds, [10, 50, 90])
        how = "relay" if self.has_relay else "each from the store"
        return [
            str(self.num_engines), how, f"{self.copies:.3f}", f"{p50:.2f} ({p10:.2f}-{p90:.2f})",
            f"{self.least_s:.2f}", f"{p50 / self.least_s:.2f}",
        ]  # fmt: skip


HEAD = ["engines", "way", "copies over the link", "s to all, p10-p90", "one copy at line rate, s"]
HEAD += ["ratio"]


def measure(options: argparse.Namespace, num_engines: int, *, has_relay: bool) -> Row:
    """Publishes anchors of random bytes, one after the other, to engines that wait for them."""
    size = options.size_mib << 20
    rng = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        Sites(Path(folder), 1, options.rate_gbps) as sites,
    ):
        source = Publisher(FileStore(sites.root), RUN, keep=1000, threads=1)
        url = sites.relay(1).first["url"] if has_relay else sites.store_url
        engines = [sites.engine(1, url, size) for _ in range(num_engines)]
        seconds, received = [], 0
        for version in range(options.versions + WARM_UP):
            weights = rng.integers(0, 1 << 16, size // 2, dtype=np.uint16)
            for engine in engines:
                engine.tell(version)
            before = sites.received_bytes(1)
            source.publish({TENSOR: weights}, anchor=True)
            begin_s = time.monotonic()
            end_s = require_exact(engines, version, hashlib.sha256(weights).hexdigest())
            if version >= WARM_UP:
                seconds.append(end_s - begin_s)
                received += sites.received_bytes(1) - before
    copies = received / (options.versions * size)
    least_s = size * 8 / (options.rate_gbps * 1e9 * PAYLOAD_RATIO)
    return Row(num_engines, has_relay, copies, seconds, least_s)


def require_exact(engines: list[Process], version: int, sha256: str) -> float:
    """When the last engine had the version; all processes share the clock."""
    said = [engine.hear() for engine in engines]
    for one in said:
        if (one["version"], one["sha256"], one["error"]) != (version, sha256, ""):
            raise ValueError(f"an engine does not hold version {version}: {one}")
    return max(float(one["end_s"]) for one in said)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay", description=__doc__)
    parser.add_argument("--rate-gbps", type=float, default=0.1)
    parser.add_argument("--size-mib", type=int, default=16)
    parser.add_argument("--engines", default="1,4,8", help="comma-separated")
    parser.add_argument("--versions", type=int, default=5)
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(f"no network namespaces here: {reason}", file=sys.stderr)
        return 2
    stamp = environment() | {"command": f"python -m benchmarks.relay {' '.join(arguments)}"}
    print("\n".join(f"{name}: {value}" for name, value in stamp.items()), "", sep="\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for num_engines in map(int, options.engines.split(",")):
        for has_relay in (True, False):
            row = measure(options, num_engines, has_relay=has_relay)
            print(f"| {' | '.join(row.cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
