"""Stores behind a URL, through obstore: S3, Google Cloud Storage, Azure Blob Storage; HTTP to read.

put:    one request, or a multipart upload that is aborted if it fails; whole or not there
create: one conditional request (If-None-Match); what is unclear is settled by reading back
get:    one request; longer objects in ranges, several at a time, all of one version of the object
Each write carries a random word of its own in the metadata of the object, so that a write whose
reply was lost is told from that of somebody else (reliability.md section 3).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar

from gymfast.errors import ConflictError, StoreError
from gymfast.stores.addresses import parse_address
from gymfast.stores.base import Blob, check_key, check_prefix, check_range, chunks_of, is_key
from gymfast.stores.object_client import FIRST_PAUSE_S, LONGEST_PAUSE_S, connect, load_obstore
from gymfast.stores.object_errors import Answer, answer_of, store_error
from gymfast.stores.object_parts import PART_BYTES, Parts

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ObjectStore as Client

_T = TypeVar("_T")

NUM_PARALLEL = 4
PUT_MEMORY_BYTES = (NUM_PARALLEL + 4) * PART_BYTES
"""What a put holds beside the caller's bytes: parts under way, waiting and filling, buffers."""

_NONCE = "gymfastnonce"  # a legal name for metadata in each of the stores
_SMALL_BYTES = 256 << 10
_MAX_OFFSET = 1 << 62


