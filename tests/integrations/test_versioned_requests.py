"""Answers that a client of engines does not take."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from gymfast.errors import ChannelError, DeadlineError
from gymfast.integrations.engine_http import EngineHttp
from gymfast.integrations.versioned_requests import VersionedRequests


@contextmanager
def answering(head: str, *parts: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """A server that gives one answer to each connection, in parts."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(1 << 16)
                    connection.sendall(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
                    for part in parts:
                        connection.sendall(part)
                        time.sleep(pause_s)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def told(start: str, end: str) -> str:
    names = f"X-Gymfast-Version-Start: {start}\r\nX-Gymfast-Version-End: {end}"
    return f"Content-Length: 2\r\n{names}"


@pytest.mark.parametrize(
    ("start", "end", "asked", "text"),
    [
        ("3", "9", {"min_version": 7}, "version 3 at the start and 9 at the end"),
        ("3", "3", {"exact_version": 7}, "version 3 at the start"),
        ("7", "9", {"exact_version": 7}, "7 at the start and 9 at the end"),
        ("9" * 5000, "9", {"min_version": 7}, "does not say which version"),
        ("٣", "9", {"min_version": 1}, "does not say which version"),
    ],
)
def test_an_answer_of_another_version_is_none(
    start: str, end: str, asked: dict[str, int], text: str
) -> None:
    with answering(told(start, end), b"{}") as url, pytest.raises(ChannelError, match=text):
        VersionedRequests([url]).post("/v1/completions", {}, **asked)


def test_an_answer_of_the_version_is_taken() -> None:
    with answering(told("7", "unknown"), b"{}") as url:
        for asked in ({"exact_version": 7}, {"min_version": 7}):
            assert VersionedRequests([url]).post("/", {}, **asked).start_version == 7


@pytest.mark.parametrize("head", ["Content-Length: 9000", "Connection: close"])
def test_an_answer_that_drips_in_is_given_up(head: str) -> None:
    with (
        answering(head, *[b" "] * 60, pause_s=0.05) as url,
        pytest.raises(ChannelError, match="gave no answer"),
    ):
        VersionedRequests([url], timeout_s=0.3).post("/", {})


def test_an_answer_that_is_cut_off_is_none() -> None:
    with (
        answering("Content-Length: 9", b"{}") as url,
        pytest.raises(ChannelError, match=r"gave no answer|IncompleteRead"),
    ):
        VersionedRequests([url]).post("/", {})


@pytest.mark.parametrize(("patience_s", "num_asked"), [(1e-9, 1), (0, 3)])
def test_engines_that_do_not_answer_are_not_asked_after_the_time(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, num_asked: int
) -> None:
    asked: list[str] = []

    def silent(engine: EngineHttp, *_: object) -> None:
        asked.append(engine.url)
        raise ChannelError("no answer")

    monkeypatch.setattr(EngineHttp, "call", silent)
    requests = VersionedRequests(["http://a", "http://b", "http://c"])
    with pytest.raises(DeadlineError, match="no engine took the request"):
        requests.post("/", {}, patience_s=patience_s)
    assert len(asked) == num_asked


def test_a_name_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ValueError, match="user's name") as caught:
        VersionedRequests(["http://me:hidden@localhost:8000"])
    assert "hidden" not in str(caught.value)
