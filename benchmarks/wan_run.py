"""Processes on both sides of a long link, and what one version took: seconds and round trips."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple

from benchmarks.wan_link import Link
from benchmarks.wan_server import PORT

Scheme = Literal["ours", "peer"]
NUM_ENGINES = 2
_SHIFT = 104_729  # elements, a prime
_SETTLE_S = 0.4  # so that all engines wait before the trainer begins


class Request(NamedTuple):
    """A request as the server saw it."""

    start_s: float
    end_s: float
    who: str
    what: str
    key: str
    status: int


@dataclass(frozen=True)
class Round:
    """One version: from the call of publish to the last engine that has verified it."""

    seconds: float
    encode_s: float
    store_s: float
    apply_s: float
    num_bytes: int
    raw_bytes: int
    round_trips: int = 0


class Worker:
    """A process that does what it is told, one order at a time."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def order(self, **what: Any) -> None:
        self.tell(json.dumps(what))

    def tell(self, line: str) -> None:
        """Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        try:
            print(line, file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise RuntimeError(f"{self._process.args!r} has ended") from error

    def line(self) -> str:
        """Raises RuntimeError if the process ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        return line

    def answer(self) -> Any:
        return json.loads(self.line())

    def ask(self, **what: Any) -> Any:
        self.order(**what)
        return self.answer()

    def close(self) -> None:
        """Ends the process, at once if it does not by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class Group:
    """A server, a trainer and engines of one scheme, `is_near` without the link: a context."""

    link: Link
    scheme: Scheme
    size: int
    density: float
    is_near: bool
    version: int = -1
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Group:
        with self._stack:
            where = self.link.within("store")
            self.server = self._start([*where, *_module("wan_server"), "0.0.0.0"], "")
            assert self.server.line() == "ready\n"
            side = self.link.within("store" if self.is_near else "site")
            command = [*side, *_module("wan_worker")]
            names = ["trainer", *(f"engine{index}" for index in range(NUM_ENGINES))]
            self.trainer, *self.engines = (self._start(command, name) for name in names)
            cores = len(os.sched_getaffinity(0))
            trainer = {"size": self.size, "density": self.density, "threads": cores}
            self.trainer.order(do="be", role=f"{self.scheme} trainer", **trainer)
            engine = {"size": self.size, "threads": max(1, cores // NUM_ENGINES)}
            for each in self.engines:
                each.order(do="be", role=f"{self.scheme} engine", **engine)
            for each in (self.trainer, *self.engines):
                each.answer()
            if self.scheme == "ours":
                self.publish()
                for each in self.engines:
                    each.ask(do="pull")
            self._kept = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kept.close()

    def publish(self, shift: int | None = None, *, anchor: bool = False) -> Any:
        """A version that no engine waits for; with `shift` the weights move before."""
        if shift is not None:
            self.trainer.ask(do="step", shift=shift)
        told = self.trainer.ask(do="publish", anchor=anchor)
        self.version = told["version"]
        return told

    def round(self) -> Round:
        """A version that all engines wait for.

        Raises RuntimeError if one ends with other bytes than the trainer's.
        """
        self.version += 1
        # Never to and fro: the same frame again would be the same objects, which are there already.
        self.trainer.ask(do="step", shift=_SHIFT * self.version)
        for engine in self.engines:
            engine.order(do="follow", version=self.version)
        time.sleep(_SETTLE_S)
        self.log()
        told = self.trainer.ask(do="publish")
        ends = [engine.answer() for engine in self.engines]
        if any(end["root"] != told["root"] for end in ends):
            raise RuntimeError(f"version {self.version} arrived with other bytes: {told} {ends}")
        trips = 0 if self.is_near else round_trips(self.log(), told, ends, 2 * self.link.delay_s)
        return Round(
            seconds=max(end["end_s"] for end in ends) - told["start_s"],
            encode_s=told["encode"],
            store_s=told["put"] + max(end["fetch"] for end in ends),
            apply_s=max(end["apply"] for end in ends),
            num_bytes=told["num_bytes"],
            raw_bytes=told["raw_bytes"],
            round_trips=trips,
        )

    def timed(self, engine: int, do: str) -> tuple[float, Any]:
        """Seconds that an order takes an engine, and its answer."""
        start_s = time.monotonic()
        told = self.engines[engine].ask(do=do)
        return told["end_s"] - start_s, told

    def log(self) -> list[Request]:
        """The requests since the last look."""
        self.server.tell("log")
        return [Request(*entry) for entry in self.server.answer()]

    def drop_connections(self) -> None:
        """Ends all connections: the next requests begin with new ones."""
        self.server.tell("drop")
        self.server.line()

    def _start(self, command: list[str], who: str) -> Worker:
        env = os.environ | {
            "AWS_ENDPOINT_URL": f"http://{self.link.address('store')}:{PORT}",
            "AWS_ACCESS_KEY_ID": who,
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_REGION": "us-east-1",
        }
        worker = Worker(command, env)
        self._stack.callback(worker.close)
        return worker


def round_trips(log: Iterable[Request], told: Any, ends: Iterable[Any], rtt_s: float) -> int:
    """Requests of the longest chain, each asked after the one before was answered.

    From the end of encoding to the last byte at the slowest engine: what overlaps with encoding is
    not waited for. The read that finds the record is one, though it is under way before.
    """
    log = sorted(log)
    log = [r for r in log if "/ahead/" not in r.key]  # nobody waits for advice
    commit = next(r for r in log if r.what == "PUT create" and "/log/" in r.key)
    late = [r for r in log if r.who == "trainer" and r.end_s + rtt_s / 2 > told["encoded_s"]]
    first = depth([r for r in late if told["start_s"] < r.start_s <= commit.start_s], rtt_s)
    most = 0
    for number, end in enumerate(ends):
        own = [r for r in log if r.who == f"engine{number}"]
        found = next(r for r in own if r.key == commit.key and r.status == 200)
        fetched_s = end["end_s"] - end["apply"]
        after = [r for r in own if r.start_s >= found.end_s + 0.95 * rtt_s]
        most = max(most, depth([r for r in after if r.end_s + rtt_s / 2 <= fetched_s], rtt_s))
    return first + 1 + most


def depth(requests: Iterable[Request], rtt_s: float) -> int:
    """Length of the longest chain of requests that can have waited for one another."""
    depths: list[tuple[Request, int]] = []
    for request in sorted(requests):
        before = [n for r, n in depths if r.end_s + 0.95 * rtt_s <= request.start_s]
        depths.append((request, 1 + max(before, default=0)))
    return max((n for _, n in depths), default=0)


def line_rate(link: Link, num_bytes: int) -> float:
    """Bytes a second of one plain TCP stream from the store, once its window is open."""
    serve = (
        "import socket; s = socket.create_server(('0.0.0.0', 9001)); print('ready', flush=True); "
        f"c, _ = s.accept(); [c.sendall(bytes({num_bytes})) for _ in range(3) if c.recv(1)]"
    )
    fetch = (
        "import socket, time\n"
        f"s = socket.create_connection(('{link.address('store')}', 9001))\n"
        "for _ in range(3):\n"
        "    start_s, left = time.monotonic(), s.send(b'x') * NUM\n"
        "    while left: left -= len(s.recv(1 << 20))\n"
        "print(NUM / (time.monotonic() - start_s))\n"
    ).replace("NUM", str(num_bytes))
    server = Worker([*link.within("store"), sys.executable, "-c", serve], dict(os.environ))
    try:
        server.line()
        found = subprocess.run(
            [*link.within("site"), sys.executable, "-c", fetch],
            capture_output=True,
            text=True,
            check=True,
        )
        return float(found.stdout)
    finally:
        server.close()


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{name}"]
