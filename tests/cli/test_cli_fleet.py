"""`gymfast sync status` of a fleet: what readers tell, waiting for them, and bad input."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_commands import Gymfast, tell
from safetensors.numpy import load_file, save_file

from gymfast.stores import FileStore
from gymfast.sync.keys import RunKeys

RUN = ("--run", "demo")
KEYS = RunKeys("demo")
LIMIT_S = 60.0


@pytest.fixture
def store(files: Path, gymfast: Gymfast) -> FileStore:
    """A store with versions 0 and 1."""
    weights = load_file("old.safetensors")
    weights["embed.weight"] = weights["embed.weight"] + 1
    save_file(weights, "next.safetensors")
    checkpoints = ("old.safetensors", "next.safetensors")
    assert gymfast("sync", "publish", "store", *checkpoints, *RUN).code == 0
    return FileStore(Path("store").absolute())


def test_status_shows_what_readers_tell(store: FileStore, gymfast: Gymfast) -> None:
    tell(store, "engine-0", 1)
    tell(store, "engine-1", 0, error="the store is away [red]")
    tell(store, "engine-2", -1, state="inconsistent", root="", updated_us=0)
    store.put(KEYS.status("engine-3"), b"?")
    lines = gymfast("sync", "status", "store", *RUN).out.splitlines()[-5:]
    assert lines[0].split() == ["reader", "state", "version", "lag", "age", "last", "error"]
    assert lines[1].split()[:4] == ["engine-0", "clean", "1", "0"]
    assert lines[2].split()[:4] == ["engine-1", "clean", "0", "1"]
    assert lines[2].endswith("the store is away [red]")
    assert lines[3].split()[:3] == ["engine-2", "inconsistent", "silent"]
    assert lines[4].split()[:2] == ["engine-3", "damaged"]
    fleet = gymfast("sync", "status", "store", *RUN, "--json").json["fleet"]
    assert (fleet["newest"], fleet["num_ready"], len(fleet["readers"])) == (1, 2, 4)


def test_waiting_ends_when_the_readers_are_there(store: FileStore, gymfast: Gymfast) -> None:
    tell(store, "a", 1)
    tell(store, "b", 0)
    call = ("sync", "status", "store", *RUN, "--interval", "0.05", "--timeout", str(LIMIT_S))
    assert gymfast(*call, "--min-ready", "2").code == 0
    assert gymfast(*call, "--wait-for-version", "1", "--min-ready", "1").code == 0
    later = threading.Timer(0.3, tell, (store, "b", 1))
    later.start()
    done = gymfast(*call, "--wait-for-version", "1")
    later.join()
    assert done.code == 0
    assert "b: clean, version 0, 1 behind" in done.out.splitlines()
    assert done.out.splitlines()[-1] == "b: clean, version 1"


def test_waiting_ends_with_4_in_time(store: FileStore, gymfast: Gymfast) -> None:
    tell(store, "a", 1)
    call = ("sync", "status", "store", *RUN, "--interval", "0.05", "--timeout", "0.2")
    done = gymfast(*call, "--wait-for-version", "2", "--json")
    assert done.code == 4
    looks = [json.loads(line) for line in done.out.splitlines()]
    assert {look["schema"] for look in looks[:-1]} == {"gymfast.sync.status.watch/1"}
    assert looks[0]["num_ready"] == 0
    text = "0 of 1 readers are ready with version 2 after 0.2 s, expected all"
    assert looks[-1]["error"]["message"] == text
    done = gymfast(*call, "--min-ready", "3")
    assert done.code == 4 and "1 of 1 readers are ready after 0.2 s, expected 3" in done.err


def test_waiting_begins_before_there_is_a_run(files: Path, gymfast: Gymfast) -> None:
    call = ("sync", "status", "nowhere", *RUN, "--interval", "0.05", "--timeout", "0.2")
    done = gymfast(*call, "--min-ready", "1")
    assert done.code == 4 and "0 of 0 readers are ready" in done.err


@pytest.fixture
def silent_relay() -> Iterator[str]:
    """A relay that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"relay://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("goal", ["--min-ready", "--wait-for-version"])
