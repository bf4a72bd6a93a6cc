"""Clients of obstore: where they connect to, how long they wait, what they repeat."""

from __future__ import annotations

from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING

from gymfast.errors import MissingDependencyError, StoreError
from gymfast.stores.addresses import Address, allows_http

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Client

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
_MAX_RETRIES = 10
_CONNECT_S = 5.0


def load_obstore(url: str) -> ModuleType:
    """The package; MissingDependencyError that names the extra if it is not installed."""
    try:
        import obstore
    except ImportError as error:
        raise MissingDependencyError(
            f"store {url}: needs obstore: pip install 'gymfast[store]'"
        ) from error
    module: ModuleType = obstore
    return module


def connect(address: Address, silence_s: float, retry_s: float) -> Client:
    """A client of obstore; nothing is asked of the store yet.

    A request fails after `silence_s` without a byte, and is repeated for `retry_s` (0: never).
    Raises StoreError for unusable settings in the environment.
    """
    exceptions = load_obstore(address.url).exceptions
    try:
        return _client_of(address, silence_s, retry_s)
    except (exceptions.BaseError, OSError, ValueError) as error:
        problem = type(error).__name__
    # The text of the error is left out: it may hold a key that cannot be parsed.
    raise StoreError(
        f"store {address.url}: the settings in the environment are unusable ({problem}); check "
        "endpoint, account and key: docs/stores.md names them"
    )


def _client_of(address: Address, silence_s: float, retry_s: float) -> Client:
    from obstore import store

    options: ClientConfig = {
        "allow_http": allows_http(address),
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, silence_s)),
        "read_timeout": timedelta(seconds=silence_s),
        "timeout": timedelta(seconds=20 * silence_s),
    }
    retry: RetryConfig = {
        "max_retries": _MAX_RETRIES if retry_s else 0,
        "retry_timeout": timedelta(seconds=retry_s),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE_S),
            "base": 2,
        },
    }
    if address.kind == "http":
        return store.HTTPStore(address.url, client_options=options, retry_config=retry)
    bucket, prefix = address.bucket, address.prefix or None
    if address.kind == "gs":
        return store.GCSStore(bucket, prefix=prefix, client_options=options, retry_config=retry)
    if address.kind == "az":
        return store.AzureStore(bucket, prefix=prefix, client_options=options, retry_config=retry)
    return store.S3Store(
        bucket,
        prefix=prefix,
        client_options=options,
        retry_config=retry,
        # One object at a time is deleted, and not every store of this kind knows lists of them.
        disable_bulk_delete=True,
    )
