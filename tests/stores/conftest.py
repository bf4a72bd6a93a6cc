"""Buckets of a server of our own, in the environment of the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from object_double import Bucket, serve_bucket
from object_proxy import Proxy, serve_proxy
from object_settings import s3_settings


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket at s3://bucket."""
    with serve_bucket() as served:
        for name, value in s3_settings(served.endpoint).items():
            monkeypatch.setenv(name, value)
        yield served


@pytest.fixture
def proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What lies between the client and the bucket."""
    with serve_proxy(bucket.endpoint) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
        yield between
