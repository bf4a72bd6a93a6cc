"""Processes that are stopped or killed while others go on (I20, I50, R29, R40)."""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from sync.harness import RUN, FaultyStore, Weights, assert_same, publisher, reader, zeros_like

import gymfast.channels
import gymfast.cli
import gymfast.integrations
import gymfast.stores
import gymfast.sync
from gymfast.errors import ConflictError
from gymfast.stores import FileStore
from gymfast.sync.fsck import fsck

LIMIT_S = 10.0  # for what takes milliseconds: waiting for a stopped process would take for ever
_FORK = multiprocessing.get_context("fork")


def weights_of(version: int) -> Weights:
    """Every unit tells the version, so that one look shows a mixture."""
    return {f"w{i}": np.full(300, version, np.uint32) for i in range(3)}


class Child:
    """A forked process that runs `work(pipe, *arguments)`."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def answer(self) -> str:
        assert self.pipe.poll(60), "the child says nothing"
        return str(self.pipe.recv())

    def is_stopped(self) -> bool:
        """Waits until it has stopped itself or ended; True if it stopped."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        return os.WIFSTOPPED(status)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(60)


# A reader looks all the time


def _publish_for_ever(pipe: Connection, root: str) -> None:
    source = publisher(FileStore(root), anchor_every=3, keep=2, object_bytes=500)
    while True:
        version = 0 if source.version is None else source.version + 1
        source.publish(weights_of(version))
        if version % 5 == 0:
            pipe.send(version)


@pytest.mark.parametrize(
    "num_looks",
    [10_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])],
)
def test_i20_r29_r40_no_look_at_a_publisher_that_is_stopped_and_killed_shows_a_torn_version(
    tmp_path, num_looks
):
    """One reader follows, a new one starts from nothing at every 20th look: each look is exact."""
    store, rng = FileStore(tmp_path), np.random.default_rng(20)
    live = zeros_like(weights_of(0))
    follower = reader(store, live, reader_id="follower")
    seen, num_done, num_killed = -1, 0, 0

    def look() -> None:
        nonlocal seen, num_done
        report = follower.pull()
        assert report.version >= seen
        seen = report.version
        assert_same(live, weights_of(seen))
        num_done += 1
        if num_done % 20 == 0:
            late = zeros_like(live)
            with reader(store, late, reader_id="late") as other:
                assert_same(late, weights_of(other.pull().version))

    while num_done < num_looks:
        child = Child(_publish_for_ever, str(tmp_path))
        try:
            assert int(child.answer()) > seen - 5
            for _ in range(15):
                for _ in range(int(rng.integers(1, 6))):
                    look()
                child.send(signal.SIGSTOP)
                for _ in range(3):
                    look()
                child.send(signal.SIGCONT)
        finally:
            child.kill()
        num_killed += 1
        look()
        look()
    assert num_killed >= num_looks // 150
    assert seen > 20
    assert not fsck(store, RUN).damage


# One party stops at each of its calls


class StoppingStore(FaultyStore):
    """Stops its own process before call `at`."""

    def __init__(self, root: str, at: int) -> None:
        super().__init__(FileStore(root))
        self.at = at

    def begin(self) -> None:
        self.arm(self._stop)

    def _stop(self, n: int, operation: str, key: str) -> str:
        if n == self.at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return ""


def _publish_and_stop(pipe: Connection, root: str, at: int) -> None:
    store = StoppingStore(root, at)
    source = publisher(store, label="stopped")
    source.publish(weights_of(0))
    store.begin()
    try:
        pipe.send(f"committed {source.publish(weights_of(1)).version}")
    except ConflictError as error:
        pipe.send(str(error))


def test_i50_a_publisher_stopped_at_any_call_holds_up_nobody(tmp_path):
    said: list[str] = []
    for at in range(1, 60):
        root = tmp_path / str(at)
        child = Child(_publish_and_stop, str(root), at)
        try:
            if not child.is_stopped():
                break
            start_s = time.monotonic()
            store, live = FileStore(root), zeros_like(weights_of(0))
            follower = reader(store, live)
            found = follower.pull().version
            assert_same(live, weights_of(found))
            successor = publisher(store, label="successor", timeout_s=5.0)
            new = successor.publish(weights_of(7)).version
            assert new == found + 1
            assert follower.pull().version == new
            assert time.monotonic() - start_s < LIMIT_S
            assert_same(live, weights_of(7))
            child.send(signal.SIGCONT)
            said.append(child.answer())
            assert successor.publish(weights_of(8)).version == new + 1
            assert follower.pull().version == new + 1
            assert_same(live, weights_of(8))
        finally:
            child.kill()
    assert len(said) >= 5, "it makes more calls than that"
    assert "'successor' took over" in said[0]


