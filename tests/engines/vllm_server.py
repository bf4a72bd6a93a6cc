"""A real vLLM server with the one flag, in processes of its own."""

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

from engines import vllm_faults

START_LIMIT_S = 240.0
CALL_LIMIT_S = 60.0
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
FOLLOWS_A_RUN = ("--weight-transfer-config", json.dumps({"backend": "gymfast"}))


class Server:
    """A server that loaded a checkpoint; it is up once the block is entered."""

    def __init__(
        self,
        model: str,
        log: Path,
        *,
        num_ranks: int = 1,
        dtype: str = "bfloat16",
        options: tuple[str, ...] = FOLLOWS_A_RUN,
        settings: dict[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._settings = SETTINGS | (settings or {})
        self._log, self._plugins = log, log.with_suffix(".plugins")
        host, port = self.url.removeprefix("http://").split(":")
        self._command = [
            # `vllm serve` asks for the version of a package vllm, which the CPU repack is not.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--host", host, "--port", port, "--tokens-only", "--skip-tokenizer-init"),
            *("--enforce-eager", "--dtype", dtype, "--max-model-len", "128"),
            *("--block-size", "32", "--tensor-parallel-size", str(num_ranks)),
            *options,
        ]

    def __enter__(self) -> Server:
        with self._log.open("a") as file:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._log.parent,  # not the checkout: -m would import the gymfast there
                env=os.environ | self._settings | vllm_faults.install(self._plugins),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while not self.is_up:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(self._log.read_text()[-4000:])
            time.sleep(1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends the server and its workers at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def is_up(self) -> bool:
        try:
            return self.call("/health")[0] == 200
        except OSError:
            return False

    def fail(self, fault: str) -> None:
        """The step and rank that fail from here on, such as 'load 1'; none if it is empty."""
        (self._plugins / "fault").write_text(fault)

    def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and answer of a POST, or of a GET if there is no body."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=CALL_LIMIT_S) as answer:
                return answer.status, _value(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def generate(
        self, prompt: list[int], *, model: str = "", max_tokens: int = 12, **more: Any
    ) -> tuple[int, Any]:
        """Status and answer of a greedy request, to an adapter if `model` is its name."""
        greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": prompt, "sampling_params": greedy | {"max_tokens": max_tokens}}
        return self.call(
            "/inference/v1/generate", body | more | ({"model": model} if model else {})
        )

    def tokens(self, prompts: list[list[int]], *, model: str = "") -> list[list[int]]:
        """The greedy tokens that follow each prompt, alone."""
        found = []
        for prompt in prompts:
            status, answer = self.generate(prompt, model=model)
            assert status == 200, answer
            found.append(answer["choices"][0]["token_ids"])
        return found

    def reload(self, path: str, prompts: list[list[int]]) -> list[list[int]]:
        """What vLLM's own reload of a checkpoint makes of the prompts."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        assert self.call("/collective_rpc", body)[0] == 200
        assert self.call("/reset_prefix_cache", {})[0] == 200
        return self.tokens(prompts)

    @property
    def version(self) -> str:
        return self.call("/weight_info")[1]["weight_version"]

    @property
    def is_paused(self) -> bool:
        return self.call("/is_paused")[1]["is_paused"]

    @property
    def num_cached(self) -> int:
        """Tokens of prompts that were found in the prefix cache so far."""
        lines = self.call("/metrics")[1].splitlines()
        found = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total")]
        return int(float(found[0].split()[-1]))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
