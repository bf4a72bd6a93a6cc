"""Adapters: PEFT's files, versions of a run, and servers that keep a few of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integrations.lora_server import FakeServer, FakeSGLang, FakeVLLM

from gymfast.delta import Tensor
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.errors import (
    ChainError,
    ChannelError,
    ConflictError,
    CoverageError,
    DeadlineError,
    FormatError,
)
from gymfast.integrations.lora_adapter import CONFIG, LoraAdapter
from gymfast.integrations.lora_files import TENSORS, LoraFolder, read_adapter, write_adapter
from gymfast.integrations.lora_server import LoraServer, SGLangLora, VLLMLora
from gymfast.integrations.lora_versions import LoraVersions
from gymfast.integrations.update_request import InitRequest
from gymfast.models import Lora, ModelConfig, adapter_tensors, lora_bytes, model
from gymfast.models.config import Experts
from gymfast.sync import Publisher

TINY = ModelConfig(
    "tiny", "none", 64, 32, 3, 4, 2, 8, 96, experts=Experts(4, 16, num_shared=1, num_dense_layers=1)
)


def config_of(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        **more,
    }


def adapter_of(lora: Lora, step: int = 0, config: ModelConfig = TINY) -> LoraAdapter:
    rng = np.random.default_rng(step)
    tensors = {
        t.name: Tensor("BF16", t.shape, rng.integers(0, 256, 2 * t.num_params, np.uint8))
        for t in adapter_tensors(config, lora)
    }
    return LoraAdapter(config_of(lora.rank), tensors)


SMALL = Lora(4, targets=("attention",), leaves_out=("k_proj", "o_proj"))


@pytest.mark.parametrize("is_shared_outer", [True, False])
def test_an_exported_adapter_has_the_bytes_that_the_planner_counts(
    tmp_path: Path, is_shared_outer: bool
) -> None:
    lora = Lora(8, is_shared_outer=is_shared_outer)
    adapter = adapter_of(lora)
    path = write_adapter(adapter, tmp_path / "adapter")
    with Checkpoint.open(path / TENSORS) as file:
        stored = sum(file.spec(name).num_bytes for name in file.names)
    assert stored == adapter.num_bytes == lora_bytes(TINY, lora)
    assert adapter.is_shared_outer == is_shared_outer


@pytest.mark.parametrize(
    "name",
    [
        "Llama-3.1-8B",
        "Qwen3-30B-A3B",
        pytest.param("GLM-4.7", marks=pytest.mark.ci),
        pytest.param("Kimi-K2.6", marks=pytest.mark.ci),
    ],
)
@pytest.mark.parametrize("is_shared_outer", [True, False])
def test_names_and_shapes_of_published_models_sum_up_to_the_planners_bytes(
    name: str, is_shared_outer: bool
) -> None:
    lora = Lora(32, is_shared_outer=is_shared_outer)
    tensors = list(adapter_tensors(model(name), lora))
    assert 2 * sum(t.num_params for t in tensors) == lora_bytes(model(name), lora)
    assert len({t.name for t in tensors}) == len(tensors)


def test_factors_that_experts_share_have_a_dimension_of_one() -> None:
    shapes = {t.name: t.shape for t in adapter_tensors(TINY, Lora(8))}
    start = "base_model.model.model.layers.1.mlp.experts"
    assert shapes[f"{start}.gate_proj.lora_A.weight"] == (1, 8, 32)
    assert shapes[f"{start}.gate_proj.lora_B.weight"] == (4, 16, 8)
    assert shapes[f"{start}.down_proj.lora_A.weight"] == (4, 8, 16)
    assert shapes[f"{start}.down_proj.lora_B.weight"] == (1, 32, 8)
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == (8, 32)


def test_a_shared_adapter_becomes_one_with_factors_for_each_expert() -> None:
    shared = adapter_of(Lora(8))
    single = shared.per_expert()
    expected = {t.name: t.shape for t in adapter_tensors(TINY, Lora(8, is_shared_outer=False))}
    assert {n: t.shape for n, t in single.tensors.items()} == expected
    assert single.num_bytes == lora_bytes(TINY, Lora(8, is_shared_outer=False))
    start = "base_model.model.model.layers.2.mlp.experts"
    for side, end in (("A", "gate_proj"), ("B", "gate_proj"), ("A", "down_proj")):
        whole = shared.tensors[f"{start}.{end}.lora_{side}.weight"]
        part = np.split(whole.data, whole.shape[0])[min(3, whole.shape[0] - 1)]
        own = single.tensors[f"{start}.3.{end}.lora_{side}.weight"]
        assert np.array_equal(own.data, part)


def test_the_state_of_a_peft_model_is_exported_under_the_names_of_its_files() -> None:
    class Kind(Enum):
        LORA = "LORA"

    a, b = np.ones((4, 32), np.float32), np.zeros((16, 4), np.float32)
    start = "base_model.model.model.layers.0.self_attn.q_proj"
    state = {
        f"{start}.base_layer.weight": np.ones((16, 32), np.float32),
        "base_model.model.model.norm.weight": np.ones(32, np.float32),
        f"{start}.lora_A.policy.weight": a,
        f"{start}.lora_B.policy.weight": b,
    }
    config = config_of(4) | {"peft_type": Kind.LORA, "target_modules": {"v_proj", "q_proj"}}
    adapter = LoraAdapter.of_state(state, config, adapter="policy")
    assert set(adapter.tensors) == {f"{start}.lora_A.weight", f"{start}.lora_B.weight"}
    assert adapter.config["peft_type"] == "LORA"
    assert adapter.config["target_modules"] == ["q_proj", "v_proj"]
    with pytest.raises(CoverageError, match="without factors"):
        LoraAdapter.of_state({"model.norm.weight": a}, config)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lora_A.weight": None}, "is there without"),
        ({"lora_A.weight": (5, 32)}, "do not fit"),
        ({"lora_A.weight": (5, 32), "lora_B.weight": (16, 5)}, "has rank 5"),
        ({"weight": (16, 32)}, "is no factor"),
        ({"lora_A.weight": (2, 4, 32), "lora_B.weight": (3, 16, 4)}, "different numbers"),
    ],
)
def test_factors_that_do_not_fit_are_refused_with_their_name(
    change: dict[str, Any], text: str
) -> None:
    shapes: dict[str, Any] = {"lora_A.weight": (4, 32), "lora_B.weight": (16, 4)} | change
    tensors = {
        f"base_model.model.layers.0.q_proj.{end}": Tensor("U8", s, np.zeros(np.prod(s), np.uint8))
        for end, s in shapes.items()
        if s
    }
    with pytest.raises(CoverageError, match=text):
        LoraAdapter(config_of(4), tensors)


@pytest.mark.parametrize("change", [{"r": 0}, {"peft_type": "IA3"}, {"lora_alpha": None}])
def test_a_configuration_that_is_not_loras_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"peft_type is .* expected 'LORA'"):
        LoraAdapter(config_of(4) | change, adapter_of(SMALL).tensors)


def test_files_are_those_of_peft_and_another_adapter_never_takes_their_place(
    tmp_path: Path,
) -> None:
    adapter = adapter_of(SMALL)
    path = write_adapter(adapter, tmp_path / "a")
    assert sorted(p.name for p in path.iterdir()) == [CONFIG, TENSORS]
    assert json.loads((path / CONFIG).read_text())["r"] == 4
    found = read_adapter(path)
    assert found.weights().keys() == adapter.weights().keys()
    assert found.config == adapter.config
    assert write_adapter(adapter, path) == path
    with pytest.raises(ConflictError, match="holds another adapter"):
        write_adapter(adapter_of(SMALL, 1), path)
    assert [p.name for p in tmp_path.iterdir()] == ["a"], "nothing is left beside it"
    (path / CONFIG).write_text("[1]")
    with pytest.raises(FormatError, match="no table"):
        read_adapter(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> InitRequest:
    """A run of adapters; version 4 has another scaling, so another configuration."""
    return publish(tmp_path_factory.mktemp("store"), 8)


def publish(folder: Path, num_versions: int) -> InitRequest:
    publisher = Publisher(folder.as_uri(), "adapter", keep=num_versions, anchor_every=20)
    for version in range(num_versions):
        adapter = adapter_of(SMALL, version)
        if version == 4:
            adapter = LoraAdapter(config_of(4, lora_alpha=64), adapter.tensors)
        publisher.publish(adapter.weights())
    return InitRequest(store=folder.as_uri(), run="adapter")


@pytest.fixture
def folder(tmp_path: Path, run: InitRequest) -> Iterator[LoraFolder]:
    folder = LoraFolder(tmp_path / "adapters", "policy", run)
    yield folder
    folder.close()


@pytest.fixture(params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    server = FakeVLLM() if request.param == "vllm" else FakeSGLang()
    yield server
    server.close()


def client_of(server: FakeServer, *, unload_timeout_s: float = 20.0) -> LoraServer:
    kind = VLLMLora if isinstance(server, FakeVLLM) else SGLangLora
    return kind(server.url, timeout_s=20.0, unload_timeout_s=unload_timeout_s)


def bytes_of(version: int, tmp_path: Path) -> bytes:
    path = write_adapter(adapter_of(SMALL, version), tmp_path / f"expected-{version}")
    return (path / TENSORS).read_bytes()


def test_a_version_of_a_run_is_a_whole_adapter_with_its_configuration(folder: LoraFolder) -> None:
    for version in (0, 3, 4, 5):
        path = folder.pull(version)
        assert path.name == f"policy@v{version}"
        alpha = json.loads((path / CONFIG).read_text())["lora_alpha"]
        assert alpha == (64 if version == 4 else 8)
        expected = adapter_of(SMALL, version).tensors
        assert {n: t.tobytes() for n, t in _file(path).items()} == {
            n: t.data.tobytes() for n, t in expected.items()
        }
    assert folder.versions() == [0, 3, 4, 5]
    folder.retain("one", [3], newest=1)
    assert folder.versions() == [3, 5]
    folder.retain("two", [], newest=1)
    assert folder.versions() == [3, 5]
    folder.retain("one", [], newest=0)
    assert folder.versions() == []


def _file(path: Path) -> dict[str, Any]:
    with Checkpoint.open(path / TENSORS) as file:
        return {name: file.read(name).data for name in file.names}


def test_a_run_of_something_else_is_no_adapter(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    Publisher(store, "model").publish({"model.norm.weight": np.ones(8, np.float32)})
    folder = LoraFolder(tmp_path / "adapters", "policy", InitRequest(store=store, run="model"))
    with pytest.raises(FormatError, match=r"has none named 'adapter_config\.json'"):
        folder.pull(0)
    with pytest.raises(ValueError, match="expected letters"):
        LoraFolder(tmp_path, "../policy", InitRequest(store=store, run="model"))
    with pytest.raises(ValueError, match="comes from a run"):
        LoraFolder(tmp_path, "policy", InitRequest())


def test_a_server_that_waits_for_a_request_is_not_asked_to_load_anything(
    folder: LoraFolder,
) -> None:
    server = FakeSGLang()
    versions = LoraVersions(client_of(server, unload_timeout_s=0.3), folder, keep=3, keep_files=5)
    for version in (0, 1, 2):
        versions.serve(version)
    request = server.begin("policy@v0")
    with pytest.raises(ChannelError, match="gave no answer"):  # somebody else unloads it
        client_of(server, unload_timeout_s=0.3).unload("policy@v0")
    server.calls.clear()
    with pytest.raises(DeadlineError, match=r"abort the requests.*policy@v0 was not unloaded"):
        versions.serve(3)
    assert "/load_lora_adapter" not in server.calls
    server.end(request)
    assert LoraVersions(client_of(server), folder, keep=3, keep_files=5).serve(3).left == {}
    server.close()


@pytest.mark.parametrize("num_versions", [8, pytest.param(100, marks=pytest.mark.ci)])
def test_R95_versions_leave_two_adapters_and_never_more_than_three(
    server: FakeServer, run: InitRequest, num_versions: int, tmp_path: Path
) -> None:
    follow = run if num_versions == 8 else publish(tmp_path / "long", num_versions)
    client, folder = client_of(server), LoraFolder(tmp_path / "adapters", "policy", follow)
    versions = LoraVersions(client, folder, keep=2)
    for version in range(num_versions):
        report = versions.serve(version)
        assert report.resident == tuple(range(max(0, version - 1), version + 1))
        assert report.left == {} and report.name == f"policy@v{version}"
        request = server.begin(report.name)
        assert server.token(request) == (report.path / TENSORS).read_bytes()
        server.end(request)
        assert len(folder.versions()) <= 5
    last = num_versions - 1
    assert server.token(server.begin(f"policy@v{last}")) == bytes_of(last, tmp_path)
    assert set(client.resident()) == {f"policy@v{last - 1}", f"policy@v{last}"}
    assert 2 <= server.peak <= 3


def test_R95_an_unload_that_waits_for_a_request_is_bounded_and_reported() -> None:
    """SGLang: the rest of the story is `test_a_stuck_request_...`; here the call alone."""
    server = FakeSGLang()
    server.registry["policy@v1"] = ("one", "/nowhere")
    server.loras["one"] = object()  # type: ignore[assignment]
    request = server.begin("policy@v1")
    with pytest.raises(ChannelError, match=r"unload_lora_adapter gave no answer \(limit 0\.2 s\)"):
        client_of(server, unload_timeout_s=0.2).unload("policy@v1")
    server.end(request)
    server.close()


def test_a_stuck_request_keeps_its_adapter_and_holds_the_next_version_up_not_the_server(
    folder: LoraFolder, tmp_path: Path
) -> None:
    server = FakeSGLang()
    versions = LoraVersions(client_of(server, unload_timeout_s=0.3), folder, keep=2)
    for version in (0, 1):
        versions.serve(version)
    request = server.begin("policy@v0")
    report = versions.serve(2)
    assert list(report.left) == [0] and "gave no answer" in report.left[0]
    assert report.resident == (1, 2), "no new request gets the old one"
    with pytest.raises(DeadlineError, match=r"holds versions \[0, 1, 2\].*version 3 is not loaded"):
        versions.serve(3)
    assert server.token(request) == bytes_of(0, tmp_path)
    assert server.token(server.begin("policy@v2")) == bytes_of(2, tmp_path)
    assert server.peak == 3
    server.end(request)
    patient = LoraVersions(client_of(server), folder, keep=2)  # the trainer restarted
    report = patient.serve(3)
    assert (report.resident, report.left) == ((2, 3), {})
    assert server.peak == 3 and len(server.loras) == 2
    server.close()


def test_a_request_of_vllm_ends_on_the_adapter_that_it_began_on(
    folder: LoraFolder, tmp_path: Path
) -> None:
    server = FakeVLLM()
    versions = LoraVersions(client_of(server), folder, keep=2)
    versions.serve(0)
    request = server.begin("policy@v0")
    for version in (1, 2, 3):
        versions.serve(version)
        assert server.token(request) == bytes_of(0, tmp_path)
    assert "policy@v0" not in server.requests
    server.close()


def test_servers_that_share_a_folder_keep_each_others_files(
    folder: LoraFolder, tmp_path: Path
) -> None:
    quick, slow = FakeVLLM(), FakeVLLM()
    fleet = [LoraVersions(client_of(server), folder) for server in (quick, slow)]
    for versions in fleet:
        versions.serve(0)
    for version in range(1, 8):
        fleet[0].serve(version)
    assert folder.versions() == [0, 4, 5, 6, 7]
    slow.cache.clear()  # under pressure: it reads the files again
    assert slow.token(slow.begin("policy@v0")) == bytes_of(0, tmp_path)
    assert fleet[1].serve(7).resident == (0, 7)
    for server in (quick, slow):
        server.close()


def test_same_name_replaces_the_weights_of_running_requests_and_only_vllm_can(
    folder: LoraFolder, tmp_path: Path
) -> None:
    server = FakeVLLM()
    versions = LoraVersions(client_of(server), folder, same_name=True)
    assert versions.serve(0).name == "policy"
    request = server.begin("policy")
    for version in (1, 2, 3, 4, 5):
        report = versions.serve(version)
        assert report.path.name == f"policy@v{version}", "a new path: vLLM's cache is keyed by it"
        assert server.token((request[0], str(report.path))) == bytes_of(version, tmp_path)
    assert server.peak == 1 and len(folder.versions()) == 4
    server.close()
    other = FakeSGLang()
    with pytest.raises(ValueError, match="cannot load an adapter again under the same name"):
        LoraVersions(client_of(other), folder, same_name=True)
    with pytest.raises(ValueError, match="give each version its own"):
        client_of(other).load("policy", "/nowhere", replaces=True)
    other.close()


def test_a_version_that_the_server_refuses_leaves_the_old_one(
    server: FakeServer, folder: LoraFolder
) -> None:
    versions = LoraVersions(client_of(server), folder)
    versions.serve(0)
    server.max_rank = 2
    with pytest.raises(ChainError, match=r"rank 4"):
        versions.serve(1)
    assert set(client_of(server).resident()) == {"policy@v0"}
    server.max_rank = 64
    assert versions.serve(1).resident == (0, 1)


def test_an_answer_that_is_lost_is_read_back(server: FakeServer, folder: LoraFolder) -> None:
    load = "/v1/load_lora_adapter" if isinstance(server, FakeVLLM) else "/load_lora_adapter"
    versions = LoraVersions(client_of(server), folder)
    server.lose_answer_of = load
    assert versions.serve(0).resident == (0,)
    assert server.calls.count(load) == 1
    unload = load.replace("load_", "unload_")
    versions.serve(1)
    server.lose_answer_of = unload
    assert list(versions.serve(2).left) == [0]
    report = versions.serve(3)
    assert (report.resident, report.left) == ((2, 3), {})
    assert server.peak == 3


def test_either_side_may_restart(folder: LoraFolder) -> None:
    first = FakeSGLang()
    versions = LoraVersions(client_of(first), folder)
    for version in range(3):
        versions.serve(version)
    again = LoraVersions(client_of(first), folder)  # a new trainer
    assert again.serve(2).resident == (1, 2)
    assert again.serve(3).resident == (2, 3)
    first.close()
    second = FakeSGLang()  # a new engine
    assert LoraVersions(client_of(second), folder).serve(3).resident == (3,)
    second.close()


def test_an_adapter_of_somebody_else_is_left_alone(server: FakeServer, folder: LoraFolder) -> None:
    client = client_of(server)
    other = write_adapter(adapter_of(SMALL, 7), folder.path.parent / "other")
    for name in ("other", "policy@v1@v2", "policy@vx"):
        client.load(name, str(other))
    if isinstance(server, FakeVLLM):
        server.max_cpu_loras = 8
    versions = LoraVersions(client, folder)
    for version in range(4):
        versions.serve(version)
    assert set(client.resident()) == {
        *("other", "policy@v1@v2", "policy@vx"),
        *("policy@v2", "policy@v3"),
    }
    client.load("policy@v4", str(other))
    with pytest.raises(ConflictError, match="somebody else uses that name"):
        versions.serve(4)


def test_a_server_without_the_calls_says_what_it_needs(
    server: FakeServer, folder: LoraFolder
) -> None:
    is_vllm = isinstance(server, FakeVLLM)
    load = "/v1/load_lora_adapter" if is_vllm else "/load_lora_adapter"
    server.answers[load] = (404, {"detail": "Not Found"})
    needs = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" if is_vllm else "--enable-lora"
    with pytest.raises(ChainError, match=needs):
        LoraVersions(client_of(server), folder).serve(0)
    server.answers[load] = (502, "bad gateway")
    with pytest.raises(ChannelError, match="may be done or not"):
        LoraVersions(client_of(server), folder).serve(0)
    server.answers["/v1/models"] = (200, {"models": []})
    with pytest.raises(ChannelError, match="no list of models"):
        client_of(server).resident()


def test_vllm_reads_the_factors_of_each_expert_and_refuses_shared_ones(tmp_path: Path) -> None:
    server = FakeVLLM()
    client, shared = client_of(server), adapter_of(Lora(8))
    with pytest.raises(ChainError, match="received experts"):
        client.load("moe@v0", str(write_adapter(shared, tmp_path / "shared")))
    client.load("moe@v1", str(write_adapter(shared.per_expert(), tmp_path / "single")))
    assert set(client.resident()) == {"moe@v1"}
    server.close()


def test_settings_that_cannot_be_are_refused(folder: LoraFolder, server: FakeServer) -> None:
    for settings in ({"keep": 0}, {"keep": 4, "keep_files": 4}):
        with pytest.raises(ValueError, match="keep is"):
            LoraVersions(client_of(server), folder, **settings)


def test_an_adapter_that_changes_everywhere_is_published_whole_and_a_few_bytes_as_a_delta(
    tmp_path: Path,
) -> None:
    publisher = Publisher(tmp_path.as_uri(), "adapter")
    adapters = [adapter_of(SMALL, step) for step in range(3)]
    kinds = [publisher.publish(adapter.weights()).kind for adapter in adapters]
    assert kinds == ["anchor", "anchor", "anchor"]
    name, tensor = next(iter(adapters[2].tensors.items()))
    few = tensor.copy()
    few.data[:8] ^= 1
    nearly = LoraAdapter(adapters[2].config, dict(adapters[2].tensors) | {name: few})
    assert publisher.publish(nearly.weights()).kind == "delta"
