"""The store in a Modal Volume, with the unmodified `modal` package and a server of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("modal", reason="needs the package modal")

from grpclib.const import Status
from modal_server import BLOCK_BYTES, ModalServer

from gymfast.errors import NotFoundError, StoreError
from gymfast.stores import check_create_only, open_store
from gymfast.stores.modal_volume import ModalVolumeStore
from gymfast.sync import LiveTarget, Publisher, Subscriber
from gymfast.testing.conformance import StoreContract

SECRET = "as-of-the-tests"


@pytest.fixture(scope="module")
def running() -> Iterator[ModalServer]:
    with ModalServer() as server:
        yield server


@pytest.fixture
def server(running: ModalServer, monkeypatch: pytest.MonkeyPatch) -> ModalServer:
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    running.volumes.clear()
    running.calls.clear()
    running.fail.clear()
    running.hang.clear()
    running.lose_replies.clear()
    return running


@pytest.mark.ci
class TestModalVolume(StoreContract):
    is_shared = True
    num_thread_rounds = 5
    num_process_rounds = 5
    num_kills = 2

    @pytest.fixture
    def store(self, server: ModalServer) -> ModalVolumeStore:
        return ModalVolumeStore("weights", "runs")


def test_nothing_is_made_by_reading(server: ModalServer) -> None:
    store = open_store("modal-volume://weights/runs/")
    assert store.url == "modal-volume://weights/runs"
    assert list(store.list("")) == []
    for read in (lambda: store.get("k", max_bytes=1), lambda: store.size("k")):
        with pytest.raises(NotFoundError, match=r"'k' in modal-.*there is no Volume 'weights'"):
            read()
    store.delete("k")
    assert server.volumes == {}
    store.put("k", b"1")
    assert server.volumes == {"weights": {"runs/k": b"1"}}
    assert server.version == 2


def test_ranges_in_a_row_are_one_read(server: ModalServer) -> None:
    store = ModalVolumeStore("weights")
    blob = np.random.default_rng(0).bytes(2 * BLOCK_BYTES + 5)
    store.put("k", blob)
    pieces = [store.get_range("k", at, 1 << 20) for at in range(0, 16 << 20, 1 << 20)]
    assert b"".join([*pieces, store.get_range("k", 16 << 20, 5)]) == blob
    assert server.calls["VolumeGetFile2"] == 1
    assert store.get_range("k", 3, 4) == blob[3:7]
    store.put("k", b"another")
    assert store.get_range("k", 0, 7) == b"another"


def test_volumes_of_version_1_work_too(server: ModalServer) -> None:
    server.volumes["old"], server.version = {}, 1
    store = ModalVolumeStore("old")
    check_create_only(store)
    store.put("a/b", iter([b"x" * 1000, b"y"]))
    assert store.get("a/b", max_bytes=1001) == b"x" * 1000 + b"y"
    assert list(store.list("")) == ["a/b"]
    store.delete("a/b")
    assert list(store.list("")) == []


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (Status.UNAUTHENTICATED, "modal token new"),
        (Status.PERMISSION_DENIED, "MODAL_ENVIRONMENT"),
        (Status.RESOURCE_EXHAUSTED, "rate limit or quota"),
        (Status.INVALID_ARGUMENT, "told to fail"),
    ],
)
def test_what_the_service_refuses_is_one_error_that_says_what_to_do(
    server: ModalServer, status: Status, says: str
) -> None:
    store = ModalVolumeStore("weights")
    store.put("k", b"old")
    for call, use in (
        ("VolumePutFiles2", lambda: store.put("k", b"new")),
        ("VolumeGetFile2", lambda: store.get("k", max_bytes=9)),
        ("VolumeListFiles2", lambda: store.size("k")),
    ):
        server.fail[call] = [status] * 20
        with pytest.raises(StoreError, match=rf"'k' in modal-volume://weights: .*{says}") as caught:
            use()
        assert SECRET not in str(caught.value)
        server.fail.clear()
    assert store.get("k", max_bytes=9) == b"old"


@pytest.mark.ci
def test_a_service_that_never_answers_is_given_up(server: ModalServer) -> None:
    ModalVolumeStore("weights").put("k", b"old")
    store = ModalVolumeStore("weights", timeout_s=2)
    assert store.size("k") == 3
    server.hang.update(["VolumePutFiles2", "VolumeGetFile2", "VolumeListFiles2"])
    for use in (
        lambda: store.put("k", b"new"),
        lambda: store.get("k", max_bytes=9),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreError, match="no answer within 2 s"):
            use()


def test_without_a_token_the_error_says_how_to_get_one(server: ModalServer, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MODAL_")}
    environment |= {
        "HOME": str(tmp_path),
        "MODAL_SERVER_URL": server.environment["MODAL_SERVER_URL"],
    }
    call = [sys.executable, "-m", "gymfast", "sync", "status", "modal-volume://w", "--run", "r"]
    ended = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "modal token new" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.ci
def test_versions_arrive_exactly_though_replies_are_lost(server: ModalServer) -> None:
    rng = np.random.default_rng(1)
    weights = {"w": rng.integers(0, 2**16, 100_000, np.uint16)}
    publisher = Publisher("modal-volume://weights/runs", "r")
    live = {"w": np.zeros(100_000, np.uint16)}
    subscriber = Subscriber("modal-volume://weights/runs", "r", LiveTarget(live))
    for version in range(4):
        weights["w"][rng.integers(0, 100_000, 1000)] += 1
        server.lose_replies.update(["VolumePutFiles2", "VolumeGetFile2"])
        assert publisher.publish(weights).version == version
        assert subscriber.pull().version == version
        assert np.array_equal(live["w"], weights["w"])
