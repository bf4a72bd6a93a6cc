"""A fake engine behind the endpoints of vLLM or SGLang, in processes of its own.

It keeps a prefix cache by text, runs captured graphs, pauses, sleeps, and fails where it is told
to. `python -m integrations.fake_engine` prints its port; `/reset` makes a new engine.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from integrations.fake_ranks import RankError, Ranks, SglangRank, VllmRank

from gymfast.delta.hf_delta import pull
from gymfast.errors import GymfastError
from gymfast.integrations.engine_http import EngineHttp

_TIMEOUT_S = 30.0
Fields = dict[str, Any]
Answer = tuple[int, Any]


@dataclass
class Request:
    """One that runs: the keys and values it holds, and the weights that computed its tokens."""

    text: str
    holds: list[Entry] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """Keys and values of a prefix, and the weights that they were computed with."""

    kv: str
    weights: str


class FrontEnd:
    """Scheduler, prefix cache and control. `fails` names endpoints that fail, and how.

    How: "before" it did something; "after" it, by a proxy; "silent" after it, without an answer.
    """

    error_code = 500

    def __init__(self, kind: type, options: Fields, folder: str) -> None:
        self.ranks = Ranks(kind, options, folder)
        self.fails: dict[str, str] = {}
        self.cache: dict[str, Entry] = {}
        self.version, self.events = "default", list[str]()
        self.is_paused = self.is_draining = self.is_dead = False
        self.stale_hits = self.num_hits = 0
        self.running: list[Request] = []
        self.changed = Condition()

    def answer(self, path: str, body: Fields) -> Answer | None:
        """Code and value; None if there is no answer."""
        how = self.fails.get(path)
        if how == "before":
            return self.failure("injected before")
        handler: Callable[[Fields], Answer] = getattr(self, "do" + path.replace("/", "_"))
        if path in ("/generate", "/test"):
            return handler(body)
        with self.changed:
            if self.is_dead:
                return None
            self.events.append(path)
            try:
                answer = handler(body)
            except RankError as error:
                return self.failure(str(error))
            except (EOFError, ConnectionError):  # a rank is gone, and with it the engine
                self.is_dead = True
                return self.failure("EngineDeadError") if self.error_code == 500 else None
            finally:
                self.changed.notify_all()
        if how == "silent":
            return None
        return (502, {"error": "Bad Gateway"}) if how == "after" else answer

    def failure(self, text: str) -> Answer:
        return self.error_code, {"success": False, "message": text}

    def do_generate(self, body: Fields) -> Answer:
        """Tokens of one request. `until_pause`: it goes on until a pause drains it."""
        request = Request(body["text"])
        with self.changed:
            self._wait_until(lambda: not self.is_paused)
            self.running.append(request)
            try:
                while not self.is_draining:
                    self._wait_until(lambda: self.is_draining or not self.is_paused)
                    if self.is_draining:
                        break
                    self._step(request)
                    if not body.get("until_pause"):
                        break
                    self.changed.notify_all()
                    self.changed.wait(0.001)
            except (RankError, EOFError, ConnectionError) as error:
                return 500, {"error": str(error)}
            finally:
                self.running.remove(request)
                self.changed.notify_all()
        kv = request.holds[-1].kv if request.holds else ""
        return 200, {"token": kv, "weights": list(dict.fromkeys(request.weights))}

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        if not self.changed.wait_for(condition, _TIMEOUT_S):
            raise RankError("paused for too long")

    def _step(self, request: Request) -> None:
        (weights, *others) = self.ranks.call("run")
        request.weights.append(sha256("".join([weights, *others]).encode()).hexdigest())
        now, words = request.weights[-1], request.text.split()
        if not request.holds:
            for end in range(1, len(words) + 1):
                prefix, parent = " ".join(words[:end]), request.holds[-1].kv if end > 1 else ""
                computed = Entry(sha256(f"{parent}{words[end - 1]}{now}".encode()).hexdigest(), now)
                self.num_hits += prefix in self.cache
                request.holds.append(self.cache.setdefault(prefix, computed))
        self.stale_hits += sum(entry.weights != now for entry in request.holds)

    def drain(self) -> None:
        self.is_draining = True
        self.changed.notify_all()
        self.changed.wait_for(lambda: not self.running, _TIMEOUT_S)
        self.is_draining = False

    def preempt(self) -> None:
        for request in self.running:
            request.holds = []

    def flush(self) -> bool:
        """Refused while requests hold a part of the cache."""
        if any(request.holds for request in self.running):
            return False
        self.events.append("flushed")
        self.cache = {}
        return True

    def set_version(self, version: str | None) -> None:
        if version is not None:
            self.events.append(f"version {version}")
            self.version = version

    def do_test(self, body: Fields) -> Answer:
        """For tests alone: what was seen, and what fails from here on."""
        with self.changed:
            self.fails = body.get("fails", self.fails)
            if "wait_for_running" in body:
                self.changed.wait_for(
                    lambda: sum(bool(r.weights) for r in self.running) == body["wait_for_running"],
                    _TIMEOUT_S,
                )
            if "drain" in body:
                self.drain()
            if "ranks" in body:
                self.ranks.call("set")
                calls: dict[str, Fields] = body["ranks"]
                for rank, options in calls.items():
                    self.ranks.call_only(int(rank), "set", **options)
            seen = {
                "ranks": [] if self.is_dead else self.ranks.call("see"),
                "events": self.events,
                "is_paused": self.is_paused,
                "stale_hits": self.stale_hits,
                "num_hits": self.num_hits,
                "num_running": len(self.running),
                "version": self.version,
                "is_dead": self.is_dead,
            }
            self.events = []
            return 200, seen


class VllmFrontEnd(FrontEnd):
    """The endpoints of vLLM in its development mode."""

    def do_pause(self, body: Fields) -> Answer:
        self.is_paused = True
        if body.get("mode") != "keep":
            self.drain()
        return 200, {"status": "paused"}

    def do_resume(self, body: Fields) -> Answer:
        self.is_paused = False
        return 200, {"status": "resumed"}

    def do_init_weight_transfer_engine(self, body: Fields) -> Answer:
        self.ranks.call("init_transfer", body["init_info"])
        return 200, {"message": "Weight transfer initialized"}

    def do_start_weight_update(self, body: Fields) -> Answer:
        self.ranks.call("start")
        return 200, {"message": "Weight update started"}

    def do_update_weights(self, body: Fields) -> Answer:
        self.ranks.call("update", body["update_info"])
        return 200, {"message": "Weights updated"}

    def do_finish_weight_update(self, body: Fields) -> Answer:
        self.ranks.call("finish")
        self.set_version(body.get("weight_version"))
        return 200, {"message": "Weight update finished"}

    def do_reset_prefix_cache(self, body: Fields) -> Answer:
        if body.get("reset_running_requests") == "true":
            self.preempt()
        return 200, {"success": self.flush()}

    def do_sleep(self, body: Fields) -> Answer:
        self.do_pause({"mode": "abort"})
        self.flush()
        self.ranks.call("sleep", int(body.get("level", 1)))
        return 200, {"status": "sleeping"}

    def do_wake_up(self, body: Fields) -> Answer:
        self.ranks.call("wake_up")
        self.is_paused = False
        return 200, {"status": "awake"}


class SglangFrontEnd(FrontEnd):
    """The endpoints of SGLang; a loader that raises ends the server."""

    error_code = 400

    def do_server_info(self, body: Fields) -> Answer:
        info = {"tp_size": len(self.ranks), "dp_size": 1, "pp_size": 1}
        return 200, info | {"custom_weight_loader": ["gymfast.integrations.sglang.load"]}

    def do_pause_generation(self, body: Fields) -> Answer:
        self.is_paused = True
        if body.get("mode", "abort") == "abort":
            self.drain()
        elif body["mode"] == "retract":
            self.preempt()
        return 200, {"status": "ok"}

    def do_continue_generation(self, body: Fields) -> Answer:
        self.is_paused = False
        return 200, {"status": "ok"}

    def do_begin_weight_update(self, body: Fields) -> Answer:
        return self._of_ranks(self.ranks.call("begin"))

    def do_end_weight_update(self, body: Fields) -> Answer:
        return self._of_ranks(self.ranks.call("end"))

    def do_update_weights_from_tensor(self, body: Fields) -> Answer:
        body = {"weight_version": None, "flush_cache": True, **body}
        payloads = [base64.b64decode(p, validate=True) for p in body["serialized_named_tensors"]]
        answer = self._of_ranks(self.ranks.call_each("update", [(body, p) for p in payloads]))
        if answer[0] == 200:
            self.set_version(body["weight_version"])
            if body["flush_cache"] and not self.flush():
                return self.failure("Weights were updated, but the cache was not flushed")
        return answer

    def do_get_weights_by_name(self, body: Fields) -> Answer:
        return 200, self.ranks.call("weights", body["name"], body["truncate_size"])[0]

    def do_pull_weights(self, body: Fields) -> Answer:
        """What slime's image adds: the local checkpoint of this host follows the versions."""
        folders = [Path(body[name]) for name in ("local", "base", "source")]
        try:
            pull(*folders, body["target_version"])
        except GymfastError as error:
            return self.failure(str(error))
        return 200, {"success": True}

    def do_flush_cache(self, body: Fields) -> Answer:
        return (200, {"success": True}) if self.flush() else self.failure("pending requests")

    def do_update_weights_from_disk(self, body: Fields) -> Answer:
        self.ranks.call("load_checkpoint", body["model_path"])
        self.set_version(body["weight_version"])
        return self.do_flush_cache(body)

    def do_release_memory_occupation(self, body: Fields) -> Answer:
        self.flush()
        self.ranks.call("sleep", 2)  # it restores buffers, no parameters
        return 200, {}

    def do_resume_memory_occupation(self, body: Fields) -> Answer:
        self.ranks.call("wake_up")
        return 200, {}

    def _of_ranks(self, outputs: list[tuple[bool, str]]) -> Answer:
        failed = [message for success, message in outputs if not success]
        return self.failure(failed[0]) if failed else (200, {"success": True, "message": "Success"})


