"""The distributed path: pieces of frames over a process group, through a hook in SGLang."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.sglang_process import Server
from integrations.sglang_real import COMMON, UPDATER, definitions_of_common, path_of
from integrations.sglang_stand_in import (
    Scheduler,
    SchedulerWeightUpdaterManager,
    WeightUpdater,
    install_sglang,
)
from integrations.sglang_toy import checkpoint, model_of, step

from gymfast.delta import encode
from gymfast.errors import ChannelError, GymfastError
from gymfast.integrations.admission import Admission
from gymfast.integrations.sglang_client import SGLangClient
from gymfast.integrations.sglang_messages import LOADER, Piece, named_tensors
from gymfast.integrations.sglang_plugin import (
    RUN_SERVER,
    SERVER,
    add_admission,
    begin_awake,
    load_received,
    register,
)
from gymfast.integrations.sglang_session import Group


class Updater:
    def __init__(self, loaders: list[str]) -> None:
        self.custom_weight_loaders = loaders
        self.given: list[Any] = []

    def update_weights_from_tensor(self, named: Any, load_format: str) -> tuple[bool, str]:
        self.given.append((named, load_format))
        return True, "Success"


def original(updater: Updater, named: Any) -> tuple[bool, str]:
    return True, f"loaded {[name for name, _ in named]}"


def test_weights_go_where_they_always_went() -> None:
    updater = Updater([LOADER])
    assert load_received(original, updater, [("w", torch.ones(2))]) == (True, "loaded ['w']")
    assert updater.given == []


def test_messages_go_to_the_loader_and_only_where_the_flag_is_set() -> None:
    named = named_tensors("id", Piece(0), b"bytes")
    with_flag, without = Updater([LOADER]), Updater([])
    assert load_received(original, with_flag, named) == (True, "Success")
    assert with_flag.given == [(named, LOADER)]
    success, text = load_received(original, without, named)
    assert not success
    assert "--custom-weight-loader" in text
    assert without.given == []


@pytest.mark.parametrize(
    ("loaders", "released", "is_refused"),
    [
        ([LOADER], {"weights"}, True),
        ([LOADER], {"kv_cache"}, False),
        ([LOADER], set(), False),
        ([], {"weights"}, False),  # no server of ours: what it does is its own affair
    ],
)
def test_an_update_is_not_begun_where_our_loader_would_write_to_released_memory(
    monkeypatch: pytest.MonkeyPatch, loaders: list[str], released: set[str], is_refused: bool
) -> None:
    for name, module in install_sglang().items():
        monkeypatch.setitem(sys.modules, name, module)
    manager = SchedulerWeightUpdaterManager(WeightUpdater(None, loaders), Scheduler())
    manager.offload_tags = released
    output = begin_awake(type(manager).begin_weight_update, manager, SimpleNamespace())
    assert output.success != is_refused
    assert manager.is_open != is_refused
    assert ("POST /resume_memory_occupation" in output.message) == is_refused


def test_sglang_finds_the_hook() -> None:
    (found,) = entry_points(group="sglang.srt.plugins", name="gymfast")
    assert found.load() is register


class Registry:
    """Takes hooks as the class of SGLang does."""

    targets: list[str] = []

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: Any) -> None:
        cls.targets.append(target)


class App:
    """What SGLang's application is asked."""

    def __init__(self) -> None:
        self.middleware: list[type] = []

    def add_middleware(self, kind: type) -> None:
        self.middleware.append(kind)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> App:
    """The application of an SGLang whose other modules are stubs."""
    app, kinds = App(), SimpleNamespace(AROUND=1, BEFORE=2)
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.entrypoints"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    hooks = SimpleNamespace(HookRegistry=Registry, HookType=kinds)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    monkeypatch.setitem(sys.modules, SERVER, SimpleNamespace(app=app))
    monkeypatch.setattr(Registry, "targets", [])
    return app


@pytest.mark.parametrize(
    ("setting", "is_child", "has_server", "admits"),
    [
        ("1", False, False, True),
        ("1", True, True, True),  # slime and miles run the server in a child
        ("1", True, False, False),  # a scheduler
        ("0", False, True, False),
        ("", True, True, False),
    ],
)
def test_admission_is_for_the_process_of_the_server_and_where_it_is_asked_for(
    app: App,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    is_child: bool,
    has_server: bool,
    admits: bool,
) -> None:
    monkeypatch.setenv("GYMFAST_ADMISSION", setting)
    parent = object() if is_child else None
    monkeypatch.setattr("multiprocessing.parent_process", lambda: parent)
    if not has_server:
        monkeypatch.delitem(sys.modules, SERVER)
    register()
    assert (RUN_SERVER in Registry.targets) is admits
    assert len(Registry.targets) == 2 + admits


def test_admission_stands_before_the_server(app: App) -> None:
    add_admission(SimpleNamespace(tokenizer_worker_num=1), "tokenizer", port_args=None)
    add_admission(server_args=SimpleNamespace(tokenizer_worker_num=1))
    assert app.middleware == [Admission, Admission]
    with pytest.raises(GymfastError, match="needs --tokenizer-worker-num 1, found 2"):
        add_admission(SimpleNamespace(tokenizer_worker_num=2))


@pytest.fixture
def server(sglang_source: Path) -> Iterator[Server]:
    server = Server(sglang_source)
    yield server.reset()
    server.close()


@pytest.fixture
def group(server: Server, sglang_source: Path) -> Iterator[Group]:
    """The test is rank 0, the engine rank 1, as a trainer and an engine make it."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    common = definitions_of_common(path_of(sglang_source, COMMON))
    shared = {"world_size": 2, "group_name": "update", "backend": "gloo"}
    engine = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(server.http.require, "/init_weights_update_group", shared | engine)
        made = common["init_custom_process_group"](
            init_method=f"tcp://127.0.0.1:{port}", rank=0, **shared
        )
        joined.result()
    yield Group("update", made)
    torch.distributed.destroy_process_group(made)


@pytest.mark.ci
def test_frames_are_broadcast_to_the_real_updater(server: Server, group: Group) -> None:
    client, weights = SGLangClient(server.url, piece_bytes=5000), checkpoint(0)
    client.broadcast(encode(None, weights), group, weight_version="0")
    for version in range(1, 4):
        new = step(weights, version)
        client.broadcast(encode(weights, new), group, weight_version=str(version))
        weights = new
    seen = server.seen()
    assert seen["updater"] == UPDATER
    parameters = model_of(weights).named_parameters()
    assert seen["weights"] == {n: v.view(torch.int16).tolist() for n, v in parameters}
    assert seen["calls"].count("/update_weights_from_distributed") > 4
    assert [call for call in seen["calls"] if "flush" in call][-1].endswith(":3:flush")
    assert server.weight_version == "3"


@pytest.mark.ci
def test_a_group_that_the_engine_did_not_join_is_named(server: Server, group: Group) -> None:
    stranger = SimpleNamespace(name="another", process_group=group.process_group)
    with pytest.raises(ChannelError, match=r"answered 400: .*another"):
        SGLangClient(server.url).broadcast(
            encode(None, checkpoint(0)), stranger, weight_version="0"
        )
