"""The objects of a web server, to be read: what a bucket shows the world, or a mirror of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

from gymfast.errors import StoreError
from gymfast.stores.base import Blob, check_key, check_prefix
from gymfast.stores.object_client import connect
from gymfast.stores.objects import RETRY_S, TIMEOUT_S, ObjectStore


class HttpStore(ObjectStore):
    """Objects of a web server, to be read; lists need WebDAV (PROPFIND)."""

    is_read_only = True

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S, retry_s: float = RETRY_S) -> None:
        super().__init__(url, timeout_s=timeout_s, retry_s=retry_s)
        self.has_create_only = False
        self._listing = connect(self._address, timeout_s, 0.0)

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:  # noqa: ARG002
        check_key(key)
        self._refuse("put", key)

    def create(self, key: str, data: Blob) -> None:  # noqa: ARG002
        check_key(key)
        self._refuse("create", key)

    def delete(self, key: str) -> None:
        check_key(key)
        self._refuse("delete", key)

    def list(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        keys, answer = self._attempt(lambda: self._keys_in(self._listing, prefix))
        if answer is not None and answer.is_late:
            self._fail("list", prefix, answer)
        if answer is not None:
            raise StoreError(
                f"list '{prefix}' in {self.url}: this web server gives no lists (WebDAV, PROPFIND; "
                f"it answered {answer.status or 'nothing that fits'}), and a run cannot be "
                "followed without: read it from its s3://, gs:// or az:// address"
            )
        return iter(keys)

    def _key_of(self, path: str) -> str:
        # obstore lists whole paths of the server, those of its other stores begin at the prefix.
        return path.removeprefix(f"{self._address.prefix}/")

    def _require_bucket(self, operation: str, key: str) -> None:
        """Nothing: a web server has no buckets."""

    def _refuse(self, operation: str, key: str) -> NoReturn:
        raise StoreError(
            f"{operation} '{key}' in {self.url}: a web server is only read; write to the s3://, "
            "gs:// or az:// address of the store"
        )
