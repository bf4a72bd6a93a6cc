"""Who reaches a relay or the pull endpoint without its key gets nothing (I81, I83, R114)."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - what an attacker sends
import socket
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from sync.harness import assert_same, history, publisher, reader, zeros_like

import gymfast.keyed_http as keyed_http
from gymfast.channels import Hub
from gymfast.delta.hf_delta.server import PullServer
from gymfast.errors import ChannelError, GymfastError
from gymfast.keyed_http import KeyedServer
from gymfast.stores import FileStore, MemoryStore, open_store
from gymfast.stores.remote import RemoteStore
from gymfast.stores.store_server import StoreServer
from gymfast.sync.relay import is_of_reader

KEY = b"correct-horse-battery"
SECRET = b"nothing for strangers"


@contextmanager
def running(server: KeyedServer) -> Iterator[KeyedServer]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Service:
    """A server with a key, and a request that needs it; `is_untouched` looks behind it."""

    def __init__(self, server: KeyedServer, method: str, path: str) -> None:
        self.server, self.method, self.path = server, method, path

    def call(self) -> socket.socket:
        host, port = self.server.server_address[:2]
        return socket.create_connection((str(host), port), 20)

    def ask(self, raw: bytes) -> bytes:
        """The answer to these bytes, all of it."""
        with self.call() as connection:
            with suppress(ConnectionError):  # it may answer and hang up before it has read all
                connection.sendall(raw)
                connection.shutdown(socket.SHUT_WR)
            return read_all(connection)

    def request(self, *headers: str) -> bytes:
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: x", *headers, "", ""]
        return "\r\n".join(lines).encode()

    def require_served(self) -> None:
        """A client with the key is answered."""
        answer = self.ask(self.request(f"Authorization: Bearer {KEY.decode()}"))
        assert answer.startswith(b"HTTP/1."), answer
        assert b" 401 " not in answer


def status_of(answer: bytes) -> int | None:
    """The status; None for a refusal of what is no request of HTTP/1, which has no head."""
    if not answer or answer.startswith(b'{"success": false'):
        return None
    return int(answer.split(b" ", 2)[1])


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.fixture(params=["relay", "pull"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    if request.param == "relay":
        store = FileStore(tmp_path / "root")
        store.put("k", SECRET)
        (tmp_path / "outside").write_bytes(SECRET)
        server: KeyedServer = StoreServer("127.0.0.1", 0, store, KEY, may_write=is_of_reader)
        with running(server):
            yield Service(server, "GET", "/objects/k")
        assert list(store.list("")) == ["k"]
        assert store.get("k", max_bytes=100) == SECRET
    else:

        def never(_: object) -> object:
            raise AssertionError("a stranger had weights pulled")

        server = PullServer("127.0.0.1", 0, never, KEY)
        with running(server):
            yield Service(server, "POST", "/pull_weights")


def refuses(answer: bytes, status: int) -> None:
    assert answer.split(b" ", 2)[1] == str(status).encode(), answer
    assert SECRET not in answer
    assert KEY not in answer


METHODS = ("GET", "HEAD", "PUT", "DELETE", "POST", "PATCH", "OPTIONS")


def test_I81_without_a_key_no_method_and_no_path_says_anything(service: Service) -> None:
    body = b'{"target_version": 1}'
    for method in METHODS:
        for path in ("/objects/k", "/objects/none", "/list?prefix=", "/status", "/pull_weights"):
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            answer = service.ask(head.encode() + body)
            assert answer.split(b" ", 2)[1] in (b"401", b"501"), answer
            assert SECRET not in answer


ALMOST_THE_KEY = (
    "Authorization: Bearer",
    f"Authorization: Bearer {KEY.decode()[:-1]}",
    f"Authorization: Bearer {KEY.decode()}x",
    f"Authorization: bearer {KEY.decode()}",
    f"Authorization: Basic {KEY.decode()}",
    f"Authorization: {KEY.decode()}",
    f"X-Authorization: Bearer {KEY.decode()}",
    f"Authorization: Bearer wrong\r\nAuthorization: Bearer {KEY.decode()}",
    f"Authorization: Bearer {KEY.decode()}\u00e9",
)


def test_I81_a_key_that_is_not_exactly_the_key_is_none(service: Service) -> None:
    for sent in ALMOST_THE_KEY:
        refuses(service.ask(service.request(sent)), 401)
    service.require_served()


ABSURD = (
    (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
    (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 200 + b"\r\n", 431),
    (b"GET / HTTP/9.9\r\n\r\n", 505),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    (b"PUT /objects/k HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n", 401),
    (b"POST /pull_weights HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 401),
    (b"PUT /objects/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n", 401),
)


def test_I11_requests_of_absurd_size_are_refused_unread(service: Service) -> None:
    for raw, status in ABSURD:
        answer = service.ask(raw)
        assert status_of(answer) in (status, 501, None), answer
        assert SECRET not in answer
    service.require_served()


def test_I11_a_head_of_many_long_headers_is_refused_early(service: Service) -> None:
    """The limit is of the whole head: not even its end has to be there."""
    head = service.request()[:-2]
    while len(head) < 60 << 10:
        head += b"X: " + b"a" * 5000 + b"\r\n"
    answer = service.ask(head + b"X: " + b"a" * ((64 << 10) - len(head)))
    assert status_of(answer) == 431, answer
    assert b"the head of the request is over 65536 bytes" in answer
    refuses(service.ask(head + b"\r\n"), 401)
    service.require_served()


def test_I81_the_head_of_a_request_has_to_come_in_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then is no life: the whole head counts, not the pause between two bytes."""
    monkeypatch.setattr(keyed_http, "_TIMEOUT_S", 1.0)
    with service.call() as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        end_s = time.monotonic() + 60
        with pytest.raises(ConnectionError):  # noqa: PT012 - it ends with one of many sends
            while time.monotonic() < end_s:
                slow.sendall(b"X: 1\r\n")
                time.sleep(0.1)
        service.require_served()


