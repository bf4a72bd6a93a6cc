"""Stores of web servers: read only, whole and in ranges; lists over WebDAV or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from object_double import Bucket
from safetensors.numpy import save_file

from gymfast.cli import main
from gymfast.errors import NotFoundError, StoreError
from gymfast.stores import HttpStore, Store, check_create_only, open_store


@pytest.fixture
def web(bucket: Bucket) -> HttpStore:
    """A web server of what lies in s3://bucket/run."""
    store = open_store(f"{bucket.endpoint}/bucket/run/")
    assert isinstance(store, HttpStore)
    return store


@pytest.fixture
def source(bucket: Bucket) -> Store:
    return open_store("s3://bucket/run")


def test_objects_are_read_whole_and_in_ranges(web: HttpStore, source: Store) -> None:
    source.put("a/b", b"0123456789")
    source.put("a/empty", b"")
    assert web.url.startswith("http://127.0.0.1:")
    assert web.size("a/b") == 10
    assert web.get("a/b", max_bytes=10) == b"0123456789"
    assert web.get("a/empty", max_bytes=0) == b""
    assert web.get_range("a/b", 3, 4) == b"3456"
    with pytest.raises(StoreError, match="10 bytes, over the limit of 9"):
        web.get("a/b", max_bytes=9)
    with pytest.raises(StoreError, match=r"expected 5 bytes at 8, .* only 10 bytes"):
        web.get_range("a/b", 8, 5)
    for read in (lambda: web.get("no", max_bytes=1), lambda: web.size("no")):
        with pytest.raises(NotFoundError, match="'no' in http://127"):
            read()


@pytest.mark.parametrize(
    "write", [lambda s: s.put("k", b""), lambda s: s.create("k", b""), lambda s: s.delete("k")]
)
def test_writes_are_refused(web: HttpStore, write: Callable[[HttpStore], None]) -> None:
    with pytest.raises(StoreError, match=r"'k' in http://.*: a web server is only read"):
        write(web)
    assert not web.has_create_only
    with pytest.raises(StoreError, match=r"'probe/.*: a web server is only read"):
        check_create_only(web)


def test_who_publishes_to_a_web_server_is_told_that_it_is_only_read(
    web: HttpStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "w.safetensors"
    save_file({"w": np.arange(100, dtype=np.uint16)}, weights)
    assert main(["sync", "publish", web.url, str(weights), "--run", "demo"]) == 1
    told = capfd.readouterr().err
    assert "a web server is only read; write to the s3://" in told
    assert "--single-writer" not in told


def test_a_server_without_lists_is_refused_in_one_sentence(web: HttpStore) -> None:
    with pytest.raises(StoreError, match=r"gives no lists .* answered 405") as caught:
        web.list("demo/log/")
    assert "read it from its s3://, gs:// or az:// address" in str(caught.value)


def test_lists_come_over_webdav(bucket: Bucket, web: HttpStore, source: Store) -> None:
    bucket.is_webdav = True
    for key in ("a/b", "a/c/d", "b", "a.b"):
        source.put(key, b"1")
    assert list(web.list("")) == ["a.b", "a/b", "a/c/d", "b"]
    assert list(web.list("a/")) == ["a/b", "a/c/d"]
    assert list(web.list("a/c")) == ["a/c/d"]
    assert list(web.list("nothing/")) == []
