"""A small server that speaks as much of S3, and of the XML dialect of Google, as obstore asks for.

It keeps what it holds in memory and honours conditions. What it is for: quick tests, and Google,
whose emulators refuse the uploads of obstore. Real servers: `object_servers.py`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_META = ("x-amz-meta-", "x-goog-meta-")


@dataclass
class Held:
    """One object."""

    body: bytes
    meta: dict[str, str]
    tag: str = ""

    def __post_init__(self) -> None:
        self.tag = f'"{hashlib.md5(self.body).hexdigest()}"'


@dataclass
class Bucket:
    """What the server holds; `requests` is its log, `num_bytes` what it was sent.

    `ignores_conditions` makes it a bad one. A sink forgets the parts of uploads.
    """

    objects: dict[str, Held] = field(default_factory=dict)
    uploads: dict[str, tuple[dict[str, str], dict[int, bytes]]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    ignores_conditions: bool = False
    is_sink: bool = False
    is_webdav: bool = False
    num_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    endpoint: str = ""


class Quiet(BaseHTTPRequestHandler):
    """What the servers of these tests share."""

    protocol_version = "HTTP/1.1"
    timeout = 60

    def log_message(self, *args: object) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "content_length" not in headers:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, code: str, **fields: str) -> None:
        """An error as these stores give it."""
        inside = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
        self.answer(status, f"<Error><Code>{code}</Code>{inside}</Error>".encode())


@contextmanager
def serve(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server with that handler, in threads of this process."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients that hang up are part of the tests."""

    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serve_bucket(**settings: bool) -> Iterator[Bucket]:
    """A bucket named `bucket` behind an endpoint."""
    bucket = Bucket(**settings)

    class Handler(BucketHandler):
        held = bucket

    with serve(Handler) as bucket.endpoint:
        yield bucket


class BucketHandler(Quiet):
    """Answers for a bucket; lists come in pages of `page` keys."""

    held: Bucket
    page = 8

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Kept until the lock is free: a client that does not read must not hold others up."""
        self._send = partial(super().answer, status, body, **headers)

    def _route(self) -> None:
        parts = urlsplit(self.path)
        name, _, self.key = unquote(parts.path).lstrip("/").partition("/")
        self.query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        self.data = self.body()
        with self.held.lock:
            self.held.requests.append((self.command, self.key))
            self.held.num_bytes += len(self.data) if self.command == "PUT" else 0
            if name != "bucket":
                self.fail(404, "NoSuchBucket")
            elif not self.key:
                self._list()
            else:
                getattr(self, f"_{self.command.lower()}")()
        self._send()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _route  # noqa: N815

    def _list(self) -> None:
        prefix, after = self.query.get("prefix", ""), self.query.get("continuation-token", "")
        after = after or self.query.get("start-after", "")
        keys = sorted(k for k in self.held.objects if k.startswith(prefix) and k > after)
        page = keys[: min(int(self.query.get("max-keys", 1000)), self.page)]
        rows = "".join(
            f"<Contents><Key>{escape(k)}</Key><Size>{len(self.held.objects[k].body)}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for k in page
        )
        more = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if page != keys else ""
        is_truncated = "true" if more else "false"
        self.answer(
            200,
            f"<ListBucketResult><IsTruncated>{is_truncated}</IsTruncated>{more}{rows}"
            "</ListBucketResult>".encode(),
        )

    def _get(self) -> None:
        found = self.held.objects.get(self.key)
        if found is None:
            self.fail(404, "NoSuchKey")
            return
        if self.headers.get("if-match", found.tag) != found.tag:
            self.fail(412, "PreconditionFailed")
            return
        size, status, body = len(found.body), 200, found.body
        headers = {f"x-{self._dialect}-meta-{k}": v for k, v in found.meta.items()}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", "")):
            start, stop = int(wanted[1]), min(int(wanted[2]) + 1, size)
            if start >= size:
                self.fail(416, "InvalidRange")
                return
            status, body = 206, found.body[start:stop]
            headers["content-range"] = f"bytes {start}-{stop - 1}/{size}"
        length = str(len(body))
        headers |= {"etag": found.tag, "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        self.answer(status, body, content_length=length, **headers)

    _head = _get

    @property
    def _dialect(self) -> str:
        return "goog" if "x-goog-api-version" in self.headers or self._is_google else "amz"

    @property
    def _is_google(self) -> bool:
        return "AWS4" not in self.headers.get("authorization", "AWS4")

    def _meta(self) -> dict[str, str]:
        names = {n.lower(): v for n, v in self.headers.items()}
        return {n[len(p) :]: v for n, v in names.items() for p in _META if n.startswith(p)}

    def _put(self) -> None:
        if "uploadId" in self.query:
            upload = self.held.uploads.get(self.query["uploadId"])
            if upload is None:
                self.fail(404, "NoSuchUpload")
                return
            upload[1][int(self.query["partNumber"])] = b"" if self.held.is_sink else self.data
            self.answer(200, etag=f'"{hashlib.md5(self.data).hexdigest()}"')
            return
        is_create = self.headers.get("if-none-match") == "*"
        is_create |= self.headers.get("x-goog-if-generation-match") == "0"
        if is_create and self.key in self.held.objects and not self.held.ignores_conditions:
            self.fail(412, "PreconditionFailed")
            return
        self._store(Held(self.data, self._meta()))

    def _store(self, held: Held, body: bytes = b"") -> None:
        self.held.objects[self.key] = held
        self.answer(200, body, etag=held.tag, x_goog_generation="1")

    def _post(self) -> None:
        if "uploads" in self.query:
            upload = secrets.token_hex(8)
            self.held.uploads[upload] = (self._meta(), {})
            xml = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>"
            self.answer(200, f"{xml}</InitiateMultipartUploadResult>".encode())
            return
        found = self.held.uploads.pop(self.query["uploadId"], None)
        if found is None:
            self.fail(404, "NoSuchUpload")
            return
        held = Held(b"".join(found[1][n] for n in sorted(found[1])), found[0])
        xml = f"<CompleteMultipartUploadResult><ETag>{escape(held.tag)}</ETag>"
        self._store(held, f"{xml}</CompleteMultipartUploadResult>".encode())

    def do_PROPFIND(self) -> None:
        """The lists of WebDAV, from which a web server of objects is followed."""
        self.body()
        folder = unquote(urlsplit(self.path).path).strip("/").removeprefix("bucket").strip("/")
        with self.held.lock:
            found = {k: v for k, v in self.held.objects.items() if k.startswith(f"{folder}/")}
        if not self.held.is_webdav:
            self.fail(405, "MethodNotAllowed")
        elif not found:
            self.fail(404, "NotFound")
        else:
            rows = "".join(
                f"<D:response><D:href>/bucket/{key}</D:href><D:propstat><D:prop><D:resourcetype/>"
                f"<D:getcontentlength>{len(held.body)}</D:getcontentlength>"
                "<D:getlastmodified>Thu, 01 Jan 2026 00:00:00 GMT</D:getlastmodified></D:prop>"
                "<D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>"
                for key, held in found.items()
            )
            body = f'<D:multistatus xmlns:D="DAV:">{rows}</D:multistatus>'.encode()
            self.answer(207, body, content_type="text/xml")
        self._send()

    def _delete(self) -> None:
        if "uploadId" in self.query:
            self.held.uploads.pop(self.query["uploadId"], None)
        elif self.held.objects.pop(self.key, None) is None and self._is_google:
            self.fail(404, "NoSuchKey")
            return
        self.answer(204)
