"""What the client of a vLLM server makes of each answer; tests/engines has a real server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gymfast.errors import ChainError, ChannelError, DeadlineError
from gymfast.integrations.update_request import InitRequest
from gymfast.integrations.vllm_client import VLLMClient
from gymfast.integrations.vllm_ranks import FLAGGED

FOLLOW = InitRequest(store="file:///mnt/runs", run="demo")
UPDATE = [
    "/init_weight_transfer_engine",
    "/pause?mode=wait",
    "/start_weight_update",
    "/update_weights",
]
DONE = [
    "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
    "/finish_weight_update",
    "/resume",
]


class Script:
    """A server whose answers are given: by path, code and body; 200 where nothing is given."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}

    def fail(self, path: str, message: str, code: int = 500) -> None:
        """As vLLM tells an error of its workers."""
        self.answers[path] = (code, {"error": {"message": message, "code": code}})


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            script.calls.append(self.path)
            script.bodies[self.path] = json.loads(data or b"{}")
            code, body = script.answers.get(self.path.partition("?")[0], (200, {}))
            answer = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST  # noqa: N815 - http.server's

        def log_message(self, *arguments: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        script.url = f"http://127.0.0.1:{httpd.server_address[1]}"
        threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
        yield script
        httpd.shutdown()


def test_an_update_is_one_paused_session_with_the_version_at_its_end(script: Script) -> None:
    VLLMClient(script.url).pull(FOLLOW, 7, is_full=True)
    assert script.calls == UPDATE + DONE
    assert script.bodies[UPDATE[0]]["init_info"]["run"] == "demo"
    assert script.bodies["/update_weights"] == {"update_info": {"version": 7, "is_full": True}}
    assert script.bodies["/finish_weight_update"] == {"weight_version": "7"}
    assert script.bodies["/start_weight_update"] == {"is_checkpoint_format": False}


def test_a_server_that_refuses_goes_on_and_other_ranks_close_their_update(script: Script) -> None:
    script.fail("/update_weights", "version 7 is not published yet")
    with pytest.raises(ChainError, match="goes on as before: version 7 is not published yet"):
        VLLMClient(script.url).pull(FOLLOW, 7)
    assert script.calls == [*UPDATE, "/finish_weight_update", "/resume"]
    assert script.bodies["/finish_weight_update"] == {}, "no version"


def test_a_flagged_server_stays_paused(script: Script) -> None:
    script.fail("/update_weights", f"Worker failed with error '{FLAGGED}: the load failed'")
    with pytest.raises(ChainError, match=r"is flagged and stays paused.*the load failed"):
        VLLMClient(script.url).pull(FOLLOW, 7)
    assert "/resume" not in script.calls


def test_an_update_that_was_left_open_is_used(script: Script) -> None:
    script.fail("/start_weight_update", "a weight update is already active. Call finish")
    VLLMClient(script.url).pull(FOLLOW, 7)
    assert script.calls == UPDATE + DONE


def test_after_an_update_that_was_left_open_an_error_says_nothing(script: Script) -> None:
    script.fail("/start_weight_update", "a weight update is already active. Call finish")
    script.fail("/update_weights", "a weight update is already active: the answer before")
    with pytest.raises(ChannelError, match=r"stays paused.*not known.*start the server anew"):
        VLLMClient(script.url).pull(FOLLOW, 7)
    assert "/resume" not in script.calls


def test_an_update_that_cannot_begin_changes_nothing(script: Script) -> None:
    script.fail("/start_weight_update", "set weight_transfer_config")
    with pytest.raises(ChainError, match="goes on as before: set weight_transfer_config"):
        VLLMClient(script.url).pull(FOLLOW, 7)
    assert script.calls == [*UPDATE[:3], "/resume"]


def test_an_answer_that_no_parser_takes_is_quoted(script: Script) -> None:
    script.answers["/init_weight_transfer_engine"] = (500, b"[" * 2**15)
    with pytest.raises(ChannelError, match=r"answered 500: \[{500};"):
        VLLMClient(script.url).pull(FOLLOW, 7)


def test_the_answer_of_a_proxy_says_nothing_about_the_server(script: Script) -> None:
    script.fail("/update_weights", "bad gateway", code=502)
    with pytest.raises(ChannelError, match=r"stays paused.*not known.*502: bad gateway"):
        VLLMClient(script.url).pull(FOLLOW, 7)
    assert "/resume" not in script.calls


def test_row_13_a_cache_that_is_not_reset_keeps_the_server_paused(script: Script) -> None:
    script.answers["/reset_prefix_cache"] = (200, {"success": False})
    with pytest.raises(ChannelError, match="reset_prefix_cache"):
        VLLMClient(script.url).pull(FOLLOW, 7)
    assert script.calls == UPDATE + DONE[:1], "neither the version nor a request of it"


@pytest.mark.parametrize(
    ("code", "text"), [(404, "VLLM_SERVER_DEV_MODE=1"), (500, "--weight-transfer-config")]
)
def test_a_server_that_cannot_follow_is_not_paused(script: Script, code: int, text: str) -> None:
    script.fail("/init_weight_transfer_engine", "no", code=code)
    with pytest.raises(ChannelError, match=rf"answered {code}: no; .*{text}"):
        VLLMClient(script.url).pull(FOLLOW, 7)
    assert script.calls == UPDATE[:1]


def test_waiting_for_a_server_has_an_end(script: Script) -> None:
    VLLMClient(script.url).wait_until_ready(1.0)
    script.fail("/health", "starting", code=503)
    with pytest.raises(DeadlineError, match="is not ready after 0 s"):
        VLLMClient(script.url).wait_until_ready(0.0)


def test_a_server_that_is_not_there_was_sent_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
    with pytest.raises(ChannelError, match=r"no connection .*refused.*this call was not sent"):
        VLLMClient(url).pull(FOLLOW, 1)
