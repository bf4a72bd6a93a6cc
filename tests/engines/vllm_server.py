"""The server of vLLM with the one flag, and the calls of a trainer over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

START_LIMIT_S = 240.0


class Server:
    """A server in a process of its own; it is up once the block is entered."""

    def __init__(self, model: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = log
        self._command = [
            # `vllm serve` asks for the version of a package vllm, which the CPU repack is not.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--host", "127.0.0.1", "--port", str(self.port), "--tokens-only"),
            *("--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16"),
            *("--max-model-len", "128"),
            *("--weight-transfer-config", json.dumps({"backend": "gymfast"})),
        ]

    def __enter__(self) -> Server:
        settings = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with self._log.open("w") as file:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._log.parent,  # not the checkout: -m would import the gymfast there
                env=os.environ | settings,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while not self._is_up():
            is_over = self._process.poll() is not None or time.monotonic() > deadline
            if is_over:
                self.__exit__(None, None, None)
                raise AssertionError(self._log.read_text()[-4000:])
            time.sleep(1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and answer of a POST, or of a GET if there is no body."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read().decode()
                return answer.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def tokens(self, prompt: list[int]) -> list[int]:
        """The greedy tokens that follow."""
        greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": prompt, "sampling_params": greedy}
        status, answer = self.call("/inference/v1/generate", body)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]

    def _is_up(self) -> bool:
        try:
            return self.call("/health")[0] == 200
        except OSError:
            return False
