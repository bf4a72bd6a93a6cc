"""Servers that load and unload adapters over HTTP as vLLM 0.32 and SGLang 0.5.23 do.

Routes, fields, status codes, texts and the order of locks are those of the real sources; a request
is held by the test, and says which bytes it is answered with.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors import safe_open


class Adapter:
    """What an engine has read of a folder."""

    def __init__(self, path: str) -> None:
        folder = Path(path)
        self.config = json.loads((folder / "adapter_config.json").read_text())
        self.path = path
        self.data = (folder / "adapter_model.safetensors").read_bytes()
        with safe_open(folder / "adapter_model.safetensors", "np") as file:
            self.names = list(file.keys())


class FakeServer:
    """What both have: HTTP in threads, failures on order, the most that was resident at once."""

    max_rank = 64

    def __init__(self) -> None:
        self.peak = 0
        self.calls: list[str] = []
        self.lose_answer_of = ""
        self.answers: dict[str, tuple[int, Any]] = {}
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                owner.calls.append(self.path)
                code, body = owner.answers.get(self.path) or owner.answer(
                    self.path, json.loads(data or b"{}")
                )
                owner.peak = max(owner.peak, owner.num_resident)
                if owner.lose_answer_of == self.path:
                    owner.lose_answer_of = ""
                    self.close_connection = True
                    return
                text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                try:
                    self.send_response(code)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)
                except OSError:  # the client did not wait
                    self.close_connection = True

            do_GET = do_POST  # noqa: N815 - http.server's

            def log_message(self, *arguments: Any) -> None:
                return

        self._httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._httpd.server_address[1]}"
        threading.Thread(target=self._httpd.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._httpd.shutdown()
        self._httpd.server_close()

    @property
    def num_resident(self) -> int:
        raise NotImplementedError

    def answer(self, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
        raise NotImplementedError

    def models(self, adapters: dict[str, str]) -> dict[str, Any]:
        cards = [{"id": name, "root": root, "parent": "base"} for name, root in adapters.items()]
        return {
            "object": "list",
            "data": [{"id": "base", "root": "base", "parent": None}, *cards],
        }


class FakeVLLM(FakeServer):
    """Names in the API server; adapters in a cache of the worker, read again if they fell out."""

    max_cpu_loras = 3

    def __init__(self) -> None:
        self.requests: dict[str, tuple[int, str]] = {}
        self.cache: OrderedDict[int, Adapter] = OrderedDict()
        self._counter = 0
        self._lock = threading.Lock()
        super().__init__()

    @property
    def num_resident(self) -> int:
        return max(len(self.requests), len(self.cache))

    def answer(self, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            if path == "/v1/models":
                return 200, self.models({n: p for n, (_, p) in self.requests.items()})
            if path == "/v1/load_lora_adapter":
                return self._load(fields["lora_name"], fields["lora_path"], fields)
            if path == "/v1/unload_lora_adapter":
                return self._unload(fields["lora_name"])
            return 404, {"detail": "Not Found"}

    def _load(self, name: str, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
        is_in_place = fields.get("load_inplace", False)
        if not is_in_place and name in self.requests:
            return _vllm_error(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
            )
        if name in self.requests:
            number = self.requests[name][0]
        else:
            self._counter += 1
            number = self._counter
        try:
            self._add(number, path, is_in_place=is_in_place)
        except FileNotFoundError:
            return _vllm_error(404, f"Loading lora {name} failed: No adapter found for {path}")
        except ValueError as error:
            return _vllm_error(500, str(error))
        self.requests[name] = (number, path)
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unload(self, name: str) -> tuple[int, Any]:
        if name not in self.requests:
            return _vllm_error(404, f"The lora adapter '{name}' cannot be found.")
        del self.requests[name]
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def _add(self, number: int, path: str, *, is_in_place: bool = False) -> Adapter:
        if number in self.cache and not is_in_place:
            self.cache.move_to_end(number)
            return self.cache[number]
        adapter = Adapter(path)
        if adapter.config["r"] > self.max_rank:
            raise ValueError(f"LoRA rank {adapter.config['r']} is greater than max_lora_rank")
        if any(re.search(r"\.experts\.[^\d]", name) for name in adapter.names):
            raise ValueError("expected target modules ... but received experts")
        self.cache.pop(number, None)
        if len(self.cache) + 1 > self.max_cpu_loras:
            self.cache.popitem(last=False)
        self.cache[number] = adapter
        return adapter

    def begin(self, name: str) -> tuple[int, str]:
        """A request on an adapter: what it holds until it ends."""
        with self._lock:
            return self.requests[name]

    def token(self, request: tuple[int, str]) -> bytes:
        """The bytes that the next token of a request is made with."""
        with self._lock:
            return self._add(*request).data

    def end(self, request: tuple[int, str]) -> None:
        return


class FakeSGLang(FakeServer):
    """A registry of names; an unload waits for the requests, under the lock of all updates."""

    def __init__(self) -> None:
        self.registry: dict[str, tuple[str, str]] = {}
        self.loras: dict[str, Adapter] = {}
        self.pending: dict[str, str] = {}
        self._running: dict[str, int] = {}
        self._changed = threading.Condition()
        self._update_lock = threading.Lock()
        super().__init__()

    @property
    def num_resident(self) -> int:
        return len(self.loras)

    def answer(self, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, self.models({n: p for n, (_, p) in self.registry.items()})
        if path == "/load_lora_adapter":
            with self._update_lock:
                return self._result(self._load(fields["lora_name"], fields["lora_path"]))
        if path == "/unload_lora_adapter":
            with self._update_lock:
                return self._result(self._unload(fields["lora_name"]))
        return 404, {"detail": "Not Found"}

    def _load(self, name: str, path: str) -> str | None:
        if name in self.pending:
            return (
                f"LoRA adapter '{name}' has an incomplete unload. Retry the unload before "
                "loading it again."
            )
        if name in self.registry:
            return f"Failed to load LoRA adapter {name} because it is already loaded"
        try:
            adapter = Adapter(path)
        except OSError as error:
            return str(error)
        if adapter.config["peft_type"].lower() != "lora" or adapter.config["r"] > self.max_rank:
            return (
                f"LoRA adapter {name} with rank {adapter.config['r']} is incompatible with the "
                "current LoRA memory pool configuration."
            )
        number = uuid.uuid4().hex
        self.loras[number] = adapter
        self.registry[name] = (number, path)
        return None

    def _unload(self, name: str) -> str | None:
        number = self.pending.get(name)
        if number is None:
            if name not in self.registry:
                return f"LoRA with name {name} does not exist. Loaded LoRAs: {[*self.registry]}"
            number = self.registry.pop(name)[0]
            self.pending[name] = number
        with self._changed:
            self._changed.wait_for(lambda: not self._running.get(number))
        del self.loras[number]
        del self.pending[name]
        return None

    def _result(self, error: str | None) -> tuple[int, Any]:
        loaded = {name: path for name, (_, path) in self.registry.items()}
        body = {"success": error is None, "error_message": error, "loaded_adapters": loaded}
        return (400 if error else 200), body

    def begin(self, name: str) -> str:
        """A request on an adapter: what it holds until it ends."""
        number = self.registry[name][0]
        with self._changed:
            self._running[number] = self._running.get(number, 0) + 1
        return number

    def token(self, request: str) -> bytes:
        """The bytes that the next token of a request is made with."""
        return self.loras[request].data

    def end(self, request: str) -> None:
        with self._changed:
            self._running[request] -= 1
            self._changed.notify_all()


def _vllm_error(code: int, message: str) -> tuple[int, Any]:
    return code, {"error": {"message": message, "type": "BadRequestError", "code": code}}
