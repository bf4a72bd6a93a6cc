"""Sites of a trainer and its engines: a store in one network namespace, engines in others.

Node 0 has the server of the store, each other node is a site; within a site processes talk over its
loopback, so what its one link carries is what came over the long way.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.namespaces import Network

SCRIPT = Path(__file__).with_name("site_process.py")
RUN = "demo"


@dataclass
class Said:
    """What an engine says when it was told to look or to wait."""

    version: int | None
    sha256: str
    seconds: float
    end_s: float
    error: str


class Process:
    """A process on a node, which speaks and is told in lines of JSON."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        """The process, as soon as it has said its first line: `first`."""
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        self.first: dict[str, Any] = self.hear()

    def tell(self, line: object) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise OSError(f"{self.popen.args} ended with {self.popen.wait()}")
        fields: dict[str, Any] = json.loads(line)
        return fields

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


class Sites:
    """A store at node 0, in `folder`, and `num_sites` sites; a context manager."""

    def __init__(self, folder: Path, num_sites: int, rate_gbps: float) -> None:
        self.root = folder / "store"
        self.network = Network(num_sites + 1, rate_gbps)
        self._key_file = folder / "relay.key"
        self._stack = ExitStack()
        self.store_url = ""

    def __enter__(self) -> Sites:
        self._key_file.write_text(secrets.token_hex(16))
        self._stack.enter_context(self.network)
        try:
            host = self.network.address(0)
            store = self.start(0, sys.executable, "-P", str(SCRIPT), "store", str(self.root), host)
        except BaseException:
            self._stack.close()
            raise
        self.store_url = store.first["url"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def start(self, node: int, *command: str) -> Process:
        """A process on a node, ended with the sites."""
        env = {**os.environ, "GYMFAST_RELAY_KEY_FILE": str(self._key_file)}
        process = Process([*self.network.within(node), *command], env)
        self._stack.callback(process.end)
        return process

    def relay(self, node: int, upstream: str = "", *, port: int = 0, options: str = "") -> Process:
        """`gymfast relay` at a site, reached from all nodes; its upstream is the store, or another.

        Its address is `first["url"]`.
        """
        command = [sys.executable, "-P", "-m", "gymfast", "relay", upstream or self.store_url]
        command += ["--host", self.network.address(node), "--port", str(port), "--json"]
        command += ["--key-file", str(self._key_file), *options.split()]
        return self.start(node, *command)

    def engine(
        self,
        node: int,
        url: str,
        num_bytes: int,
        *,
        relay_timeout_s: float = 60.0,
        retry_after_s: float = 10.0,
    ) -> Process:
        """An engine at a site that follows the run."""
        settings = [url, RUN, num_bytes, relay_timeout_s, retry_after_s]
        command = [sys.executable, "-P", str(SCRIPT), "engine", *map(str, settings)]
        return self.start(node, *command)

    def received_bytes(self, node: int) -> int:
        """Bytes that the link of a site has brought, with the heads of all packets."""
        return self._link(node)["rx"]["bytes"]

    def sent_bytes(self, node: int) -> int:
        """Bytes that a node has sent over its link."""
        return self._link(node)["tx"]["bytes"]

    def _link(self, node: int) -> dict[str, dict[str, int]]:
        command = [*self.network.within(node), "ip", "-s", "-j", "link", "show", "eth0"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        fields: dict[str, dict[str, int]] = json.loads(found.stdout)[0]["stats64"]
        return fields


def tell_all(engines: Sequence[Process], line: object) -> list[Said]:
    """What all say, each told the same at the same time."""
    for engine in engines:
        engine.tell(line)
    return [Said(**engine.hear()) for engine in engines]