class ObjectStore:
    """Objects below a URL; an object is absent, old or complete, never torn.

    `timeout_s` is the longest silence of the store in one request, `retry_s` how long a request is
    repeated (by obstore: after 5xx, 429 and lost connections, with jitter). Uploads of parts may
    take eight times as long: their answer comes after the bytes.
    A put holds PUT_MEMORY_BYTES beside the bytes of the caller; a get twice its result.
    Credentials are found by obstore: environment, then the role of the machine.
    """

    num_ahead = NUM_PARALLEL
    put_memory_bytes = PUT_MEMORY_BYTES

    _started_in: ClassVar[int | None] = None

    def __init__(self, url: str, *, timeout_s: float = 15.0, retry_s: float = 30.0) -> None:
        self._address = parse_address(url)
        self.url = self._address.url
        self._obstore = load_obstore(self.url)
        self._retry_s = retry_s
        self._is_bucket_seen = False
        # With this setting obstore refuses conditions itself.
        is_disabled = os.environ.get("AWS_CONDITIONAL_PUT", "").lower() == "disabled"
        self.has_create_only = not (self._address.kind == "s3" and is_disabled)
        # All three clouds promise it: docs/stores.md has their words.
        self.shows_puts = self._address.kind in ("s3", "gs", "az")
        self._client = connect(self._address, timeout_s, retry_s)
        # Connections of their own: the windows of those that carry much stay open.
        self._downloads = connect(self._address, timeout_s, retry_s)
        self._uploads = connect(self._address, 8 * timeout_s, retry_s)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        check_key(key)
        parts = Parts(data)
        first, second = next(parts, b""), next(parts, None)
        nonce = secrets.token_hex(16)

        def upload() -> None:
            if second is None:
                self._put_one(key, first, nonce, mode="overwrite")
            else:
                self._put_parts(key, chain((first, second), parts), nonce)

        _, answer = self._attempt(upload)
        if parts.error is not None:
            raise parts.error
        if answer and (answer.is_final or self._nonce_at(key) != nonce):
            self._fail("put", key, answer)

    def create(self, key: str, data: Blob) -> None:
        check_key(key)
        chunks, nonce = list(chunks_of(data)), secrets.token_hex(16)
        body: Blob = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        pauses = self._pauses()
        while True:
            _, answer = self._attempt(lambda: self._put_one(key, body, nonce, mode="create"))
            if answer is None:
                return
            if answer.is_final:
                self._fail("create", key, answer)
            found = self._nonce_at(key)
            if found == nonce:
                return
            if found is not None:
                raise ConflictError(f"create '{key}' in {self.url}: it exists already")
            if not next(pauses, False):
                self._fail("create", key, answer)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._get(self._client, key, max_bytes)

    def get_known(self, key: str, num_bytes: int) -> bytes:
        """As `get`, of an object that is known to have that length."""
        return self._get(self._downloads, key, num_bytes)

    def _get(self, client: Client, key: str, max_bytes: int) -> bytes:
        check_key(key)
        result = self._ask("get", key, lambda: self._obstore.get(client, key))
        size: int = result.meta["size"]
        if size > max_bytes:
            raise StoreError(
                f"get '{key}' from {self.url}: {size} bytes, over the limit of {max_bytes}"
            )
        if size <= PART_BYTES:
            return self._body("get", key, result, size)
        tag: str | None = result.meta["e_tag"]
        del result  # ends its connection: nothing was read from it
        return self._get_parts("get", key, range(size), tag)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_key(key)
        check_range(start, length)
        wanted = range(start, start + length)
        if 0 < length <= PART_BYTES and wanted.stop <= _MAX_OFFSET:
            return self._get_part("get_range", key, wanted)
        meta = self._meta("get_range", key)
        self._require_inside(key, wanted, meta["size"])
        return self._get_parts("get_range", key, wanted, meta["e_tag"])

    def size(self, key: str) -> int:
        size: int = self._meta("size", check_key(key))["size"]
        return size

    def list(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        keys = self._ask("list", prefix, lambda: self._keys_in(self._client, prefix))
        self._is_bucket_seen = True
        return iter(keys)

    def delete(self, key: str) -> None:
        check_key(key)
        _, answer = self._attempt(lambda: self._obstore.delete(self._client, key))
        if answer is not None and not answer.is_absent:
            self._fail("delete", key, answer)

    def free_bytes(self) -> int | None:
        return None

    def _put_one(
        self, key: str, body: Blob, nonce: str, *, mode: Literal["create", "overwrite"]
    ) -> None:
        client = self._client if len(body) <= _SMALL_BYTES else self._uploads
        self._obstore.put(
            client, key, body, attributes={_NONCE: nonce}, mode=mode, use_multipart=False
        )

    def _put_parts(self, key: str, parts: Iterator[Blob], nonce: str) -> None:
        self._obstore.put(
            self._uploads,
            key,
            parts,
            attributes={_NONCE: nonce},
            chunk_size=PART_BYTES,
            max_concurrency=NUM_PARALLEL,
        )

    def _nonce_at(self, key: str) -> str | None:
        """The word of the write that made the object, "" if it has none.

        None if the object is absent, or the store does not say.
        """
        head, answer = self._attempt(
            lambda: self._obstore.get(self._client, key, options={"head": True})
        )
        if answer is not None:
            return None
        nonce: str = head.attributes.get(_NONCE, "")
        return nonce

    def _meta(self, operation: str, key: str) -> ObjectMeta:
        meta, answer = self._attempt(lambda: self._obstore.head(self._client, key))
        if answer is not None:
            if answer.is_absent and not self._is_bucket_seen:
                # An answer to HEAD does not say whether the object or the bucket is absent.
                self._require_bucket(operation, key)
            self._fail(operation, key, self._told(key, answer))
        return meta

    def _told(self, key: str, answer: Answer) -> Answer:
        """The answer with its code: one to HEAD has none, so the same is asked with GET."""
        if not answer.status or answer.code or answer.is_absent:
            return answer
        options: dict[str, object] = {"range": (0, 1)}
        _, told = self._attempt(lambda: self._obstore.get(self._client, key, options=options))
        return told if told is not None and told.code else answer

    def _require_bucket(self, operation: str, key: str) -> None:
        pages = self._obstore.list(self._client, None, chunk_size=1)
        self._ask(operation, key, lambda: next(iter(pages), None))
        self._is_bucket_seen = True

    def _keys_in(self, client: Client, prefix: str) -> Sequence[str]:
        folder = prefix.rpartition("/")[0]
        pages = self._obstore.list(client, folder or None, chunk_size=1000)
        keys = [self._key_of(meta["path"]) for page in pages for meta in page]
        return sorted(key for key in keys if key.startswith(prefix) and is_key(key))

    def _key_of(self, path: str) -> str:
        """The key of an object that was listed at this path."""
        return path

    def _get_parts(self, operation: str, key: str, wanted: range, tag: str | None) -> bytes:
        """The bytes in parts, several at a time, all of the object that has this tag."""
        parts = [wanted[at : at + PART_BYTES] for at in range(0, len(wanted), PART_BYTES)]
        with ThreadPoolExecutor(NUM_PARALLEL) as pool:
            fetches = [pool.submit(self._get_part, operation, key, part, tag) for part in parts]
            try:
                return b"".join(fetch.result() for fetch in fetches)
            finally:
                for fetch in fetches:
                    fetch.cancel()

    def _get_part(self, operation: str, key: str, wanted: range, tag: str | None = None) -> bytes:
        options: dict[str, object] = {"range": (wanted.start, wanted.stop)}
        if tag:
            options["if_match"] = tag
        client = self._client if len(wanted) <= _SMALL_BYTES else self._downloads
        result, answer = self._attempt(lambda: self._obstore.get(client, key, options=options))
        if answer is not None:
            if answer.status == 416:
                self._require_inside(key, wanted, self._meta(operation, key)["size"])
            self._fail(operation, key, answer)
        self._require_inside(key, wanted, result.meta["size"])
        return self._body(operation, key, result, len(wanted))

    def _body(self, operation: str, key: str, result: GetResult, length: int) -> bytes:
        body: bytes = self._ask(operation, key, lambda: result.bytes().to_bytes())
        if len(body) != length:
            raise StoreError(
                f"{operation} '{key}' in {self.url}: expected {length} bytes, {len(body)} came: "
                "they were cut on the way"
            )
        return body

    def _require_inside(self, key: str, wanted: range, size: int) -> None:
        if wanted.stop > size:
            raise StoreError(
                f"get_range '{key}' from {self.url}: expected {wanted.stop - wanted.start} bytes "
                f"at {wanted.start}, but the object has only {size} bytes: it is truncated"
            )

    def _ask(self, operation: str, key: str, call: Callable[[], _T]) -> _T:
        """What the call gives; its failure as a StoreError."""
        result, answer = self._attempt(call)
        if answer is not None:
            self._fail(operation, key, answer)
        return result

    def _attempt(self, call: Callable[[], _T]) -> tuple[_T, None] | tuple[Any, Answer]:
        """What the call gives, or what the store answered instead; the error itself is dropped."""
        self._require_no_fork()
        try:
            return call(), None
        except (self._obstore.exceptions.BaseError, OSError, NotImplementedError) as error:
            return None, answer_of(error)

    def _require_no_fork(self) -> None:
        """Raises StoreError in a process that was forked after the first request.

        The threads of obstore are not in it: the request would never return.
        """
        if ObjectStore._started_in is None:
            ObjectStore._started_in = os.getpid()
        if ObjectStore._started_in != os.getpid():
            raise StoreError(
                f"store {self.url}: this process was forked from one that had used an object "
                "store, and cannot use one: start processes with the method 'spawn'"
            )

    def _fail(self, operation: str, key: str, answer: Answer) -> NoReturn:
        is_write = operation in ("put", "create", "list")
        where = f"{operation} '{key}' in {self.url}"
        raise store_error(answer, where, is_write=is_write)

    def _pauses(self) -> Iterator[bool]:
        """True after each of ever longer sleeps, until `retry_s` have passed."""
        end_s, pause_s = time.monotonic() + self._retry_s, FIRST_PAUSE_S
        while time.monotonic() < end_s:
            time.sleep(pause_s * (0.5 + secrets.randbelow(1000) / 1000))
            yield True
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
