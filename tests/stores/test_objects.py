"""Object stores pass the contract; addresses and settings that they refuse."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_double import Bucket, serve_bucket
from object_settings import gs_settings

from gymfast.errors import MissingDependencyError, StoreError
from gymfast.stores import ObjectStore, Store, check_create_only, open_store
from gymfast.stores.addresses import parse_address, redacted
from gymfast.stores.object_parts import PART_BYTES
from gymfast.stores.objects import PUT_MEMORY_BYTES
from gymfast.testing.conformance import StoreContract

MIB = 1 << 20


class TestS3(StoreContract):
    num_thread_rounds = 10

    @pytest.fixture
    def store(self, bucket: Bucket) -> Store:
        return open_store("s3://bucket/some/prefix")


@pytest.mark.ci
class TestS3InProcesses(TestS3):
    is_shared = True
    num_process_rounds = 20
    num_kills = 5


@pytest.mark.ci
class TestGoogle(StoreContract):
    num_thread_rounds = 10

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        with serve_bucket() as served:
            for name, value in gs_settings(served.endpoint, tmp_path).items():
                monkeypatch.setenv(name, value)
            yield open_store("gs://bucket/some/prefix")


def test_I24_a_store_that_ignores_conditions_is_refused(monkeypatch, bucket: Bucket) -> None:
    bucket.ignores_conditions = True
    with pytest.raises(StoreError, match=r"s3://bucket created .* twice"):
        check_create_only(open_store("s3://bucket"))
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    store = open_store("s3://bucket")
    assert not store.has_create_only
    with pytest.raises(StoreError, match="no create-only"):
        check_create_only(store)
    with pytest.raises(StoreError, match="create 'k' in s3://bucket"):
        store.create("k", b"1")


def test_two_prefixes_of_a_bucket_never_meet(bucket: Bucket) -> None:
    first, second, whole = (open_store(f"s3://bucket{p}") for p in ("/a", "/a/b", ""))
    first.put("k", b"1")
    second.put("k", b"2")
    assert set(bucket.objects) == {"a/k", "a/b/k"}
    assert list(second.list("")) == ["k"]
    assert list(whole.list("a/b")) == ["a/b/k"]


def test_objects_that_are_no_keys_do_not_exist(bucket: Bucket) -> None:
    store = open_store("s3://bucket")
    store.put("a", b"1")
    bucket.objects["a b"] = bucket.objects[".hidden"] = bucket.objects["\u00e9"] = bucket.objects[
        "a"
    ]
    assert list(store.list("")) == ["a"]


@pytest.mark.parametrize("size", [PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES])
def test_objects_around_a_part_come_back_whole(bucket: Bucket, size: int) -> None:
    store, blob = open_store("s3://bucket"), os.urandom(size)
    store.put("whole", blob)
    store.put("pieces", iter([blob[: size // 3], blob[size // 3 :]]))
    for key in ("whole", "pieces"):
        assert store.get(key, max_bytes=size) == blob
        assert store.get_range(key, 1, size - 1) == blob[1:]
    assert not bucket.uploads


_PUT_STREAM = """
import re, sys
from pathlib import Path
from gymfast.stores import open_store
from gymfast.stores.object_parts import PART_BYTES

def most_bytes():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

store = open_store("s3://bucket")
store.put("warm", b"1")
before = most_bytes()
store.put("big", (bytes(1 << 20) for _ in range(int(sys.argv[1]))))
print(most_bytes() - before)
"""


def test_I60_a_put_of_a_stream_holds_no_more_than_it_says(bucket: Bucket) -> None:
    bucket.is_sink, num_mib = True, 3 * PUT_MEMORY_BYTES // MIB
    done = subprocess.run(
        [sys.executable, "-c", _PUT_STREAM, str(num_mib)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert PART_BYTES < int(done.stdout) <= 1.1 * PUT_MEMORY_BYTES
    assert bucket.num_bytes == num_mib * MIB + 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://b-1.x/a/b", "s3://b-1.x/a/b"),
        ("S3://Bucket/", "s3://Bucket"),
        ("s3://bucket//", "s3://bucket"),
        ("gcs://bucket/run=1/2026-11-30", "gs://bucket/run=1/2026-11-30"),
        ("azure://c/p", "az://c/p"),
        ("https://host.example:8443/a/", "https://host.example:8443/a"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_an_address_has_one_form(url: str, shown: str) -> None:
    assert parse_address(url).url == shown
    assert parse_address(shown).url == shown


@pytest.mark.parametrize(
    "url",
    [
        "s3:", "s3:/b", "s3://", "s3:///b", "s3://b/a//b", "s3://b/../a", "s3://b/./a",
        "s3://b/a b", "s3://b/%2e%2e/a", "s3://b\n", "s3://b/\x00", "s3://b/a\\b", "s3://\u00e9/a", "s3://b:1/a",
        "http://", "http:///a", "http://host/..", "https://h/a#f", "gs://b/~", "az://-c/a",
        "s3://" + "b" * 300,
    ],
)  # fmt: skip
def test_I83_hostile_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"^store '") as caught:
        open_store(url)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:s3cr3t@bucket/a", "s3://s3cr3t@bucket", "https://u:s3cr3t@host/a",
        "https://host/a?X-Amz-Signature=s3cr3t", "az://c/a?sig=s3cr3t", "gs://b/a#s3cr3t",
        "https://u:s3cr3t/x@host/a", "ftp://user:s3cr3t@host/a", "modal://u:s3cr3t@volume",
        "s3://a b:s3cr3t@bucket",
    ],
)  # fmt: skip
def test_I84_an_address_with_a_secret_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises((ValueError, MissingDependencyError)) as caught:
        open_store(url)
    assert "s3cr3t" not in str(caught.value)
    assert "s3cr3t" not in redacted(f"cannot open {url} now")


def test_a_store_shows_its_address_only(bucket: Bucket) -> None:
    store = open_store("s3://bucket/a")
    assert repr(store) == "ObjectStore('s3://bucket/a')"
    assert str(store) == repr(store)


def test_without_obstore_one_sentence_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['obstore'] = None\n"
        "from gymfast.errors import MissingDependencyError\n"
        "from gymfast.stores import open_store\n"
        "try: open_store('s3://bucket/a')\n"
        "except MissingDependencyError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "store s3://bucket/a: needs obstore: pip install 'gymfast[store]'\n"


@pytest.mark.parametrize(
    ("name", "value", "url"),
    [
        ("GOOGLE_SERVICE_ACCOUNT_KEY", '{"private_key": "s3cr3t"', "gs://bucket"),
        ("AZURE_STORAGE_ACCOUNT_KEY", "s3cr3t-no-base64", "az://container"),
        ("AWS_ENDPOINT_URL", "no address s3cr3t", "s3://bucket"),
    ],
)
def test_I84_unusable_settings_are_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, url: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=url) as caught:
        open_store(url).size("k")
    assert "s3cr3t" not in str(caught.value)


def _size_in_child(store: ObjectStore, answers) -> None:
    try:
        answers.put(str(store.size("k")))
    except StoreError as error:
        answers.put(str(error))


def test_a_forked_process_is_told_instead_of_waiting_for_ever(bucket: Bucket) -> None:
    store = open_store("s3://bucket")
    store.put("k", b"123")
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=_size_in_child, args=(store, answers), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert "start processes with the method 'spawn'" in answers.get()
