"""Object stores against servers that others wrote, and a real bucket where there is one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_proxy import Trouble, serve_proxy
from object_servers import AZURE_ACCOUNT, AZURE_KEY, azurite, moto, s3rver
from object_settings import az_settings, s3_settings

from gymfast.errors import ConflictError, StoreError
from gymfast.stores import ObjectStore, Store, check_create_only, object_client, objects, open_store
from gymfast.sync import Publisher
from gymfast.testing.conformance import StoreContract

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def moto_endpoint() -> Iterator[str]:
    with moto() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def azurite_endpoint() -> Iterator[str]:
    with azurite() as endpoint:
        yield endpoint


def use(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


class TestMoto(StoreContract):
    is_shared = True
    num_thread_rounds = 20
    num_process_rounds = 10
    num_kills = 3

    @pytest.fixture
    def store(self, moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Store:
        use(monkeypatch, s3_settings(moto_endpoint))
        return open_store(f"s3://bucket/{secrets.token_hex(4)}")


class TestAzurite(StoreContract):
    is_shared = True
    num_thread_rounds = 20
    num_process_rounds = 10
    num_kills = 3

    @pytest.fixture
    def store(self, azurite_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Store:
        use(monkeypatch, az_settings(azurite_endpoint, AZURE_ACCOUNT, AZURE_KEY))
        return open_store(f"az://bucket/{secrets.token_hex(4)}")


@pytest.mark.long
class TestMotoForLonger(TestMoto):
    num_thread_rounds = 1000
    num_process_rounds = 1000
    num_kills = 50


@pytest.mark.long
class TestAzuriteForLonger(TestAzurite):
    num_thread_rounds = 1000
    num_process_rounds = 1000
    num_kills = 50


def test_I24_s3rver_ignores_conditions_and_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3rver(tmp_path) as endpoint:
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "S3RVER")
        use(monkeypatch, s3_settings(endpoint) | keys)
        store = open_store("s3://bucket/a")
        store.put("k", b"1")
        assert store.get("k", max_bytes=1) == b"1"
        with pytest.raises(StoreError, match=r"created .* twice: two publishers could commit"):
            check_create_only(store)
        with pytest.raises(StoreError, match=r"created .* twice"):
            Publisher(store, "demo", threads=1)
        Publisher(store, "demo", threads=1, single_writer=True)


@pytest.mark.parametrize("server", ["moto", "azurite"])
@pytest.mark.parametrize(
    "trouble",
    [
        Trouble("lose", "PUT"),
        Trouble("answer late", "PUT", status=500),
        Trouble("answer late", "PUT", status=409),
        Trouble("answer", "PUT", status=409),
    ],
    ids=lambda t: f"{t.kind}-{t.status}",
)
def test_I22_an_unclear_create_is_settled_by_reading_back(
    server: str, trouble: Trouble, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (objects, object_client):
        monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    endpoint = request.getfixturevalue(f"{server}_endpoint")
    with serve_proxy(endpoint) as proxy:
        if server == "moto":
            use(monkeypatch, s3_settings(proxy.endpoint))
            store = ObjectStore(f"s3://bucket/{secrets.token_hex(4)}")
        else:
            use(monkeypatch, az_settings(proxy.endpoint, AZURE_ACCOUNT, AZURE_KEY))
            store = ObjectStore(f"az://bucket/{secrets.token_hex(4)}")
        proxy.troubles.append(Trouble(**vars(trouble)))
        store.create("k", b"mine")
        assert proxy.troubles[0].count == 0
        proxy.troubles.append(Trouble(**vars(trouble)))
        with pytest.raises(ConflictError):
            store.create("k", b"mine")


class TestRealBucket(StoreContract):
    """The bucket that GYMFAST_TEST_S3_URL names, with the credentials of the environment."""

    is_shared = True
    num_thread_rounds = 20
    num_process_rounds = 10
    num_kills = 2

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        url = os.environ.get("GYMFAST_TEST_S3_URL")
        if not url:
            pytest.skip("needs an account with a bucket: GYMFAST_TEST_S3_URL")
        store = open_store(f"{url.rstrip('/')}/{secrets.token_hex(8)}")
        yield store
        for key in store.list(""):
            store.delete(key)