def test_I81_connections_that_say_nothing_keep_nobody_out(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_http, "_MAX_WAITING", 20)
    with ExitStack() as stack:
        silent = [stack.enter_context(closing(service.call())) for _ in range(60)]
        for connection in silent[::2]:
            with suppress(ConnectionError):
                connection.sendall(b"GET /objects/k HTTP/1.1\r\n")
        for _ in range(5):
            service.require_served()
        assert len(service.server._waiting) <= 20
        ended = [connection for connection in silent[:30] if read_all(connection) == b""]
        assert len(ended) == 30, "the oldest were disconnected"


PATHS = [
    *("/objects/../outside", "/objects/%2e%2e/outside", "/objects/..%2foutside", "/objects//k"),
    *("/objects/%252e%252e/outside", "/objects/./k", "/objects/k/../../outside", "/objects/"),
    *("/objects/k%00", "/objects/k%0d%0aX: 1", "/objects/.k", "/objects/~k", "/objects/C:\\k"),
    *("/objects/\\..\\outside", "/objects/%c0%ae%c0%ae/outside", "/objects/%ff", "/../outside"),
    *("//objects/../../outside", "/list?prefix=../", "/list?prefix=%2e%2e/", "/list?prefix=/"),
    *("/objects/" + "a" * 300, "/objects/" + "a/" * 600 + "a", "/list?prefix=k%00", "outside"),
]


@pytest.mark.parametrize("service", ["relay"], indirect=True)
def test_I83_no_path_leads_outside_even_with_the_key(service: Service) -> None:
    """Also where everything may be written; the fixture looks at what is there afterwards."""
    service.server.may_write = lambda key: key != "k"
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        for path in PATHS:
            head = f"{method} {path} HTTP/1.1\r\nAuthorization: Bearer {KEY.decode()}\r\n"
            answer = service.ask(f"{head}Content-Length: 1\r\n\r\nx".encode("latin-1"))
            status = int(answer.split(b" ", 2)[1])
            assert 400 <= status < 500 or status == 505, (method, path, answer)
            assert SECRET not in answer
            assert b"\nX: 1" not in answer.partition(b"\r\n\r\n")[0], "a path became a header"


