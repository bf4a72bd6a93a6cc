"""Groups of ranks as processes, on this host or on the nodes of a shaped network."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Literal

import msgspec

from benchmarks.namespaces import Network

Kind = Literal["channel", "transfer", "per tensor", "copy", "live"]
_ROOT = Path(__file__).parents[1]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a group repeats; see the subjects of benchmarks/transfer_rank.py."""

    kind: Kind
    channel: str = "tcp"
    tensors: list[tuple[str, str, tuple[int, ...], int]] = []
    bucket_bytes: int = 0
    streams: int = 1
    fanout: int | None = None
    depth: int = 3
    warm_up: int = 1
    rounds: int = 5
    seed: int = 1
    size_bytes: int = 0  # from here on: of live versions
    density: float = 0.01
    profile: Literal["auto", "fast", "small"] = "fast"
    max_density: float = 0.25


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is told."""

    rank: int
    num_ranks: int
    host: str
    key: str
    jobs: list[Job]
    root_host: str = ""
    root_port: int = 0


class Sample(msgspec.Struct, frozen=True):
    """One repetition: seconds of the slowest rank, and the stages of each."""

    seconds: float
    stages: dict[str, dict[str, float]]
    num_wrong: int
    sent_bytes: int


class _Port(msgspec.Struct):
    port: int


class _Samples(msgspec.Struct):
    samples: list[list[Sample]]


def run_group(
    jobs: list[Job], num_ranks: int, network: Network | None = None, timeout_s: float = 600
) -> list[list[Sample]]:
    """What a group of ranks measured, job by job, one process each; rank i on node i.

    Raises RuntimeError, with the last words of the rank that failed, also after `timeout_s`.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    key = secrets.token_hex(32)

    def start(rank: int, port: int = 0) -> subprocess.Popen[bytes]:
        within = network.within(rank) if network else []
        command = [*within, sys.executable, "-m", "benchmarks.transfer_rank"]
        pipe = subprocess.PIPE
        one = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=_ROOT)
        ranks.append(one)
        hosts = [network.address(i) if network else "127.0.0.1" for i in (rank, 0)]
        orders = Orders(
            rank=rank, num_ranks=num_ranks, host=hosts[0], key=key, jobs=jobs,
            root_host=hosts[1], root_port=port,
        )  # fmt: skip
        assert one.stdin is not None
        one.stdin.write(msgspec.json.encode(orders) + b"\n")
        one.stdin.flush()
        return one

    def stop() -> None:
        for one in ranks:
            one.kill()

    watch = threading.Timer(timeout_s, stop)
    watch.start()
    try:
        root = start(0)
        assert root.stdout is not None
        port = msgspec.json.decode(_line(root, root.stdout), type=_Port).port
        for rank in range(1, num_ranks):
            start(rank, port)
        found = msgspec.json.decode(_line(root, root.stdout), type=_Samples).samples
        for one in ranks:
            if one.wait():
                raise RuntimeError(_words(one))
        return found
    finally:
        watch.cancel()
        stop()
        for one in ranks:
            one.communicate()


def _line(rank: subprocess.Popen[bytes], stdout: IO[bytes]) -> bytes:
    line = stdout.readline()
    if not line:
        raise RuntimeError(_words(rank))
    return line


def _words(rank: subprocess.Popen[bytes]) -> str:
    rank.wait()
    assert rank.stderr is not None
    text = rank.stderr.read().decode(errors="replace")
    return f"a rank of the benchmark ended with status {rank.returncode}: {text[-2000:]}"
