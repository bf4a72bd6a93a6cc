"""What an object store does when requests, replies and bytes are lost on the way."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from object_double import Bucket, Quiet, serve
from object_proxy import Proxy, Trouble

from gymfast.errors import ConflictError, NotFoundError, StoreError
from gymfast.stores import ObjectStore, check_create_only, object_client, object_parts, objects
from gymfast.testing import store_workers

FOR_EVER = 10**6
PART_BYTES = 1 << 16
BIG = 2 * PART_BYTES + 5


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts and short pauses, so that the tests are quick."""
    for module in (objects, object_parts):
        monkeypatch.setattr(module, "PART_BYTES", PART_BYTES)
    for module in (objects, object_client):
        monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.005)


@pytest.fixture
def store(proxy: Proxy) -> ObjectStore:
    return ObjectStore("s3://bucket", timeout_s=1.0, retry_s=20.0)


@pytest.fixture
def hasty(proxy: Proxy) -> ObjectStore:
    """A store that gives up soon."""
    return ObjectStore("s3://bucket", timeout_s=0.5, retry_s=0.4)


def requests(proxy: Proxy, method: str) -> list[str]:
    """The troubles of all requests with that method."""
    return [kind for seen, _, kind in proxy.seen if seen == method]


@pytest.mark.parametrize(
    "trouble",
    [
        Trouble("lose", "PUT"),
        Trouble("drop", "PUT"),
        Trouble("stall late", "PUT", seconds=2),
        Trouble("stall", "PUT", seconds=2),
        Trouble("answer", "PUT", status=500),
        Trouble("answer late", "PUT", status=500),
        Trouble("answer late", "PUT", status=503, code="SlowDown"),
        Trouble("answer", "PUT", status=409, code="ConditionalRequestConflict"),
        Trouble("answer late", "PUT", status=409, code="ConditionalRequestConflict"),
        Trouble("answer late", "PUT", status=412, code="PreconditionFailed"),
        Trouble("answer late", "PUT", status=408, code="RequestTimeout"),
    ],
    ids=lambda t: f"{t.kind}-{t.status}",
)
def test_I22_an_unclear_create_is_settled_by_reading_back(
    store: ObjectStore, bucket: Bucket, proxy: Proxy, trouble: Trouble
) -> None:
    proxy.troubles.append(trouble)
    store.create("k", b"mine")
    assert bucket.objects["k"].body == b"mine"
    assert requests(proxy, "PUT")[0] == trouble.kind


@pytest.mark.parametrize("kind", ["lose", "answer late"])
@pytest.mark.parametrize("body", [b"mine", b"theirs"])
def test_I22_an_unclear_create_that_came_second_is_a_conflict(
    store: ObjectStore, bucket: Bucket, proxy: Proxy, kind: str, body: bytes
) -> None:
    store.create("k", body)
    proxy.troubles.append(Trouble(kind, "PUT", status=500))
    with pytest.raises(ConflictError, match="create 'k' in s3://bucket: it exists already"):
        store.create("k", b"mine")
    assert bucket.objects["k"].body == body


@pytest.mark.parametrize("kind", ["drop", "answer"])
def test_a_create_that_never_arrives_is_an_error_and_no_conflict(
    hasty: ObjectStore, bucket: Bucket, proxy: Proxy, kind: str
) -> None:
    proxy.troubles.append(Trouble(kind, "PUT", status=503, code="SlowDown", count=FOR_EVER))
    with pytest.raises(StoreError, match="create 'k' in s3://bucket") as caught:
        hasty.create("k", b"mine")
    assert type(caught.value) is StoreError
    assert not bucket.objects
    assert len(requests(proxy, "PUT")) > 1


def test_a_create_whose_effect_cannot_be_seen_is_an_error_and_no_success(
    hasty: ObjectStore, proxy: Proxy
) -> None:
    proxy.troubles += [Trouble("lose", "PUT"), Trouble("answer", "HEAD", count=FOR_EVER)]
    with pytest.raises(StoreError) as caught:
        hasty.create("k", b"mine")
    assert type(caught.value) is StoreError


def test_a_refused_create_is_not_tried_again(store: ObjectStore, proxy: Proxy) -> None:
    proxy.troubles.append(Trouble("answer", "PUT", status=403, code="AccessDenied", count=2))
    with pytest.raises(StoreError, match="AccessDenied 403"):
        store.create("k", b"mine")
    assert requests(proxy, "PUT") == ["answer"]


def test_I22_one_of_8_wins_while_replies_are_lost(store: ObjectStore, proxy: Proxy) -> None:
    kinds = ("lose", "answer late", "drop", "answer", "lose")
    for number, kind in enumerate(kinds * 4):
        status = (500, 409, 503, 412)[number % 4]
        proxy.troubles.append(Trouble(kind, "PUT", "race/", status=status, skip=number % 3))
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: store_workers.race(store, n, 6, lambda: None), range(8)))
    assert sorted(chain.from_iterable(won)) == list(range(6))
    for writer, rounds in enumerate(won):
        for index in rounds:
            found = store.get(store_workers.race_key(index), max_bytes=64)
            assert found == b"writer %d" % writer
    assert not any(trouble.count for trouble in proxy.troubles)


def test_I24_the_test_of_create_only_survives_lost_replies(
    store: ObjectStore, bucket: Bucket, proxy: Proxy
) -> None:
    proxy.troubles += [Trouble("lose", "PUT", skip=1), Trouble("answer late", "PUT", status=503)]
    check_create_only(store)
    assert not bucket.objects