@pytest.mark.parametrize("service", ["relay"], indirect=True)
def test_I81_a_body_that_nobody_asked_for_is_no_second_request(service: Service) -> None:
    inner = service.request(f"Authorization: Bearer {KEY.decode()}")
    for header in (f"Content-Length: {len(inner)}", "Transfer-Encoding: chunked"):
        answer = service.ask(
            service.request(f"Authorization: Bearer {KEY.decode()}", header) + inner
        )
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.count(SECRET) == 1
    assert service.ask(inner + inner).count(SECRET) == 2, "two requests are two"


class Attack:
    """Makes a file where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.proof,)


def torch_zip(path: Path, pickled: bytes) -> bytes:
    """A file as torch.save makes it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    return path.read_bytes()


@pytest.fixture(params=["pickle", "torch zip"])
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[bytes]:
    """Bytes that would run code if anybody unpickled them; nobody may."""
    blob = pickle.dumps(Attack(tmp_path / "proof"))
    yield blob if request.param == "pickle" else torch_zip(tmp_path / "t.pt", blob)
    assert not (tmp_path / "proof").exists(), "it was unpickled"


def test_R114_a_pickle_sent_to_an_endpoint_is_refused_unread(
    hostile: bytes, service: Service
) -> None:
    authorized = f"Authorization: Bearer {KEY.decode()}"
    for head in (b"", service.request(authorized, f"Content-Length: {len(hostile)}")):
        answer = service.ask(head + hostile)
        assert status_of(answer) in (400, 401, 200, 505, 501, None), answer
    service.require_served()


def test_R114_a_pickle_sent_to_a_rank_is_refused_unread(hostile: bytes) -> None:
    hub = Hub(key=b"a key of some length")
    try:
        with socket.create_connection(hub.address, 20) as caller:
            with suppress(ConnectionError):
                caller.sendall(hostile)
                caller.shutdown(socket.SHUT_WR)
            read_all(caller)
        with pytest.raises(ChannelError):
            hub.control.wait_for(2, 0.2)
    finally:
        hub.close()


def test_R114_a_pickle_in_place_of_anything_of_a_run_is_damage(hostile: bytes) -> None:
    """Records, hints, leases and objects, each in turn: refused, and the next state heals it."""
    states = history(3)
    inner = MemoryStore()
    source = publisher(inner)
    for state in states[:2]:
        source.publish(state)
    live = zeros_like(states[0])
    staged = reader(inner, live).fetch()
    keys = [*inner.list("")]
    assert len({key.split("/")[1] for key in keys}) >= 3
    staged.close()
    for key in keys:
        store = MemoryStore()
        for other in keys:
            store.put(other, inner.get(other, max_bytes=1 << 30))
        store.put(key, hostile)
        held = zeros_like(states[0])
        try:
            found = reader(store, held, timeout_s=0.1).pull()
        except GymfastError:
            assert_same(held, zeros_like(states[0]))
        else:
            assert_same(held, states[found.version])


@pytest.mark.parametrize("service", ["relay"], indirect=True)
def test_R114_what_a_server_answers_is_never_unpickled(hostile: bytes, service: Service) -> None:
    """A relay that is an attacker: its objects, lists and errors are a pickle."""
    head = b"HTTP/1.1 %d X\r\nContent-Length: " + str(len(hostile)).encode() + b"\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for status in (200, 200, 500, 404):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(head % status + hostile)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        store = RemoteStore(f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=20)
        assert store.get("k", max_bytes=1 << 20) == hostile
        for ask in (
            lambda: list(store.list("")),
            lambda: store.get("k", max_bytes=1),
            store.status,
        ):
            with suppress(GymfastError, ValueError, UnicodeDecodeError, json.JSONDecodeError):
                ask()
        thread.join(20)
    assert open_store(service.server.url).url == service.server.url