def test_waiting_ends_in_time_though_a_relay_says_nothing(
    goal: str, silent_relay: str, gymfast: Gymfast
) -> None:
    begin_s = time.monotonic()
    done = gymfast("sync", "status", silent_relay, *RUN, goal, "1", "--timeout", "2")
    assert done.code == 4 and "0 of 0 readers are ready" in done.err
    assert time.monotonic() - begin_s < 30, "a relay may be silent for 60 s"


def test_waiting_ends_in_time_though_a_store_never_answers(
    store: FileStore, gymfast: Gymfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(FileStore, "list", lambda self, prefix: iter([is_over.wait(LIMIT_S)] * 0))
    done = gymfast("sync", "status", "store", *RUN, "--min-ready", "1", "--timeout", "0.1")
    assert not is_over.is_set()
    is_over.set()
    assert done.code == 4
    assert "0 of 0 readers are ready after 0.1 s, expected 1; " in done.err
    assert "store gives no answer" in " ".join(done.err.split())


def test_the_store_behind_a_silent_relay_is_asked_in_time(
    store: FileStore, silent_relay: str, gymfast: Gymfast
) -> None:
    tell(store, "a", 1)
    both = f"{silent_relay},{Path('store').absolute()}"
    call = ("sync", "status", both, *RUN, "--min-ready", "1", "--timeout", "20")
    assert gymfast(*call).code == 0


def test_a_timeout_needs_something_to_wait_for(store: FileStore, gymfast: Gymfast) -> None:
    done = gymfast("sync", "status", "store", *RUN, "--timeout", "1")
    assert done.code == 2 and "--wait-for-version and --min-ready" in done.err


def test_another_key_ends_the_watch(store: FileStore, gymfast: Gymfast) -> None:
    Path("run.key").write_bytes(b"k" * 32)
    done = gymfast("sync", "status", "store", *RUN, "--watch", "--key-file", "run.key")
    assert done.code == 3 and "not signed" in done.err


@pytest.mark.ci
def test_a_reader_that_follows_is_in_the_fleet_until_it_ends(
    store: FileStore, gymfast: Gymfast
) -> None:
    command = [sys.executable, "-m", "gymfast", "sync", "watch", "store", "replica", *RUN]
    environment = os.environ | {"GYMFAST_READER": "engine-7"}
    with subprocess.Popen([*command, "--interval", "0.05"], env=environment) as process:
        try:
            call = ("sync", "status", "store", *RUN, "--interval", "0.1", "--timeout", "60")
            assert gymfast(*call, "--wait-for-version", "1").code == 0
            (row,) = gymfast("sync", "status", "store", *RUN, "--json").json["fleet"]["readers"]
            assert row["reader"].startswith("engine-7-") and row["version"] == 1
        finally:
            process.send_signal(2)
        process.wait(LIMIT_S)
    assert gymfast("sync", "status", "store", *RUN, "--json").json["fleet"]["readers"] == []


@pytest.mark.ci
def test_a_terminal_shows_a_table_in_its_place(store: FileStore) -> None:
    tell(store, "engine-0", 1, error="[bold]no markup")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gymfast", "sync", "status", "store", *RUN, "--watch"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [*command, "--interval", "0.05"], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen = b""
    try:
        end_s = time.monotonic() + LIMIT_S
        while seen.count(b"1 of 1 ready") < 3:
            assert time.monotonic() < end_s
            seen += os.read(ours, 1 << 16)
    finally:
        process.send_signal(2)
        while True:
            try:
                if not os.read(ours, 1 << 16):
                    break
            except OSError:  # the other side is closed
                break
        code = process.wait(LIMIT_S)
        os.close(ours)
    assert code == 130
    assert b"engine-0" in seen and b"[bold]no markup" in seen
    assert b"\x1b[1A" in seen, "the table is drawn over the one before"