def _pull_and_stop(pipe: Connection, root: str, at: int) -> None:
    store = StoppingStore(root, at)
    live = zeros_like(weights_of(0))
    follower = reader(store, live, reader_id="stopped", timeout_s=5.0)
    store.begin()
    version = follower.pull().version
    assert_same(live, weights_of(version))
    pipe.send(f"exact {version}")


def test_i50_a_reader_stopped_at_any_call_holds_up_nobody_and_is_exact_afterwards(tmp_path):
    """Retention of one version goes on meanwhile, and spares what the lease of the reader names."""
    said: list[str] = []
    for at in range(1, 60):
        root = tmp_path / str(at)
        source = publisher(FileStore(root), anchor_every=1, keep=1, object_bytes=500)
        source.publish(weights_of(0))
        source.publish(weights_of(1))
        child = Child(_pull_and_stop, str(root), at)
        try:
            if not child.is_stopped():
                break
            start_s = time.monotonic()
            for version in range(2, 6):
                source.publish(weights_of(version))
            live = zeros_like(weights_of(0))
            assert reader(FileStore(root), live, reader_id="other").pull().version == 5
            assert time.monotonic() - start_s < LIMIT_S
            child.send(signal.SIGCONT)
            said.append(child.answer())
        finally:
            child.kill()
    assert len(said) >= 5, "it makes more calls than that"
    assert set(said) <= {"exact 1", "exact 5"}
    assert said[-1] == "exact 1", "its lease kept what it was about to read"


# The calls that may wait, from the source


