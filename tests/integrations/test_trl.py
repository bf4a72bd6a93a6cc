"""TRL's trainers against servers with our real engine.

Where TRL is installed its own trainers run, else a stand-in with their signatures.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from integrations import trl_real, trl_stand_in
from integrations.vllm_process import Server
from integrations.vllm_server import digests

from gymfast.delta import as_tensor
from gymfast.errors import ChainError, ChannelError, CoverageError, DeadlineError, GymfastError
from gymfast.integrations import trl as adapter
from gymfast.integrations.trl import WeightTransfer
from gymfast.sync import LiveTarget, Publisher, Subscriber

IS_REAL = importlib.util.find_spec("trl") is not None
TRL: Any = trl_real if IS_REAL else trl_stand_in
FOLLOW, PAUSE = "/init_weight_transfer_engine", "/pause?mode=keep"
UPDATE = ["/start_weight_update", "/update_weights"]
RESET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
DONE = [RESET, "/finish_weight_update", "/resume"]
SYNC = [FOLLOW, PAUSE, *UPDATE, *DONE]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return TRL.make_model(tmp_path_factory.mktemp("model"), torch.bfloat16)


@pytest.fixture(scope="module")
def servers(model: Any) -> Iterator[list[Server]]:
    started = [Server(TRL.shapes_of(model)) for _ in range(2)]
    yield started
    for server in started:
        server.kill()


@pytest.fixture
def urls(servers: list[Server]) -> list[str]:
    for server in servers:
        server.seen()
    return [server.url for server in servers]


@pytest.fixture
def store(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


def change(model: torch.nn.Module, count: int) -> None:
    """Step 2 changes nothing, any other a few elements of each second tensor."""
    if count != 2:
        for parameter in list(model.parameters())[count % 2 :: 2]:
            parameter.view(-1)[count::7] += 0.5


def weights_of(trainer: Any) -> dict[str, str]:
    """Of float32, which is what the model of the server has."""
    return digests((name, p.float()) for name, p in trainer.model.named_parameters())


def test_after_each_sync_all_servers_hold_what_was_trained(
    model: Any, servers: list[Server], urls: list[str], store: str
) -> None:
    transfer = WeightTransfer(store, "run", urls)
    synced = []

    def observe(version: int) -> None:
        synced.append(version)
        for server in servers:
            seen = server.seen()
            assert seen["weights"] == weights_of(trainer)
            assert seen["calls"] == ([FOLLOW] if version == 1 else []) + SYNC
            assert (seen["version"], seen["is_paused"]) == (str(version - 1), False)

    trainer = TRL.async_grpo(model, transfer, change, 4, observe)
    trainer.train()
    assert synced == [1, 2, 3, 4, 5]
    assert Publisher(store, "run").version == 4


def test_R26_a_server_that_dies_is_named_and_the_others_go_on(
    model: Any, servers: list[Server], urls: list[str], store: str
) -> None:
    def step(model: torch.nn.Module, count: int) -> None:
        change(model, count)
        if count == 3:
            servers[1].kill()

    synced: list[int] = []
    transfer = WeightTransfer(store, "run", urls)
    trainer = TRL.async_grpo(model, transfer, step, 4, synced.append)
    text = f"1 of 2 servers did not take version 3 of run 'run': {urls[1]}\\S+ gave no answer"
    with pytest.raises(ChainError, match=text):
        trainer.train()
    assert synced == [1, 2, 3]  # TRL's own count does not move either
    seen = servers[0].seen()
    assert (seen["weights"], seen["version"]) == (weights_of(trainer), "3")
    assert not seen["is_paused"]
    servers[1].restart()
    transfer.send_weights(trainer.model.named_parameters())  # destroyed; it opens the run again
    for server in servers:
        seen = server.seen()
        assert (seen["weights"], seen["version"]) == (weights_of(trainer), "4")


def test_a_flagged_server_stays_paused_until_it_was_updated(
    model: Any, servers: list[Server], urls: list[str], store: str
) -> None:
    transfer = WeightTransfer(store, "run", urls)

    def step(model: torch.nn.Module, count: int) -> None:
        change(model, count)
        servers[0].seen(fails_at=len(servers[0].seen()["loads"]) + 1)

    trainer = TRL.async_grpo(model, transfer, step, 1, lambda version: None)
    with pytest.raises(ChainError, match=f"{urls[0]} is flagged and stays paused: .*injected"):
        trainer.train()
    assert [server.seen()["is_paused"] for server in servers] == [True, False]
    transfer.send_weights(trainer.model.named_parameters())
    for server in servers:
        seen = server.seen()
        assert (seen["weights"], seen["is_paused"]) == (weights_of(trainer), False)


def test_R04_R05_all_that_changed_since_the_last_sync_arrives(
    model: Any, servers: list[Server], urls: list[str], store: str
) -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=rng) for n, s in TRL.shapes_of(model).items()}
    transfer = WeightTransfer(store, "run", urls)
    transfer.send_weights(tensors.items())
    for count in range(3):  # steps that touch other elements each
        for tensor in tensors.values():
            tensor.view(-1)[count::5] += 1.0
    for tensor in tensors.values():
        tensor.clamp_(-1.5, 1.5)  # by hand, not by an optimizer
    transfer.send_weights(tensors.items())
    for server in servers:
        assert server.seen()["weights"] == digests(tensors.items())


def test_R79_the_words_of_the_server_reach_the_trainer(urls: list[str], store: str) -> None:
    transfer = WeightTransfer(store, "run", urls)
    transfer.init_weight_transfer()
    with pytest.raises(ChainError, match=f"{urls[0]} is flagged .*`other`.*; {urls[1]} is flagged"):
        transfer.send_weights([("other", torch.ones(4))])


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        ("404", "answered 404: .*needs VLLM_SERVER_DEV_MODE=1 in its environment and --weight-tr"),
        (
            "Weight transfer not configured.",
            'answered 500: .*not configured.*needs --weight-transfer-config .*"gym',
        ),
    ],
)
def test_a_server_that_cannot_follow_a_run_says_what_it_needs(
    servers: list[Server], urls: list[str], store: str, failure: str, text: str
) -> None:
    servers[1].seen(failures={FOLLOW: failure})
    with pytest.raises(ChannelError, match=f"{urls[1]}{FOLLOW} {text}"):
        WeightTransfer(store, "run", urls).init_weight_transfer()
    assert servers[1].seen()["calls"] == [FOLLOW]


def test_a_server_that_is_not_there_is_named(store: str) -> None:
    transfer = WeightTransfer(store, "run", ["http://127.0.0.1:9"], ready_timeout_s=0)
    with pytest.raises(DeadlineError, match=r"http://127.0.0.1:9 is not ready after 0 s"):
        transfer.init_weight_transfer()


@pytest.mark.parametrize("url", ["http://0.0.0.0:8000", "http://[::]:8000"])
def test_R89_a_wildcard_is_no_address_of_a_server(url: str) -> None:
    with pytest.raises(ValueError, match="an address to listen on and not one to connect to"):
        WeightTransfer("file:///runs", "run", [url])


@pytest.mark.parametrize(
    ("store", "servers", "dtype", "text"),
    [
        ("memory:here", ["http://one:1"], None, "store is 'memory:here', which no engine can see"),
        ("file:///runs", [], None, "servers is empty"),
        ("file:///runs", ["one:1"], None, "url is 'one:1', expected http"),
        ("file:///runs", ["http://one:1"], "int8", "dtype is 'int8', expected a floating point"),
    ],
)
def test_settings_that_no_server_can_use_are_refused(
    store: str, servers: list[str], dtype: str | None, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        WeightTransfer(store, "run", servers, dtype=dtype)


def test_the_stream_is_read_to_its_end_whatever_fails(
    servers: list[Server], urls: list[str], store: str
) -> None:
    read = []

    def stream(bad: Any) -> Iterator[tuple[str, Any]]:
        for name, value in (("a", bad), ("b", torch.ones(4)), ("c", torch.ones(4))):
            read.append(name)
            yield name, value

    transfer = WeightTransfer(store, "run", urls, dtype="bfloat16")
    with pytest.raises(AttributeError):
        transfer.send_weights(stream("text"))
    assert read == ["a", "b", "c"]
    blocked = WeightTransfer("file:///proc/none", "run", urls)
    with pytest.raises(GymfastError):
        blocked.send_weights(stream(torch.ones(4)))
    assert read == ["a", "b", "c"] * 2
    assert [server.seen()["calls"] for server in servers] == [[], []]


def test_a_version_without_a_tensor_reaches_no_server(
    model: Any, servers: list[Server], urls: list[str], store: str
) -> None:
    transfer = WeightTransfer(store, "run", urls)
    shapes = TRL.shapes_of(model)
    tensors = [(name, torch.ones(shape)) for name, shape in shapes.items()]
    transfer.send_weights(tensors)
    for server in servers:
        server.seen()
    with pytest.raises(CoverageError, match=f"1 of {len(shapes)} tensors did not come"):
        transfer.send_weights(tensors[1:])
    assert [server.seen()["calls"] for server in servers] == [[], []]


def test_tensors_are_published_as_the_dtype_that_is_asked_for(
    urls: list[str], servers: list[Server], model: Any, store: str
) -> None:
    transfer = WeightTransfer(store, "run", urls, dtype="bfloat16")
    rng = torch.Generator().manual_seed(0)
    tensors = [(n, torch.rand(s, generator=rng)) for n, s in TRL.shapes_of(model).items()]
    transfer.send_weights(tensors)
    rounded = {name: tensor.bfloat16() for name, tensor in tensors}
    assert servers[1].seen()["weights"] == digests((n, t.float()) for n, t in rounded.items())
    replica: dict[str, Any] = {}
    Subscriber(store, "run", LiveTarget(replica)).pull()
    assert {as_tensor(value).dtype for value in replica.values()} == {"BF16"}


@pytest.mark.parametrize("name", adapter._TRAINERS)
def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class WithVersion(trl_stand_in.WeightTransferProtocol):
        def send_weights(self, iterator, version) -> None: ...

    class WithMethod(trl_stand_in.WeightTransferProtocol):
        def commit(self) -> None: ...

    module: Any = importlib.import_module(name) if IS_REAL else trl_stand_in
    monkeypatch.setitem(sys.modules, name, module)
    adapter.check_api()
    monkeypatch.setattr(module, "WeightTransferProtocol", WithVersion)
    with pytest.raises(GymfastError, match=r"send_weights takes \('iterator', 'version'\)"):
        adapter.check_api()
    monkeypatch.setattr(module, "WeightTransferProtocol", WithMethod)
    with pytest.raises(GymfastError, match=r"of trl.\S+ has the new methods \['commit'\]"):
        adapter.check_api()


@pytest.fixture
def generation(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], Any]:
    """Makes a VLLMGeneration; what install replaces comes back after the test."""
    if IS_REAL:
        from trl.generation import vllm_generation as module
    else:
        module = trl_stand_in
        for name in ("trl", "trl.generation"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "trl.generation.vllm_generation", module)
    monkeypatch.setattr(module, "VLLMClient", module.VLLMClient)
    return TRL.generation


def test_trainers_with_a_server_publish_to_a_run(
    model: Any,
    servers: list[Server],
    urls: list[str],
    store: str,
    generation: Callable[[Any, str], Any],
) -> None:
    adapter.install(store, "run")
    adapter.install(store, "run")  # once is enough
    made = generation(model, urls[0])
    made.sync_weights()
    made.sync_weights()
    seen = servers[0].seen()
    assert seen["version"] == "1" and not seen["is_paused"]
    calls = [FOLLOW, "/pause?mode=wait", *UPDATE, *DONE]
    own = ["/reset_prefix_cache"] if IS_REAL else []
    assert seen["calls"] == [FOLLOW, *calls, *own, *calls, *own]
    if IS_REAL:
        assert seen["weights"] == weights_of(made)
    with pytest.raises(GymfastError, match="'a' alone is no version of a run"):
        made.vllm_client.update_named_param("a", torch.ones(1))
    made.vllm_client.close_communicator()


def test_R89_the_wildcard_that_is_the_default_of_trl_is_refused(
    model: Any, store: str, generation: Callable[[Any, str], Any]
) -> None:
    adapter.install(store, "run")
    client = sys.modules["trl.generation.vllm_generation"].VLLMClient
    made = client.__new__(client)
    made.base_url = "http://0.0.0.0:8000"
    with pytest.raises(ValueError, match=r"url is 'http://0.0.0.0:8000', an address to listen on"):
        made.init_communicator()


def test_a_client_with_other_methods_is_refused(
    monkeypatch: pytest.MonkeyPatch, store: str, generation: Callable[[Any, str], Any]
) -> None:
    class Client:
        def init_communicator(self, device=0): ...

        def update_named_param(self, name, weights): ...

    module = sys.modules["trl.generation.vllm_generation"]
    monkeypatch.setattr(module, "VLLMClient", Client)
    with pytest.raises(GymfastError, match=r"there is no \S+Client.update_named_params"):
        adapter.install(store, "run")
    assert module.VLLMClient is Client
