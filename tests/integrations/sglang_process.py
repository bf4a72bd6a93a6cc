"""A server of sglang_server.py in another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from gymfast.integrations.engine_http import EngineHttp


class Server:
    """A stand-in of a server in another process, around the real files if it has their folder."""

    def __init__(self, source: Path | str) -> None:
        command = [sys.executable, "-m", "integrations.sglang_server", source]
        tests = Path(__file__).parents[1]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tests)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        self.http = EngineHttp(self.url, api_key=None, timeout_s=60)

    def reset(self, **options: Any) -> Server:
        """The server with a new engine, as after a restart."""
        self.http.require("/reset", options)
        return self

    def seen(self, **settings: Any) -> dict[str, Any]:
        """What happened since the last time; `settings` break something from here on."""
        return self.http.require("/test", settings)

    @property
    def weight_version(self) -> str:
        return self.http.require("/model_info", {})["weight_version"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
