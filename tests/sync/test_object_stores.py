"""Publishers and readers over object stores, with trouble on the way: exact, or a clear error."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from object_double import Bucket, serve_bucket
from object_proxy import Proxy, Trouble, serve_proxy
from object_settings import s3_settings
from sync.harness import RUN, assert_same, history, reader, zeros_like

from gymfast.errors import ConflictError, StoreError
from gymfast.stores import ObjectStore, object_client, objects, open_store
from gymfast.sync import Publisher, collect
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import FrameRef, ObjectRef
from gymfast.sync.objects import read_frame


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with serve_bucket() as served:
        yield served


@pytest.fixture
def proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with serve_proxy(bucket.endpoint) as between:
        for name, value in s3_settings(between.endpoint).items():
            monkeypatch.setenv(name, value)
        for module in (objects, object_client):
            monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.005)
        yield between


@pytest.fixture
def store(proxy: Proxy) -> ObjectStore:
    return ObjectStore("s3://bucket/a", timeout_s=5, retry_s=20)


def test_versions_arrive_exactly_through_lost_replies_and_damage(
    store: ObjectStore, proxy: Proxy
) -> None:
    states = history(5)
    source = Publisher(store, RUN, threads=1, keep=2, anchor_every=2)
    live = zeros_like(states[0])
    follower = reader(store, live)
    for version, weights in enumerate(states):
        proxy.troubles[:] = [
            Trouble("lose", "PUT", "/log/"),
            Trouble("answer late", "PUT", "/objects/", status=503, code="SlowDown"),
            Trouble("answer", "HEAD", "/objects/", status=500),
            Trouble("flip", "GET", "/objects/"),
            Trouble("cut", "GET", "/objects/", skip=1),
            Trouble("lose", "DELETE", "/objects/"),
        ]
        source.publish(weights)
        assert follower.pull().version == version
        assert_same(live, weights)
        assert [t.kind for t in proxy.troubles[:4] if t.count] == []


def test_I23_a_publisher_whose_replies_are_lost_is_fenced_and_never_commits(
    store: ObjectStore, proxy: Proxy
) -> None:
    states = history(3)
    old = Publisher(store, RUN, threads=1)
    old.publish(states[0])
    new = Publisher(store, RUN, threads=1)
    new.adopt(states[0])
    proxy.troubles += [Trouble("lose", "PUT", "/log/"), Trouble("answer late", "PUT", "/log/")]
    with pytest.raises(ConflictError, match="fenced"):
        old.publish(states[1])
    new.publish(states[2])
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[2])


def test_I24_two_publishers_are_refused_where_conditions_are_ignored(
    store: ObjectStore, bucket: Bucket
) -> None:
    bucket.ignores_conditions = True
    with pytest.raises(StoreError, match=r"s3://bucket/a created .* twice"):
        Publisher(store, RUN, threads=1)
    source = Publisher(store, RUN, threads=1, single_writer=True)
    states = history(1)
    source.publish(states[0])
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[0])


def test_a_reader_follows_a_web_server_that_lists(store: ObjectStore, bucket: Bucket) -> None:
    states = history(2)
    source = Publisher(store, RUN, threads=1)
    source.publish(states[0])
    web = open_store(f"{bucket.endpoint}/bucket/a")
    live = zeros_like(states[0])
    with pytest.raises(StoreError, match="gives no lists"):
        reader(web, live).pull()
    bucket.is_webdav = True
    follower = reader(web, live)
    for weights in states[1:]:
        source.publish(weights)
        follower.pull()
        assert_same(live, weights)


def test_what_retention_drops_is_gone_from_the_bucket(store: ObjectStore, bucket: Bucket) -> None:
    source = Publisher(store, RUN, threads=1, keep=1, anchor_every=1)
    for weights in history(4):
        source.publish(weights)
    collect(store, RUN, keep=1)
    logs = sorted(key for key in bucket.objects if "/log/" in key)
    assert len(logs) < 8
    assert all(key.startswith("a/") for key in bucket.objects)


def test_a_long_object_is_read_in_pieces_ahead_and_checked(
    store: ObjectStore, proxy: Proxy
) -> None:
    blob = os.urandom(20 << 20)
    ref = ObjectRef(hashlib.sha256(blob).hexdigest(), len(blob))
    keys, record = RunKeys("r"), SimpleNamespace(epoch=1, frame=FrameRef(len(blob), (ref,)))
    store.put(keys.object(1, ref.digest), blob)
    pieces = list(read_frame(store, keys, record))
    assert len(pieces) == 3
    assert b"".join(pieces) == blob
    proxy.troubles.append(Trouble("answer", "GET", status=403, code="AccessDenied", skip=1))
    with pytest.raises(StoreError, match="AccessDenied"):
        list(read_frame(store, keys, record))
    assert np.frombuffer(next(read_frame(store, keys, record)), np.uint8).size == 8 << 20
