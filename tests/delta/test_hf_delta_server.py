"""The pull endpoint over HTTP: the JSON of SGLang's, keys, and requests that are refused."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from delta_checkpoints import read, write_sharded
from delta_weights import changed, random_tensor
from hf_delta_data import write_version

from gymfast.delta.hf_delta import pull
from gymfast.delta.hf_delta.server import PullServer
from gymfast.errors import GymfastError
from gymfast.testing.compare import assert_bits_equal

KEY = b"correct-horse-battery"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    old = {"w": random_tensor("BF16", (50, 7), rng)}
    new = {"w": changed(old["w"], 0.3, rng)}
    write_sharded(tmp_path / "base", old)
    write_sharded(tmp_path / "expected", new)
    write_version(tmp_path / "v", 1, old, new)
    return tmp_path


def serve(run: Path, request, key: bytes | None = None, host: str = "127.0.0.1") -> PullServer:
    server = PullServer(host, 0, lambda r: pull(r.local, run / "base", r.source, r.target), key)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    request.addfinalizer(stop)
    return server


def body_of(run: Path, target: object = 1, **changes: object) -> bytes:
    fields = {"local_checkpoint_dir": str(run / "local"), "source_dir": str(run / "v")}
    return json.dumps(fields | {"target_version": target} | changes).encode()


def post(server: PullServer, body: bytes, path: str = "/pull_weights", **headers: str):
    host, port = server.server_address[:2]
    client = http.client.HTTPConnection(str(host), port, timeout=30)
    headers = {"Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    client.request("POST", path, body, headers)
    answer = client.getresponse()
    content = json.loads(answer.read())
    client.close()
    assert content.keys() == {"success", "message"}
    assert content["success"] == (answer.status == 200)
    return answer.status, content["message"]


def test_a_pull_answers_as_the_engine_does(run: Path, request) -> None:
    server = serve(run, request)
    assert post(server, body_of(run)) == (200, "Success.")
    assert_bits_equal(read(run / "local"), read(run / "expected"))
    assert post(server, body_of(run)) == (200, "Success.")


def test_a_failed_pull_is_400_with_the_reason(run: Path, request) -> None:
    status, message = post(serve(run, request), body_of(run, 2))
    assert status == 400
    assert "NotFoundError" in message
    assert "weight_v000002: there is no such version" in message


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"target_version": -1}, "target_version is -1, expected a number from 0"),
        ({"target_version": "1"}, "target_version is '1'"),
        ({"target_version": True}, "target_version is True"),
        ({"source_dir": None}, "source_dir is None, expected a path"),
        ({"local_checkpoint_dir": ""}, "local_checkpoint_dir is '', expected a path"),
        ({"local_checkpoint_dir": "a\0b"}, "expected a path"),
    ],
)
def test_a_wrong_field_is_named(run: Path, request, change, text: str) -> None:
    status, message = post(serve(run, request), body_of(run, **change))
    assert status == 400
    assert text in message
    assert not (run / "local").exists()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 2**16, b"x" * (2**16 + 1)])
def test_a_body_that_is_no_request_is_refused(run: Path, request, body: bytes) -> None:
    assert post(serve(run, request), body)[0] == 400


def test_other_paths_and_what_a_browser_may_send_elsewhere_are_refused(run, request) -> None:
    server = serve(run, request)
    assert post(server, body_of(run), "/other")[0] == 404
    status, message = post(server, body_of(run), Content_Type="text/plain")
    assert status == 400
    assert "expected application/json" in message
    assert not (run / "local").exists()


@pytest.mark.parametrize("method", ["GET", "PUT", "NONSENSE"])
def test_other_methods_are_refused_in_the_same_form(run: Path, request, method: str) -> None:
    host, port = serve(run, request).server_address[:2]
    client = http.client.HTTPConnection(str(host), port, timeout=30)
    client.request(method, "/pull_weights")
    answer = client.getresponse()
    fields = json.loads(answer.read())
    assert (answer.status, fields["success"]) == (501, False)
    assert method in fields["message"]
    assert "expected POST /pull_weights" in fields["message"]


def test_with_a_key_only_who_knows_it_is_answered(run: Path, request) -> None:
    server = serve(run, request, KEY)
    wrong = ({}, {"Authorization": KEY.decode()}, {"Authorization": "Bearer wrong"})
    for headers in wrong:
        status, message = post(server, body_of(run), **headers)
        assert status == 401
        assert KEY.decode() not in message
    assert not (run / "local").exists()
    assert post(server, body_of(run), Authorization=f"Bearer {KEY.decode()}")[0] == 200


def test_other_hosts_need_a_key(run: Path, request) -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match=r"give a key .*or listen on 127\.0\.0\.1"):
            serve(run, request, host=host)
    assert post(serve(run, request, KEY, "0.0.0.0"), body_of(run))[0] == 401


def test_ipv6_loopback_needs_none(run: Path, request) -> None:
    if not socket.has_ipv6:
        pytest.skip("needs kernel feature IPv6")
    server = serve(run, request, host="::1")
    assert server.url.startswith("http://[::1]:")
    assert post(server, body_of(run))[0] == 200


def test_a_key_that_no_header_carries_and_a_taken_port_are_told(run: Path, request) -> None:
    with pytest.raises(ValueError, match="no HTTP header carries"):
        serve(run, request, b"sixteen bytes\nlong")
    taken = serve(run, request)
    with pytest.raises(GymfastError, match="choose another one"):
        PullServer("127.0.0.1", taken.server_port, lambda r: None)


def test_a_client_that_goes_away_does_not_end_the_server(run: Path, request) -> None:
    server = serve(run, request)
    with socket.create_connection(server.server_address[:2]) as client:
        client.sendall(b"POST /pull_weights HTTP/1.1\r\nContent-Length: 100\r\n")
    assert post(server, body_of(run))[0] == 200