def waits_without_a_deadline(source: str) -> list[tuple[str, str]]:
    """Calls that may block for ever, each behind the function that it is in.

    A wait with no argument, a lock, a child or an answer of Ray without a limit, and sockets.
    """
    found = []

    def look(node: ast.AST, where: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = node.name
        for child in ast.iter_child_nodes(node):
            look(child, where)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and may_wait(node):
            found.append((where, ast.unparse(node)))

    def may_wait(node: ast.Call) -> bool:
        text, name = ast.unparse(node), node.func.attr
        has_limit = any(word.arg in ("timeout", "timeout_s") for word in node.keywords)
        is_bare = name in ("wait", "join", "result", "get", "acquire") and not node.args
        is_free = any(
            word.arg in ("block", "blocking") and ast.unparse(word.value) == "False"
            for word in node.keywords
        )
        is_ray = name in ("get", "wait") and ast.unparse(node.func.value).endswith("ray")
        is_socket = name in ("recv", "recv_into", "accept", "sendall", "poll_forever")
        is_connect = name == "create_connection" and len(node.args) < 2
        is_child = name == "communicate" or text.startswith(("subprocess.run(", "subprocess.check"))
        is_lock = name in ("flock", "lockf") and "LOCK_NB" not in text and "LOCK_UN" not in text
        is_wait = (is_bare and not is_free) or is_ray or is_socket or is_connect or is_child
        return is_lock or (is_wait and not has_limit)

    look(ast.parse(source), "")
    return found


# Why a wait that has no deadline of its own ends all the same: by file and function.
BOUNDED_CHANNELS = {
    "control.py close": "the thread looks 20 times a second whether it is to end",
    "door.py join": "the thread looks 10 times a second whether the door is shut",
    "door.py _accept": "the socket has a time-out of 0.1 s",
    "gloo.py _finish": "the work is complete",
    "handshake.py send_all": "the socket has the time that is left as its time-out",
    "handshake.py receive_all": "the socket has the time that is left as its time-out",
    "hub.py close": "the thread looks 10 times a second whether it is to end",
    "line.py leave": "the socket does not block",
    "line.py messages": "the socket does not block",
    "tcp.py close": "the lines of these threads were shut down, calls and greetings have deadlines",
    "tcp.py memory_for": "a thread of the channel: a failure or close ends it",
    "tcp_pipe.py join": "comes after close, which shuts the line down",
    "tcp_pipe.py _send": "a thread of the channel: close and a lost rank shut the line down",
    "tcp_pipe.py _read": "a thread of the channel: close and a lost rank shut the line down",
    "tcp_pipe.py answer": "12 bytes for each slot under way always fit the buffer of the line",
    "tcp_pipe.py drain": "the socket has the time that is left as its time-out",
    "tcp_pipe.py _fill": "a thread of the channel: close shuts the line down",
    "threaded.py close": "the round under way was interrupted",
    "threaded.py _work": "a thread that waits for work: close gives it its end",
}
BOUNDED_STORES = {
    "fsspec_calls.py _serve": "a daemon thread that waits for work",
    "modal_volume.py run": "what it waits for has a time limit of its own",
    "objects.py _get_parts": "requests of obstore have time-outs",
}
BOUNDED_SYNC = {
    "cleaner.py _num_bytes": "a request to a store, which has deadlines of its own",
    "fetcher.py _require_kept": "a look at a store, which has deadlines of its own",
    "fold_maker.py _has_objects": "a request to a store, which has deadlines of its own",
    "lease.py _write": "a write to a store that is near",
    "log.py _settled": "a read of a store, which has deadlines of its own",
    "objects.py _result": "a read of a store, which has deadlines of its own",
    "objects.py _take": "a put to a store, which has deadlines of its own",
    "objects.py delete_all_noted": "a request to a store, which has deadlines of its own",
    "objects.py is_confirmed": "a request to a store, which has deadlines of its own",
    "relay.py have": "a read of a store, which has deadlines of its own",
    "relay_answers.py _settled": "the answer is there",
    "relay_answers.py fresh": "a read of a store, which has deadlines of its own",
    "requests.py result": "a request to a store, which has deadlines of its own",
    "view.py _follow": "reads of a store, which have deadlines of their own",
}
BOUNDED_INTEGRATIONS = {
    "bucket_broadcast.py _wait": "the work is complete",
    "bucket_pipe.py _finish": "each step of the sending thread has a deadline",
    "engine_answers.py _note": "the call is over",
    "part_engines.py _all": "all jobs are done",
    "rank_encoder.py _collect": "work of this process alone",
    "rank_snapshot.py promote": "work of this process alone",
    "sglang_local.py tensors": "reads of a local file",
    "sglang_session.py broadcast": "the request has a time-out, and so has the group of torch",
    "skyrl.py main": "the whole run, which SkyRL's own entry point waits for as well",
    "sync_round.py send": "a line of text, on a socket that has a time-out",
    "sync_round.py _admit": "the selector said that somebody is there",
}


@pytest.mark.parametrize(
    ("package", "bounded"),
    [
        *((gymfast.stores, BOUNDED_STORES), (gymfast.sync, BOUNDED_SYNC), (gymfast.cli, {})),
        *((gymfast.channels, BOUNDED_CHANNELS), (gymfast.integrations, BOUNDED_INTEGRATIONS)),
    ],
)
def test_I50_R86_no_call_waits_without_a_deadline(package, bounded):
    assert package.__file__ is not None
    files = sorted(Path(package.__file__).parent.rglob("*.py"))
    assert len(files) > 5
    found: dict[str, list[str]] = {}
    for file in files:
        for where, call in waits_without_a_deadline(file.read_text()):
            found.setdefault(f"{file.name} {where}", []).append(call)
    assert {place: calls for place, calls in found.items() if place not in bounded} == {}
    assert bounded.keys() <= found.keys(), "a wait that is explained is gone: take it out"


@pytest.mark.parametrize(
    "call",
    [
        *("event.wait()", "thread.join()", "future.result()", "queue.get()", "lock.acquire()"),
        *("sock.recv(4)", "sock.accept()", "process.communicate()", "subprocess.run(['ls'])"),
        *("fcntl.flock(fd, fcntl.LOCK_EX)", "ray.get(call)", "self._ray.wait(calls)"),
        "socket.create_connection(address)",
    ],
)
def test_the_search_for_waits_finds(call):
    assert waits_without_a_deadline(f"def f(): {call}") == [("f", call)]


def test_the_search_for_waits_lets_limits_pass():
    source = (
        "event.wait(3); thread.join(timeout=2); ','.join(x); d.get(k); f.result(timeout=1); "
        "ray.get(call, timeout=3); lock.acquire(blocking=False); s.create_connection(a, 3)"
    )
    assert waits_without_a_deadline(source) == []
