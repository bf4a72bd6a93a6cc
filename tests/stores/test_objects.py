"""Object stores against a server of our own: the contract, and what may go wrong on the way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from object_double import Bucket, serve_bucket

from gymfast.stores import Store, open_store
from gymfast.testing.conformance import StoreContract


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with serve_bucket() as served:
        set_s3(monkeypatch, served.endpoint)
        yield served


def set_s3(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI-SECRET")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


class TestS3(StoreContract):
    is_shared = True
    num_thread_rounds = 20
    num_process_rounds = 10
    num_kills = 3

    @pytest.fixture
    def store(self, bucket: Bucket) -> Store:
        return open_store("s3://bucket/some/prefix")
