"""A vLLM server of the stand-in with our real engine; other orders of calls are refused.

`python -m integrations.vllm_server SHAPES PORT` prints its port; SHAPES is JSON, by name.
"""

from __future__ import annotations

import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch
from integrations import vllm_stand_in as stand_in

MISSING = {"error": {"message": "Not Found"}}


def digests(tensors: Any) -> dict[str, str]:
    """Of each tensor the bytes, for comparison across processes."""
    return {
        name: hashlib.sha256(t.detach().contiguous().view(torch.uint8).numpy().data).hexdigest()
        for name, t in tensors
    }


class Server:
    """What the worker and the API server of vLLM 0.32 do with one engine."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        modules = SimpleNamespace(setitem=lambda where, name, value: where.update({name: value}))
        stand_in.install(modules, stand_in.Engine32, "0.32.0")
        from gymfast.integrations.vllm import GymfastEngine

        self.model = stand_in.PlainModel(shapes)
        self.engine = GymfastEngine(*stand_in.engine_arguments(stand_in.Engine32, self.model))
        self.is_paused = self.is_active = self.has_old_cache = self.keeps_requests = False
        self.version = "default"
        self.calls: list[str] = []
        self.failures: dict[str, str] = {}

    def answer(self, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
        if path == "/health":
            return 200, {}
        if path == "/v1/models":
            return 200, {"data": [{"id": "plain"}]}
        if path == "/test":  # what happened since the last time; and what fails from here on
            self.failures = fields.get("failures", {})
            self.model.fails_at = fields.get("fails_at", 0)
            calls, self.calls = self.calls, []
            return 200, {
                "calls": calls,
                "weights": digests(self.model.named_parameters()),
                "loads": self.model.calls,
                "is_paused": self.is_paused,
                "version": self.version,
            }
        self.calls.append(path)
        route, _, query = path.partition("?")
        failure = self.failures.get(route)
        if failure == "404":
            return 404, MISSING
        if failure:
            return 500, {"error": {"message": failure}}
        try:
            getattr(self, route[1:])(fields, query)
        except Exception as error:  # noqa: BLE001 - as vLLM answers an error of its workers
            return 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
        return 200, {"success": True}

    def pause(self, fields: dict[str, Any], query: str) -> None:
        self.is_paused = True
        self.keeps_requests = query == "mode=keep"

    def resume(self, fields: dict[str, Any], query: str) -> None:
        _check(not self.is_active and not self.has_old_cache, "resumed in the middle of an update")
        self.is_paused = False
        self.model()  # refuses to run if the engine is flagged

    def init_weight_transfer_engine(self, fields: dict[str, Any], query: str) -> None:
        info = self.engine.parse_init_info(fields["init_info"])
        self.engine.init_transfer_engine(info)

    def start_weight_update(self, fields: dict[str, Any], query: str) -> None:
        _check(self.is_paused, "not paused")
        _check(not self.is_active, "start_weight_update called while an update is active")
        self.engine.start_weight_update()
        self.is_active = True

    def update_weights(self, fields: dict[str, Any], query: str) -> None:
        _check(self.is_active, "start_weight_update must be called before update_weights")
        try:
            self.engine.update_weights(fields["update_info"])
        except BaseException:
            self.is_active = False
            raise
        self.has_old_cache = True

    def finish_weight_update(self, fields: dict[str, Any], query: str) -> None:
        _check(self.is_active, "finish_weight_update called without a start_weight_update")
        self.engine.finish_weight_update()
        self.is_active = False
        self.version = fields.get("weight_version", self.version)

    def reset_prefix_cache(self, fields: dict[str, Any], query: str) -> None:
        is_reset = "reset_running_requests=true" in query or not self.keeps_requests
        _check(is_reset, "blocks are held by requests that were kept")
        self.has_old_cache = False


class Handler(BaseHTTPRequestHandler):
    server_of_model: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        code, answer = self.server_of_model.answer(self.path, json.loads(body or b"{}"))
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST  # noqa: N815 - http.server's

    def log_message(self, *arguments: Any) -> None:
        return


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise RuntimeError(text)


if __name__ == "__main__":
    Handler.server_of_model = Server(json.loads(sys.argv[1]))
    httpd = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
    print(httpd.server_address[1], flush=True)
    httpd.serve_forever()
