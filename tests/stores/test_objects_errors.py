"""What object stores refuse: one sentence with the object, the cause and what to do; no secrets."""

from __future__ import annotations

import logging
import subprocess
import sys
import traceback
from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
from object_double import Bucket
from object_proxy import Proxy, Trouble
from object_settings import KEY_ID, SECRET
from safetensors.numpy import save_file

from gymfast.errors import NotFoundError, StoreError
from gymfast.stores import ObjectStore, object_client, open_store

FOR_EVER = 10**6
TOKEN = "FwoGZXIvYXdzEJr-token-not-for-eyes"
SECRETS = (SECRET, KEY_ID, TOKEN)
CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "put": lambda store: store.put("run/k", b"1"),
    "create": lambda store: store.create("run/k", b"1"),
    "get": lambda store: store.get("run/k", max_bytes=1),
    "get_range": lambda store: store.get_range("run/k", 0, 1),
    "size": lambda store: store.size("run/k"),
    "list": lambda store: list(store.list("run/k")),
    "delete": lambda store: store.delete("run/k"),
}


@pytest.fixture
def store(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(object_client, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    return ObjectStore("s3://bucket", timeout_s=5.0, retry_s=0.05)


def answer_all(proxy: Proxy, status: int, code: str, text: str = "") -> None:
    """Every request fails like that."""
    proxy.troubles += [
        Trouble("answer", method, status=status, code=code, count=FOR_EVER, text=text)
        for method in ("GET", "HEAD", "PUT", "POST", "DELETE")
    ]


@pytest.mark.parametrize(
    ("status", "code", "hint"),
    [
        (404, "NoSuchBucket", "the bucket does not exist there: check its name"),
        (301, "PermanentRedirect", "set AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", "set AWS_REGION"),
        (400, "ExpiredToken", "the credentials have expired: get new ones"),
        (403, "InvalidAccessKeyId", "the credentials are not accepted"),
        (403, "SignatureDoesNotMatch", "the credentials are not accepted"),
        (401, "Unauthorized", "the credentials are not accepted"),
        (403, "RequestTimeTooSkewed", "the clock of this machine differs"),
        (403, "AccessDenied", "these credentials may not do that: grant get, put"),
        (403, "QuotaExceeded", "no room, or the quota is used up: free space"),
        pytest.param(
            *(507, "InsufficientStorage", "no room, or the quota is used up: free space"),
            marks=pytest.mark.ci,
        ),
        (503, "SlowDown", "the store asks for fewer requests"),
        pytest.param(
            *(429, "TooManyRequests", "the store asks for fewer requests"), marks=pytest.mark.ci
        ),
        pytest.param(
            *(500, "InternalError", "the store failed: try again later"), marks=pytest.mark.ci
        ),
        (418, "Teapot", "not expected of an object store"),
    ],
)
def test_a_refusal_says_what_where_and_what_to_do(
    store: ObjectStore, proxy: Proxy, status: int, code: str, hint: str
) -> None:
    answer_all(proxy, status, code)
    for operation, call in CALLS.items():
        with pytest.raises(StoreError) as caught:
            call(store)
        assert type(caught.value) is StoreError, operation
        text = str(caught.value)
        assert text.startswith(f"{operation} 'run/k' in s3://bucket: "), text
        assert text.isprintable()
        assert len(text) < 400
        assert hint in text  # also for size: an answer to HEAD has no body, so GET is asked too


def test_a_region_that_the_store_names_is_told(store: ObjectStore, proxy: Proxy) -> None:
    answer_all(proxy, 400, "AuthorizationHeaderMalformed", "x</Message><Region>eu-west-3</Region>")
    with pytest.raises(StoreError, match="is in the region eu-west-3: set AWS_REGION"):
        store.get("k", max_bytes=1)


def test_a_bucket_that_is_absent_is_no_absent_object(bucket: Bucket) -> None:
    store = open_store("s3://no-bucket/a")
    for operation, call in CALLS.items():
        with pytest.raises(StoreError, match="bucket does not exist") as caught:
            call(store)
        assert not isinstance(caught.value, NotFoundError), operation


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"], "'k' in s3://bucket: no credentials were"),
        (["AWS_SECRET_ACCESS_KEY"], "store s3://bucket: the settings in the environment are"),
    ],
)
def test_missing_credentials_are_named(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, names: list[str], text: str
) -> None:
    for name in names:
        monkeypatch.delenv(name)
    # obstore asks the machine for a role then; this address is no machine's.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9/169.254.169.254")
    with pytest.raises(StoreError, match=text):
        ObjectStore("s3://bucket", retry_s=0.05).get("k", max_bytes=1)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_a_store_that_cannot_be_reached_is_named(
    monkeypatch: pytest.MonkeyPatch, bucket: Bucket, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    store = ObjectStore("s3://bucket", retry_s=0.05)
    with pytest.raises(StoreError, match="get 'k' in s3://bucket: the store cannot be reached"):
        store.get("k", max_bytes=1)


@pytest.mark.parametrize("status", [403, pytest.param(500, marks=pytest.mark.ci), 200])
def test_I84_what_a_server_repeats_of_secrets_is_not_shown(
    store: ObjectStore, proxy: Proxy, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    answer_all(proxy, status, KEY_ID, " ".join(SECRETS))
    for call in CALLS.values():
        errors: list[StoreError] = []
        try:
            call(store)
        except StoreError as error:
            errors.append(error)
        shown = "".join(chain.from_iterable(map(traceback.format_exception, errors))) + repr(errors)
        assert all(e.__cause__ is None and e.__context__ is None for e in errors)
        assert not any(secret in shown + caplog.text + repr(store) for secret in SECRETS)


def gymfast(*words: str) -> str:
    """All that the command line prints; its arguments hold no secret."""
    done = subprocess.run(
        [sys.executable, "-m", "gymfast", "-v", *words], capture_output=True, text=True
    )
    return f"{done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.ci
def test_I84_the_command_line_never_shows_a_secret(
    store: ObjectStore, bucket: Bucket, proxy: Proxy, tmp_path
) -> None:
    save_file({"w": np.arange(100, dtype=np.uint16)}, tmp_path / "w.safetensors")
    weights, copy = str(tmp_path / "w.safetensors"), str(tmp_path / "copy.safetensors")
    place, run = "s3://bucket/a", ("--run", "demo")
    outputs = [
        gymfast("sync", "publish", place, weights, *run, "--json"),
        gymfast("sync", "pull", place, copy, *run, "--json"),
    ]
    assert all(output.startswith("0\n") for output in outputs), outputs
    answer_all(proxy, 403, "SignatureDoesNotMatch", " ".join(SECRETS))
    outputs += [
        gymfast("sync", "publish", place, weights, *run),
        gymfast("sync", "fsck", place, *run, "--json"),
        gymfast("sync", "status", f"s3://{KEY_ID}:{SECRET}@bucket/a", *run),
    ]
    assert all(output.startswith(("1\n", "2\n")) for output in outputs[2:]), outputs[2:]
    assert all("credentials" in output for output in outputs[2:]), outputs[2:]
    assert not any(secret in output for output in outputs for secret in SECRETS)
    held = b"".join(value.body for value in bucket.objects.values())
    assert not any(secret.encode() in held for secret in SECRETS)
    assert not any(
        secret in repr(value.meta) for value in bucket.objects.values() for secret in SECRETS
    )
