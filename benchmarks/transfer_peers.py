"""What transfers are measured against: a plain copy, and iperf3 on the same link."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time

import numpy as np

from benchmarks.namespaces import Network
from benchmarks.ranks import Sample

_START_S = 10.0


def copies(num_bytes: int, rounds: int) -> list[Sample]:
    """The memcpy of libc, by NumPy, from one block to another of the same size, after a warm-up."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    np.copyto(target, source)
    assert np.array_equal(source, target)
    found = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        np.copyto(target, source)
        found.append(Sample(time.perf_counter() - begin_s, {}, 0, num_bytes))
    return found


def iperf3(
    num_bytes: int, streams: int, rounds: int, network: Network | None = None
) -> list[Sample]:
    """iperf3 between two processes, each with one buffer that it uses again; cubic.

    Raises OSError where iperf3 is not installed or fails.
    """
    if shutil.which("iperf3") is None:
        raise OSError("iperf3 is not installed (package iperf3)")
    return [_iperf3_once(num_bytes, streams, network) for _ in range(rounds + 1)][1:]


def _iperf3_once(num_bytes: int, streams: int, network: Network | None) -> Sample:
    """One run, with a server of its own: an older one may still be busy with the last."""
    port = str(_free_port())
    within = [network.within(node) if network else [] for node in (0, 1)]
    host = network.address(1) if network else "127.0.0.1"
    command = [*within[1], "iperf3", "-s", "-1", "-p", port, "--forceflush"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    client = [*within[0], "iperf3", "-c", host, "-p", port, "-P", str(streams)]
    client += ["-n", str(num_bytes // streams), "--json"]
    client += [] if network else ["-C", "cubic"]
    try:
        _wait_until_it_listens(server)
        done = subprocess.run(client, capture_output=True, text=True, check=False, timeout=300)
    finally:
        server.kill()
        server.communicate()
    found = json.loads(done.stdout or "{}")
    if done.returncode or "error" in found:
        raise OSError(f"{' '.join(client)}: {found.get('error') or done.stderr.strip()}")
    received = found["end"]["sum_received"]
    return Sample(float(received["seconds"]), {}, 0, int(received["bytes"]))


def _wait_until_it_listens(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    begin_s = time.monotonic()
    while "listening" not in (line := server.stdout.readline()):
        if not line or time.monotonic() - begin_s > _START_S:
            raise OSError("iperf3 does not listen")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