@pytest.mark.parametrize(
    "trouble",
    [
        Trouble("lose", "PUT", "partNumber=2"),
        Trouble("answer", "PUT", "partNumber=1", status=500),
        Trouble("answer", "POST", "uploads", status=503, code="SlowDown"),
        Trouble("lose", "POST", "uploadId"),
        Trouble("answer late", "POST", "uploadId", status=500),
    ],
    ids=lambda t: f"{t.kind}-{t.path}",
)
def test_an_upload_gets_through_and_leaves_no_parts(
    store: ObjectStore, bucket: Bucket, proxy: Proxy, trouble: Trouble
) -> None:
    proxy.troubles.append(trouble)
    blob = os.urandom(BIG)
    store.put("k", iter([blob]))
    assert bucket.objects["k"].body == blob
    assert not bucket.uploads
    assert trouble.count == 0


@pytest.mark.parametrize("path", ["partNumber=1&", "partNumber=3&", "uploadId"])
def test_a_failed_upload_is_aborted_and_leaves_the_old_object(
    hasty: ObjectStore, bucket: Bucket, proxy: Proxy, path: str
) -> None:
    hasty.put("k", b"old")
    method = "POST" if path == "uploadId" else "PUT"
    proxy.troubles.append(Trouble("answer", method, path, status=507, count=FOR_EVER))
    with pytest.raises(StoreError, match=r"put 'k' in s3://bucket: .* 507; no room") as caught:
        hasty.put("k", bytes(BIG))
    assert type(caught.value) is StoreError
    assert bucket.objects["k"].body == b"old"
    assert not bucket.uploads


def test_an_error_of_the_producer_comes_through_though_the_abort_fails(
    store: ObjectStore, bucket: Bucket, proxy: Proxy
) -> None:
    def produce() -> Iterator[bytes]:
        yield bytes(BIG)
        raise OSError("mine")

    store.put("k", b"old")
    proxy.troubles.append(Trouble("answer", "DELETE", status=403, count=FOR_EVER))
    with pytest.raises(OSError, match=r"^mine$"):
        store.put("k", produce())
    assert bucket.objects["k"].body == b"old"


@pytest.mark.parametrize("size", [1000, BIG])
@pytest.mark.parametrize("kind", ["cut", "drop", "stall"])
def test_a_read_goes_on_where_it_was_cut(
    store: ObjectStore, proxy: Proxy, size: int, kind: str
) -> None:
    blob = os.urandom(size)
    store.put("k", blob)
    proxy.troubles.append(Trouble(kind, "GET", skip=1 if size == BIG else 0, seconds=4))
    assert store.get("k", max_bytes=size) == blob
    assert kind in requests(proxy, "GET")


@pytest.mark.parametrize("kind", ["cut", "drop", "stall"])
def test_a_read_that_is_always_cut_is_an_error_with_its_name(
    hasty: ObjectStore, proxy: Proxy, kind: str
) -> None:
    hasty.put("k", os.urandom(1000))
    proxy.troubles.append(Trouble(kind, "GET", count=FOR_EVER, seconds=2))
    start_s = time.monotonic()
    for read in (lambda: hasty.get("k", max_bytes=1000), lambda: hasty.get_range("k", 10, 900)):
        with pytest.raises(StoreError, match=r"get(_range)? 'k' in s3://bucket: ") as caught:
            read()
        assert not isinstance(caught.value, NotFoundError)
    assert time.monotonic() - start_s < 60


def test_I20_an_object_replaced_during_a_long_read_is_never_mixed(
    store: ObjectStore, bucket: Bucket, proxy: Proxy
) -> None:
    store.put("k", b"\x00" * BIG)
    take, done = proxy.take, []

    def replace(method: str, path: str) -> Trouble | None:
        if method == "GET" and requests(proxy, "GET") and not done:
            done.append(bucket.objects["k"].__init__(b"\x01" * BIG, {}))
        return take(method, path)

    proxy.take = replace
    with pytest.raises(StoreError, match=r"get 'k' in s3://bucket: .*somebody else meanwhile"):
        store.get("k", max_bytes=BIG)
    assert done
    assert hashlib.sha256(store.get("k", max_bytes=BIG)).digest() == (
        hashlib.sha256(b"\x01" * BIG).digest()
    )


class _Endless(Quiet):
    """A server that says that its objects have a tebibyte, and never ends."""

    def do_GET(self) -> None:
        has_range = "range" in self.headers and "lies" not in self.path
        self.send_response(206 if has_range else 200)
        self.send_header("content-length", str(1 << 40))
        self.send_header("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if has_range:
            self.send_header("content-range", f"bytes 0-{(1 << 40) - 1}/{1 << 40}")
        self.end_headers()
        if self.command == "GET":
            while self.wfile.write(bytes(1 << 16)):
                pass

    do_HEAD = do_GET  # noqa: N815


def test_an_endless_object_is_refused_unread(monkeypatch: pytest.MonkeyPatch, bucket) -> None:
    with serve(_Endless) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        store = ObjectStore("s3://bucket", timeout_s=2, retry_s=1)
        assert store.size("k") == 1 << 40
        with pytest.raises(StoreError, match=f"'k' .*{1 << 40} bytes, over the limit of 1000"):
            store.get("k", max_bytes=1000)
        for key in ("k", "lies"):
            with pytest.raises(StoreError, match=f"get_range '{key}' in s3://bucket: "):
                store.get_range(key, 5, 10)


def test_flipped_bytes_pass_a_store_and_are_for_the_digest_to_find(
    store: ObjectStore, proxy: Proxy
) -> None:
    store.put("k", bytes(100))
    proxy.troubles.append(Trouble("flip", "GET"))
    assert store.get("k", max_bytes=100) != bytes(100)
    assert store.get("k", max_bytes=100) == bytes(100)
