"""The same with real processes, files and a server: killed, stopped, cut off at random.

`python -m tests.campaign.processes files --seconds 60` plays a round; children are forked, so that
one starts in milliseconds and dies at any instruction.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gymfast.delta import State
from gymfast.errors import GymfastError
from gymfast.stores import open_store
from gymfast.sync import CheckpointTarget, LiveTarget, Publisher, Subscriber, collect
from gymfast.sync.fsck import fsck
from tests.campaign.counts import Counts, ViolationError, commit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess

RUN = "campaign"
KEEP = 3
_CONTEXT = multiprocessing.get_context("fork")
_WEIGHTS = (2, 2, 2, 1, 5, 5)  # of trouble: three readers, retention, two publishers
_DEADLINE_S = 120.0  # of a machine that is busy with other things


def state_of(version: int, writer: int) -> dict[str, np.ndarray]:
    """The weights that this writer gives that version."""
    weights = {
        "a": np.arange(6_000, dtype=np.uint16),
        "b": np.zeros((50, 70), np.float32),
        "who": np.array([version, writer], np.int64),
    }
    weights["a"][version % 97 :: 97] += version + 1
    weights["b"][version % 50] = writer
    return weights


def root_of(weights: dict[str, np.ndarray]) -> str:
    return State.reading(weights).root.hex()


def fault_in(weights: dict[str, np.ndarray], version: int) -> str:
    """What is wrong with weights that are served as that version; "" if nothing is."""
    found, writer = (int(number) for number in weights["who"])
    expected = state_of(version, writer)
    if found != version:
        return f"version {version} has the weights of version {found}"
    wrong = [n for n, v in expected.items() if weights[n].tobytes() != v.tobytes()]
    return f"version {version} of writer {writer} is torn: {wrong}" if wrong else ""


# What the children do


def publish(url: str, writer: int, told: int, num_versions: int) -> None:
    """Takes over and publishes; tells each version that it was told is committed."""
    while True:
        try:
            source = Publisher(
                url, RUN, threads=1, keep=KEEP, anchor_every=4, anchor_ratio=100.0,
                timeout_s=20.0, label=str(writer),
            )  # fmt: skip
            for _ in range(num_versions):
                version = 0 if source.version is None else source.version + 1
                report = source.publish(state_of(version, writer))
                if report.version == version:
                    os.write(told, f"{version} {writer} {report.root}\n".encode())
                    continue
                break  # an earlier attempt was committed after all: the number moved on
            else:
                return
        except GymfastError as error:
            if "fenced" in str(error):
                return
            time.sleep(0.02)


def follow(url: str, path: str, told: int) -> None:
    """Follows the run; tells each look at what is served: "ok" or what is wrong."""
    live: dict[str, np.ndarray] = {}
    target = CheckpointTarget(path, threads=1) if path else LiveTarget(live, threads=1)
    subscriber = Subscriber(url, RUN, target, timeout_s=20.0, lease_s=30.0)
    newest = -1
    while True:
        failed = ""
        try:
            subscriber.pull()
        except GymfastError as error:
            failed = type(error).__name__
        version = subscriber.version
        if version is None:
            os.write(told, f"none {failed}\n".encode())
            continue
        weights = live
        if path:
            from safetensors.numpy import load_file

            weights = load_file(
                Path(path) if Path(path).is_file() else Path(path, "model.safetensors")
            )
        wrong = fault_in(weights, version)
        if version < newest:
            wrong = f"version {version} after version {newest}"
        newest = version
        os.write(told, f"{'wrong ' + wrong if wrong else f'ok {version}'} {failed}\n".encode())
        time.sleep(0.001)


def clean(url: str) -> None:
    """Retention from outside, all the time."""
    while True:
        with suppress(GymfastError):
            collect(open_store(url), RUN, keep=KEEP)
        time.sleep(0.05)


def look(url: str) -> tuple[int, str, str]:
    """What a fresh reader gets: version, root, and what is wrong with the bytes."""
    live: dict[str, np.ndarray] = {}
    end_s = time.monotonic() + _DEADLINE_S
    while True:
        try:
            with Subscriber(url, RUN, LiveTarget(live, threads=1), timeout_s=20.0) as fresh:
                version = fresh.pull().version
            return version, root_of(live), fault_in(live, version)
        except GymfastError as error:
            if time.monotonic() > end_s:
                return -1, "", str(error)


def damage_in(url: str) -> str:
    """What fsck finds, in several tries if the way is bad."""
    for _ in range(5):
        with suppress(GymfastError):
            if not (found := fsck(open_store(url), RUN).damage):
                return ""
    return str(found)


def _in_a_child(work: Callable, url: str):
    """What that returns, from a process of its own: nothing of a store stays in this one."""
    ours, theirs = _CONTEXT.Pipe()
    child = _CONTEXT.Process(target=lambda: theirs.send(work(url)))
    child.start()
    try:
        if not ours.poll(2 * _DEADLINE_S):
            raise ViolationError("I50", f"{work.__name__} does not end")
        return ours.recv()
    finally:
        child.kill()
        child.join()


# What happens to them


@dataclass
class Child:
    """A child that is started again when it ends; `told` is what it said."""

    work: Callable[..., None]
    arguments: Callable[[int], tuple]
    kind: str
    number: int = 0
    process: BaseProcess | None = None
    ends: tuple[int, int] = (-1, -1)
    buffer: bytes = b""
    killed_at_s: float = 0.0

    def start(self) -> None:
        self.ends = os.pipe()
        os.set_blocking(self.ends[0], False)
        self.process = _CONTEXT.Process(
            target=_quietly, args=(self.work, *self.arguments(self.number), self.ends[1])
        )
        self.process.start()
        os.close(self.ends[1])

    def lines(self) -> list[str]:
        """What it said since the last time, whole lines only."""
        with suppress(BlockingIOError):
            while chunk := os.read(self.ends[0], 1 << 16):
                self.buffer += chunk
        *lines, self.buffer = self.buffer.split(b"\n")
        return [line.decode() for line in lines]

    def end(self) -> None:
        assert self.process is not None
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def close(self) -> None:
        self.end()
        os.close(self.ends[0])
        self.buffer = b""


def _quietly(work: Callable[..., None], *arguments: object) -> None:
    import logging

    logging.disable(logging.CRITICAL)
    work(*arguments)


@dataclass
class Round:
    """One store, its children, and what was seen."""

    url: str
    folder: Path
    seed: int
    cut: Callable[[float], None] | None = None
    counts: Counts = field(default_factory=Counts)
    told: dict[int, tuple[int, str]] = field(default_factory=dict)
    num_writers: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def play(self, seconds: float) -> None:
        """Chaos for that long, then one more version, which everybody has to reach."""
        readers = [
            Child(follow, lambda _: (self.url, ""), "reader"),
            Child(follow, lambda _: (self.url, str(self.folder / "c.safetensors")), "reader"),
            Child(follow, lambda _: (self.url, str(self.folder / "c")), "reader"),
        ]
        children = [*readers, Child(clean, lambda _: (self.url,), "gc")]
        children[-1].work = _cleaning
        children += [self._writer(), self._writer()]
        try:
            for child in children:
                child.start()
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                time.sleep(self.rng.uniform(0.0, 0.08))
                self._hear(children)
                self._trouble(self.rng.choices(children, _WEIGHTS)[0])
            self._finish(readers, children)
        finally:
            for child in children:
                child.close()
        self._check_store()

    def _writer(self) -> Child:
        def arguments(_: int) -> tuple:
            self.num_writers += 1
            return self.url, self.num_writers

        return Child(_publishing, arguments, "publisher")

    def _trouble(self, child: Child) -> None:
        assert child.process is not None
        assert child.process.pid is not None
        if not child.process.is_alive():
            self._again(child)
            return
        drawn = self.rng.random()
        if drawn < 0.5:
            child.end()
            self.counts[f"{child.kind} killed"] += 1
            if child.kind == "publisher":
                self._hear([child])
                self._check_after_kill()
            self._again(child)
        elif drawn < 0.6:
            os.kill(child.process.pid, signal.SIGSTOP)
            time.sleep(self.rng.uniform(0.0, 0.3))
            with suppress(ProcessLookupError):
                os.kill(child.process.pid, signal.SIGCONT)
            self.counts[f"{child.kind} stopped"] += 1
        elif drawn < 0.7 and self.cut is not None:
            self.cut(self.rng.uniform(0.0, 0.3))
            self.counts["store cut off"] += 1

    def _again(self, child: Child) -> None:
        self._hear([child])
        child.close()
        child.start()

    def _hear(self, children: list[Child]) -> None:
        for child in children:
            for line in child.lines():
                if child.kind == "reader":
                    wrong = line.startswith("wrong")
                    self.counts.check("I20", not wrong, line)
                    self.counts["looks at readers that serve nothing"] += line.startswith("none")
                elif child.kind == "publisher":
                    self._committed(line)

    def _committed(self, line: str) -> None:
        version, writer, root = line.split()
        known = self.told.setdefault(int(version), (int(writer), root))
        self.counts.check("I22", known == (int(writer), root), f"version {version} twice: {line}")

    def _check_after_kill(self) -> None:
        """A fresh reader gets at least what was told to be committed, exactly."""
        newest = max(self.told, default=-1)
        if newest < 0:
            return
        found, root, wrong = _in_a_child(look, self.url)
        is_there = found >= newest and not wrong
        self.counts.check("I21", is_there, f"{newest} was told, {found} is there {wrong}")
        if found in self.told:
            is_same = root == self.told[found][1]
            self.counts.check("I22", is_same, f"version {found} has another root than was told")

    def _finish(self, readers: list[Child], children: list[Child]) -> None:
        for child in children:
            if child.kind != "reader":
                child.end()
        self._hear(children)
        last = Child(_publishing_two, lambda _: (self.url, 10**6), "publisher")
        last.start()
        assert last.process is not None
        last.process.join(_DEADLINE_S)
        self._hear([last])
        last.close()
        newest = max(self.told)
        self.counts.check(
            "I21", self.told[newest][0] == 10**6, "the next publisher did not publish"
        )
        for reader in readers:
            if reader.process is not None and not reader.process.is_alive():
                raise ViolationError("I03", f"a reader ended: {reader.lines()[-3:]}")
            end_s = time.monotonic() + _DEADLINE_S
            is_there = False
            while not is_there and time.monotonic() < end_s:
                time.sleep(0.02)
                lines = reader.lines()
                is_there = any(line.startswith(f"ok {newest}") for line in lines)
                bad = [line for line in lines if line.startswith("wrong")]
                self.counts.check("I20", not bad, str(bad))
            self.counts.check("I03", is_there, f"a reader did not get to version {newest}")

    def _check_store(self) -> None:
        damage = _in_a_child(damage_in, self.url)
        self.counts.check("I26", not damage, f"fsck finds {damage}")
        self.counts["versions"] += max(self.told) + 1


def _publishing(url: str, writer: int, told: int) -> None:
    publish(url, writer, told, 10**9)


def _publishing_two(url: str, writer: int, told: int) -> None:
    publish(url, writer, told, 2)


def _cleaning(url: str, told: int) -> None:
    assert told
    clean(url)


@contextmanager
def _object_server(seed: int) -> Iterator[tuple[str, Callable[[float], None]]]:
    """A server of objects behind a bad proxy, in a process of its own; cutting it off stops it."""
    ours, theirs = _CONTEXT.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, seed))
    server.start()
    try:
        assert ours.poll(_DEADLINE_S)
        endpoint = ours.recv()

        def cut(seconds: float) -> None:
            assert server.pid is not None
            os.kill(server.pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(server.pid, signal.SIGCONT)

        yield endpoint, cut
    finally:
        server.kill()
        server.join()


def _serve(pipe, seed: int) -> None:
    """Serves until it is killed: one request in 30 is lost, refused, late, cut or flipped."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from object_double import serve_bucket
    from object_proxy import Trouble, serve_proxy

    rng = random.Random(seed)
    codes = ((500, "InternalError"), (503, "SlowDown"), (409, "ConditionalRequestConflict"))

    def drawn(method: str) -> Trouble | None:
        kinds = ["drop", "lose", "answer", "answer late"]
        kinds += ["cut", "flip"] if method == "GET" else []
        if rng.random() > 1 / 30:
            return None
        status, code = rng.choice(codes if method == "PUT" else codes[:2])
        return Trouble(rng.choice(kinds), method, status=status, code=code)

    with serve_bucket() as bucket, serve_proxy(bucket.endpoint) as proxy:
        proxy.take = lambda method, path: None if "/probe/" in path else drawn(method)  # type: ignore[method-assign]
        pipe.send(proxy.endpoint)
        while True:
            time.sleep(3600)


