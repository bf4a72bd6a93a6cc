"""Servers of vllm_server.py in other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gymfast.integrations.engine_http import EngineHttp


class Server:
    """A server that starts; `url` waits until it is up."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], port: int = 0) -> None:
        command = [sys.executable, "-m", "integrations.vllm_server", json.dumps(shapes), str(port)]
        tests = Path(__file__).parents[1]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tests)
        self._shapes, self.port = shapes, port

    @property
    def url(self) -> str:
        assert self._process.stdout is not None
        self.port = self.port or int(self._process.stdout.readline())
        return f"http://127.0.0.1:{self.port}"

    def seen(self, **settings: Any) -> dict[str, Any]:
        """What happened since the last time; `settings` break something from here on."""
        return EngineHttp(self.url, api_key=None, timeout_s=60).require("/test", settings)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """The same address with a new engine; returns when it is up."""
        self.kill()
        Server.__init__(self, self._shapes, self.port)
        assert self._process.stdout is not None
        self._process.stdout.readline()
