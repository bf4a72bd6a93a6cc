"""Addresses of object stores, and what of an address may be shown."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

_KINDS = {
    "s3": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "http": "http",
    "https": "https",
}
_FSSPEC = re.compile(r"fsspec\+([a-z0-9][a-z0-9.+-]*)://(.*)", re.ASCII | re.DOTALL)
_SERVER = re.compile(r"(?:[A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?", re.ASCII)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?", re.ASCII)
_SEGMENT = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._=+-]+", re.ASCII)
_USER = re.compile(r"(://|^|[\s'\"])[^\s/@'\"]+@")
_USER_WITH_SLASHES = re.compile(r"(://)[^\s'\"]*@")
_QUERY = re.compile(r"[?#][^\s'\"]*")
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Address:
    """A bucket, container or web server, and the folder in it; `kind` is s3, gs, az or http."""

    kind: str
    bucket: str
    prefix: str
    url: str


def is_object_scheme(scheme: str) -> bool:
    """True if addresses with that scheme are of object stores."""
    return scheme in _KINDS


def parse_address(url: str) -> Address:
    """The parts of `s3://BUCKET/PREFIX`, `gs://`, `az://CONTAINER/PREFIX`, `http(s)://HOST/PATH`.

    Raises ValueError for anything else. Secrets are refused, and never shown.
    """
    scheme, separator, rest = url.partition("://")
    scheme = _KINDS.get(scheme.lower(), "")
    if not scheme or not separator:
        raise _unusable(url, "expected s3://BUCKET/PREFIX, gs://, az:// or https://HOST/PATH")
    _refuse_secrets(url, rest)
    bucket, _, path = rest.partition("/")
    is_http = scheme in ("http", "https")
    if not (_HOST if is_http else _BUCKET).fullmatch(bucket):
        raise _unusable(url, f"'{scheme}://' is followed by a {'host' if is_http else 'bucket'}")
    prefix = _prefix_of(url, path)
    shown = f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")
    return Address("http" if is_http else scheme, bucket, prefix, shown)


def parse_fsspec_address(url: str) -> tuple[str, str]:
    """Protocol and address, as fsspec takes them, of `fsspec+PROTOCOL://SERVER/PATH`.

    Raises ValueError for anything else. Secrets are refused, and never shown.
    """
    match = _FSSPEC.fullmatch(url)
    if match is None:
        raise _unusable(
            url, "expected fsspec+PROTOCOL://SERVER/PATH, as in fsspec+sftp://host/path"
        )
    protocol, rest = match[1], match[2]
    _refuse_secrets(url, rest)
    server, slash, path = rest.partition("/")
    if not _SERVER.fullmatch(server):
        raise _unusable(url, f"'{protocol}://' is followed by a server, container or volume")
    if server and protocol in ("file", "local"):
        raise _unusable(
            url, f"'{protocol}://' is followed by a path: write fsspec+{protocol}:///PATH"
        )
    return protocol, f"{protocol}://{server}{slash}{_prefix_of(url, path)}"


def redacted(text: str) -> str:
    """The text without what may be a secret: users in addresses, queries, control characters."""
    text = "".join(char if char.isprintable() else " " for char in text)
    for pattern, put in (
        (_USER_WITH_SLASHES, r"\1***@"),
        (_USER, r"\1***@"),
        (_QUERY, "?***"),
    ):
        text = pattern.sub(put, text)
    return text


def allows_http(address: Address) -> bool:
    """True if the store may be asked without TLS: the user wrote an http:// endpoint.

    Requests to S3 are signed and do not show the secret; the tokens of the others travel in the
    clear, so they need an endpoint on this machine.
    """
    if address.kind == "http":
        return address.url.startswith("http://")
    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS[address.kind])), "")
    if address.kind == "az" and os.environ.get("AZURE_STORAGE_USE_EMULATOR", "") == "true":
        return True
    parts = urlsplit(endpoint)
    return parts.scheme == "http" and (address.kind == "s3" or parts.hostname in _LOOPBACK)


def _refuse_secrets(url: str, rest: str) -> None:
    if "@" in rest:
        raise _unusable(
            url, "an address carries no user or secret: credentials come from the environment"
        )
    if "?" in rest or "#" in rest:
        raise _unusable(url, "an address carries no query: settings come from the environment")


def _prefix_of(url: str, path: str) -> str:
    prefix = path.rstrip("/")
    if prefix and not all(_SEGMENT.fullmatch(segment) for segment in prefix.split("/")):
        raise _unusable(
            url, "each part of the path is [A-Za-z0-9._=+-]+, without empty parts, '.' and '..'"
        )
    return prefix


def _unusable(url: str, why: str) -> ValueError:
    return ValueError(f"store '{redacted(url)}': {why}")