def play_files(seed: int, seconds: float, folder: Path) -> Counts:
    """A round on a file store."""
    played = Round(f"file:{folder / 'store'}", folder, seed)
    played.play(seconds)
    return played.counts


def play_objects(seed: int, seconds: float, folder: Path) -> Counts:
    """A round over S3, with trouble on the way."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from object_settings import s3_settings

    with _object_server(seed) as (endpoint, cut):
        os.environ |= s3_settings(endpoint)
        played = Round("s3://bucket/a", folder, seed, cut)
        played.play(seconds)
    return played.counts


KINDS = {"files": play_files, "objects": play_objects}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seeds", default="0:1", help="first and one after the last")
    parser.add_argument("--seconds", type=float, default=30.0, help="of trouble, each round")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    first, last = (int(number) for number in options.seeds.split(":"))
    counts, failed, start_s, played = Counts(), {}, time.monotonic(), commit()
    for seed in range(first, last):
        with tempfile.TemporaryDirectory(prefix="gymfast-campaign-") as folder:
            try:
                counts.update(KINDS[options.kind](seed, options.seconds, Path(folder)))
            except ViolationError as error:
                failed[seed] = error.invariant
                print(f"seed {seed}: {error}", flush=True)
    found = {
        "kind": options.kind,
        "command": f"python -m tests.campaign.processes {options.kind} "
        f"--seeds {options.seeds} --seconds {options.seconds:g}",
        "commit": played,
        "seeds": [first, last],
        "seconds": round(time.monotonic() - start_s),
        "trials": counts,
        "violations": failed,
    }
    text = json.dumps(found, indent=1, sort_keys=True)
    if options.json:
        options.json.write_text(text)
    print(text)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
