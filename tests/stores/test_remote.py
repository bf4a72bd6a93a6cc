"""A store behind HTTP: the contract over real sockets, and servers that misbehave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gymfast.errors import NotFoundError, StoreError
from gymfast.stores import FileStore, MemoryStore, Store, open_store
from gymfast.stores.fallback import FallbackStore
from gymfast.stores.remote import RemoteStore
from gymfast.stores.store_server import StoreServer
from gymfast.testing.conformance import StoreContract
from gymfast.testing.faults import PassThroughStore

KEY = b"correct-horse-battery"


@contextmanager
def serving(store: Store, key: bytes | None = None, **options) -> Iterator[StoreServer]:
    with StoreServer("127.0.0.1", 0, store, key, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.ci
class TestRemoteStore(StoreContract):
    is_shared = True
    num_thread_rounds = 20
    num_process_rounds = 5
    num_kills = 2

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with serving(FileStore(tmp_path / "store")) as server:
            yield open_store(server.url)


def test_a_key_is_needed_and_never_shown(tmp_path: Path, monkeypatch) -> None:
    with serving(MemoryStore(), KEY) as server:
        with_key = RemoteStore(server.address, KEY)
        with_key.put("k", b"1")
        for other in (None, b"another key".replace(b" ", b"-")):
            with pytest.raises(StoreError, match="wrong or missing key") as caught:
                RemoteStore(server.address, other).get("k", max_bytes=1)
            assert "another" not in str(caught.value)
        (tmp_path / "key").write_bytes(KEY + b"\n")
        monkeypatch.setenv("GYMFAST_RELAY_KEY_FILE", str(tmp_path / "key"))
        store = open_store(server.url)
        assert store.get("k", max_bytes=1) == b"1"
        assert KEY.decode() not in repr(vars(server)["server_address"]) + store.url
    monkeypatch.setenv("GYMFAST_RELAY_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"GYMFAST_RELAY_KEY_FILE is .* cannot be read"):
        open_store("relay://127.0.0.1:1")
    with pytest.raises(ValueError, match="give a key"):
        StoreServer("0.0.0.0", 0, MemoryStore())


def test_what_may_not_be_written_is_refused(tmp_path: Path) -> None:
    inner = MemoryStore()
    with serving(inner, may_write=lambda key: key.startswith("a/")) as server:
        store = open_store(server.url)
        store.put("a/k", b"1")
        for write in (
            lambda: store.put("k", b"1"),
            lambda: store.create("k", b"1"),
            lambda: store.delete("k"),
        ):
            with pytest.raises(StoreError, match=r"may not be written here.*publish to the store"):
                write()
        assert list(inner.list("")) == ["a/k"]


def test_a_connection_is_used_again_and_replaced_when_the_server_ended_it() -> None:
    inner = MemoryStore()
    inner.put("k", b"0123456789")
    with serving(inner) as server:
        accepted = []
        get_request = server.get_request
        server.get_request = lambda: accepted.append(get_request()) or accepted[-1]
        store = open_store(server.url)
        for _ in range(5):
            assert store.get_range("k", 2, 3) == b"234"
        assert len(accepted) == 1
        accepted[0][0].shutdown(socket.SHUT_RDWR)
        assert store.get("k", max_bytes=10) == b"0123456789"
        assert len(accepted) == 2


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a server that says this to everybody."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "closed connection"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "BadStatusLine|SSH-2.0"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123", "IncompleteRead|bytes read"),
        (b"HTTP/1.1 200 OK\r\n\r\n0123456789", "without Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", "over the limit of 10"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 4\r\n\r\n\x1b[2J", r"\[2J \(status 500\)"),
        (b"HTTP/1.1 302 X\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", "status 302"),
    ],
)
def test_a_server_that_is_no_relay_is_one_error(answer: bytes, says: str) -> None:
    with answering(answer) as address:
        store = RemoteStore(address, timeout_s=10)
        with pytest.raises(StoreError, match=says) as caught:
            store.get("k", max_bytes=10)
        assert str(caught.value).isprintable()
        with pytest.raises(StoreError):
            store.get_range("k", 0, 10)


def test_a_silent_server_is_given_up_and_an_absent_one_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StoreError, match=r"'k' in relay://.*timed out"):
            RemoteStore(address, timeout_s=0.2).size("k")
    with pytest.raises(StoreError, match="check that the relay runs"):
        RemoteStore(address, timeout_s=5).size("k")
    for bad in ("host", "host:", "http://h:1", "user:secret@h:1", "h:1/x"):
        with pytest.raises(ValueError, match="expected HOST:PORT"):
            RemoteStore(bad)


def test_an_object_that_ends_half_way_is_an_error(tmp_path: Path) -> None:
    class Broken(PassThroughStore):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            if start:
                raise StoreError("the disk is gone")
            return super().get_range(key, start, length)

    inner = MemoryStore()
    inner.put("k", bytes(20 << 20))
    with serving(Broken(inner)) as server:
        store = open_store(server.url)
        with pytest.raises(StoreError, match=r"IncompleteRead|bytes read"):
            store.get("k", max_bytes=20 << 20)
        with pytest.raises(StoreError, match="the disk is gone"):
            store.get_range("k", 5, 1)


class Failing(PassThroughStore):
    """Fails while `is_away`."""

    is_away = False
    calls = 0

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self.calls += 1
        if self.is_away:
            raise StoreError("away")
        return super().get(key, max_bytes=max_bytes)


def test_the_store_behind_is_used_while_the_relay_is_away(monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("gymfast.stores.fallback.time.monotonic", lambda: now[0])
    inner = MemoryStore()
    inner.put("k", b"1")
    first = Failing(inner)
    store = FallbackStore(first, inner)
    assert store.get("k", max_bytes=1) == b"1"
    with pytest.raises(NotFoundError):
        store.get("none", max_bytes=1)
    assert first.calls == 2
    first.is_away = True
    assert store.get("k", max_bytes=1) == b"1"
    assert store.get("k", max_bytes=1) == b"1"
    assert first.calls == 3
    first.is_away = False
    now[0] += 11
    assert store.get("k", max_bytes=1) == b"1"
    assert first.calls == 4
