"""Servers of objects that others wrote, started by the tests: moto, azurite, s3rver."""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

# Where .ci/run puts the packages of npm.
_NODE = Path(
    os.environ.get("GYMFAST_TEST_SERVERS", Path(__file__).parents[1] / "build/servers"),
    "node_modules/.bin",
)
# Those of the emulator, known to everybody.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_START_S = 120.0


@contextmanager
def moto() -> Iterator[str]:
    """The endpoint of an S3 with a bucket named `bucket`."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("needs moto")
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, port) as endpoint:
        _ask(f"{endpoint}/bucket", {"authorization": _AWS})
        yield endpoint


@contextmanager
def azurite() -> Iterator[str]:
    """The endpoint of an Azure Blob Storage with a container named `bucket`."""
    port = _free_port()
    command = [*_node("azurite-blob"), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    flags = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with _running([*command, *flags], port) as endpoint:
        date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        signed = (
            "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
            f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/bucket\nrestype:container"
        )
        digest = hmac.digest(base64.b64decode(AZURE_KEY), signed.encode(), hashlib.sha256)
        key = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
        headers = {"x-ms-date": date, "x-ms-version": "2021-08-06", "authorization": key}
        _ask(f"{endpoint}/{AZURE_ACCOUNT}/bucket?restype=container", headers)
        yield endpoint


@contextmanager
def s3rver(folder: Path) -> Iterator[str]:
    """The endpoint of an S3 that ignores conditions; its key and secret are `S3RVER`."""
    port = _free_port()
    command = [*_node("s3rver"), "-d", str(folder), "-a", "127.0.0.1", "-p", str(port), "-s"]
    with _running([*command, "--configure-bucket", "bucket"], port) as endpoint:
        yield endpoint


_AWS = "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/aws4_request, SignedHeaders=host"


def _node(name: str) -> list[str]:
    node, script = shutil.which("node"), _NODE / name
    if node is None or not script.exists():
        pytest.skip(f"needs the npm package of {name}")
    return [node, str(script)]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _ask(url: str, headers: dict[str, str]) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)):
        pass


@contextmanager
def _running(command: list[str], port: int) -> Iterator[str]:
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            _wait_for(server, port)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def _wait_for(server: subprocess.Popen[str], port: int) -> None:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        if server.poll() is not None:
            raise RuntimeError(f"{server.args} ended: {server.stderr.read()}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"{server.args} does not listen")