KINDS: Mapping[str, tuple[type[FrontEnd], type]] = {
    "vllm": (VllmFrontEnd, VllmRank),
    "sglang": (SglangFrontEnd, SglangRank),
}


class Handler(BaseHTTPRequestHandler):
    engine: FrontEnd | None = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        url = urlsplit(self.path)
        if url.path in ("/reset", "/stop"):
            if Handler.engine is not None:
                Handler.engine.ranks.close()
                Handler.engine = None
            answer: Answer | None = (200, {})
            if url.path == "/reset":
                front_end, rank = KINDS[body["kind"]]
                Handler.engine = front_end(rank, body, tempfile.mkdtemp(dir=body["folder"]))
        else:
            assert Handler.engine is not None
            answer = Handler.engine.answer(url.path, body | dict(parse_qsl(url.query)))
        if answer is None:
            self.rfile.read(0 if Handler.engine and Handler.engine.is_dead else 1)  # it gives up
            self.close_connection = True
            return
        data = json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST  # noqa: N815 - http.server's

    def log_message(self, *arguments: Any) -> None:
        return


class FakeEngine:
    """The engine from a test; a process that serves one after the other."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "integrations.fake_engine"],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        self.http = EngineHttp(self.url, api_key=None, timeout_s=_TIMEOUT_S)

    def reset(self, kind: str, folder: Path, **options: Any) -> None:
        """A new engine, as after a restart: it serves its base."""
        self.http.require("/reset", {"kind": kind, "folder": str(folder), **options})

    def seen(self, **settings: Any) -> Fields:
        """What happened since the last time; `settings` make something fail from here on."""
        seen: Fields = self.http.require("/test", settings)
        return seen

    def generate(self, text: str, **options: Any) -> Fields:
        answer: Fields = self.http.require("/generate", {"text": text, **options})
        return answer

    def wait_for_running(self, number: int) -> None:
        """Returns when that many requests run and each has begun."""
        self.http.require("/test", {"wait_for_running": number})

    def drain(self) -> None:
        """Has requests end that run until a pause."""
        self.http.require("/test", {"drain": True})

    def close(self) -> None:
        self.http.call("/stop", {})
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
