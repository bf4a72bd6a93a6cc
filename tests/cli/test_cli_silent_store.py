"""A store that takes the connection and never answers ends each command in time, with one error."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_commands import Gymfast

from gymfast.errors import StoreError
from gymfast.stores import MemoryStore, check_create_only

RUN = ("--run", "demo")
LONG_S = 15.0
"""The shortest default silence of a store: who takes less has heeded the time-out."""


@pytest.fixture(params=["relay", "http", "s3"])
def silent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a store whose server accepts and says nothing."""
    if request.param != "relay":
        pytest.importorskip("obstore")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{place}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        names = {"relay": f"relay://{place}", "http": f"http://{place}/x", "s3": "s3://bucket/x"}
        yield names[request.param]


@pytest.mark.parametrize(
    "call", [("pull", "r"), ("watch", "r"), ("watch",)], ids=["pull", "watch", "list"]
)
def test_a_command_with_a_timeout_ends_in_time(
    call: tuple[str, ...], silent: str, files: Path, gymfast: Gymfast
) -> None:
    command, *dest = call
    begin_s = time.monotonic()
    done = gymfast("sync", command, silent, *dest, *RUN, "--timeout", "0.3")
    assert time.monotonic() - begin_s < LONG_S
    assert done.code == (4 if command == "watch" else 1)
    text = " ".join(done.err.split())
    assert "list 'demo/floors/' in " in text and silent in text
    assert "no answer in time" in text or "timed out" in text
    assert "WebDAV" not in text, "what it cannot do is not known"


@pytest.mark.parametrize("command", ["status", "fsck", "gc"])
def test_a_command_without_a_timeout_ends_as_the_store_does(
    command: str, files: Path, gymfast: Gymfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymfast.stores.remote.TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"relay://127.0.0.1:{listener.getsockname()[1]}"
        done = gymfast("sync", command, place, *RUN)
    assert done.code == 1 and "list 'demo/log/' in " in " ".join(done.err.split())


def test_publish_names_the_first_request_that_had_no_answer(
    files: Path, gymfast: Gymfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymfast.stores.remote.TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"relay://127.0.0.1:{listener.getsockname()[1]}"
        done = gymfast("sync", "publish", place, "old.safetensors", *RUN)
    assert done.code == 1 and "create 'demo/probe/" in " ".join(done.err.split()), done.err


def test_a_test_of_a_store_names_what_failed_first() -> None:
    class Failing(MemoryStore):
        def create(self, key: str, data: object) -> None:
            raise StoreError(f"create '{key}' failed")

        def delete(self, key: str) -> None:
            raise StoreError(f"delete '{key}' failed")

    with pytest.raises(StoreError, match=r"create .* failed"):
        check_create_only(Failing())


def test_a_store_below_a_folder_that_is_not_there_is_no_store(
    files: Path, gymfast: Gymfast
) -> None:
    """A disk that is not mounted, a name that is misspelt: nothing may be made there."""
    missing = Path("mnt/weights").absolute()
    for store in ("mnt/weights/run", f"file:{missing}/run"):
        done = gymfast("sync", "publish", store, "old.safetensors", *RUN)
        text = " ".join(done.err.split())
        assert done.code == 5 and f"{missing} does not exist" in text and "mounted" in text
        assert not Path("mnt").exists()
    missing.mkdir(parents=True)
    assert gymfast("sync", "publish", "mnt/weights/run", "old.safetensors", *RUN).code == 0
