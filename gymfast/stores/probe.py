"""Finds out whether a store really honours create-only writes, before two writers rely on it."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from gymfast.errors import ConflictError, NotFoundError, StoreError
from gymfast.stores.base import Store

_NUM_WRITERS = 4
_PATIENCE_S = 15.0  # for what was written to be seen
_NAME = re.compile(r"[0-9a-f]{32}")


def check_create_only(
    store: Store,
    prefix: str = "probe",
    *,
    now_us: int | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Nothing if create-only writes work; leaves no object behind, unless it is killed.

    The names of its objects tell the time, `now_us` (microseconds since 1970, by default that of
    the machine), so that others know what was left.

    Creates an object twice in a row, then another one from four threads at once: some stores
    accept the condition and ignore it (reliability.md section 3: s3rver), others check and write
    in two steps. A store that passes may still lie under rarer timing; one that fails is broken.
    Raises StoreError that names the store and what it did.
    """
    if not store.has_create_only:
        if getattr(store, "is_read_only", False):
            store.create(f"{prefix}/{secrets.token_hex(16)}", b"")  # says so better
        raise StoreError(_refusal(store, "says that it has no create-only writes"))
    now_us = max(0, time.time_ns() // 1000 if now_us is None else now_us)
    keys = [f"{prefix}/{now_us:016x}{secrets.token_hex(8)}" for _ in range(2)]
    try:
        _check_second_create(store, keys[0], sleep)
        _check_race(store, keys[1], sleep)
    except BaseException:
        with suppress(StoreError):  # a store that fails once more says no more
            _delete(store, keys)
        raise
    _delete(store, keys)


def _delete(store: Store, keys: list[str]) -> None:
    for key in keys:
        store.delete(key)


def probe_time_us(key: str) -> int | None:
    """When the test that made an object began, in microseconds since 1970; None for other keys."""
    name = key.rpartition("/")[2]
    return int(name[:16], 16) if _NAME.fullmatch(name) else None


def _check_second_create(store: Store, key: str, sleep: Callable[[float], object]) -> None:
    store.create(key, b"first")
    try:
        store.create(key, b"second")
    except ConflictError:
        _check_content(store, key, b"first", sleep)
        return
    raise StoreError(_refusal(store, f"created '{key}' twice"))


def _check_race(store: Store, key: str, sleep: Callable[[float], object]) -> None:
    def wins(writer: int) -> bool:
        try:
            store.create(key, b"writer %d" % writer)
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(_NUM_WRITERS) as pool:
        won = list(pool.map(wins, range(_NUM_WRITERS)))
    if sum(won) != 1:
        raise StoreError(
            _refusal(store, f"let {sum(won)} of {_NUM_WRITERS} racing writers create '{key}'")
        )
    _check_content(store, key, b"writer %d" % won.index(True), sleep)


def _check_content(
    store: Store, key: str, expected: bytes, sleep: Callable[[float], object]
) -> None:
    found = _read_late(store, key, sleep)
    if found != expected:
        raise StoreError(
            _refusal(store, f"returned {found!r} for '{key}' where {expected!r} had been created")
        )


def _read_late(store: Store, key: str, sleep: Callable[[float], object]) -> bytes:
    """The object, which some stores show a little later."""
    waited_s, pause_s = 0.0, 0.05
    while True:
        try:
            return store.get(key, max_bytes=64)
        except NotFoundError:
            if waited_s >= _PATIENCE_S:
                raise
        sleep(pause_s)
        waited_s, pause_s = waited_s + pause_s, min(2 * pause_s, 1.0)


def _refusal(store: Store, did: str) -> str:
    return (
        f"store {store.url} {did}: two publishers could commit the same version unseen; "
        "use a store with conditional writes (file:, S3 with If-None-Match, GCS, Azure), or "
        "--single-writer (single_writer=True) if nobody else publishes this run"
    )
