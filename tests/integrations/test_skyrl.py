"""The adapter for SkyRL: its own strategy and worker code where there is a checkout, or a stand-in.

The engines are ours for vLLM, around a stand-in of vLLM.
"""

from __future__ import annotations

import ast
import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from integrations import skyrl_stand_in as skyrl
from integrations import vllm_stand_in
from integrations.vllm_stand_in import Model, checkpoint

from gymfast.errors import ChainError, GymfastError, StoreError
from gymfast.integrations import skyrl as adapter
from gymfast.integrations.ranks import torch_ranks
from gymfast.integrations.vllm import GymfastEngine
from gymfast.sync import LiveTarget, Subscriber

Q, K = "layers.1.q_proj.weight", "layers.1.k_proj.weight"
NUM_RANKS = 2
_here = threading.local()


class Server:
    """A vLLM server of one worker, as vLLM 0.26 and SkyRL's worker extension drive our engine."""

    def __init__(self, sky: SimpleNamespace) -> None:
        self.model = Model()
        arguments = vllm_stand_in.engine_arguments(vllm_stand_in.Engine32, self.model)
        self.engine = GymfastEngine(*arguments)
        self.worker = type("Worker", (sky.LayerwiseReloadWorkerMixin,), {})()
        self.worker._weight_update_active = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self.worker._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.engine.update_weights(update_info)
        except BaseException:
            self.worker._weight_update_active = False
            self.engine.reset_weight_update_target()
            raise

    def init(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))


class RemoteInferenceClient:
    """SkyRL's client of all servers: its calls, in the order in which they came."""

    def __init__(self, servers: list[Server]) -> None:
        self.servers, self.calls = servers, []
        self.is_paused = False

    async def _all(self, call: str, method: Callable[[Server], object]) -> None:
        self.calls.append(call)
        await asyncio.gather(*(asyncio.to_thread(method, server) for server in self.servers))

    async def init_weight_update_communicator(self, init_info):
        payloads = [
            x.to_api_payload() for x in init_info.for_servers(1, len(self.servers), dp_size=1)
        ]
        await self._all("init", lambda s: s.init(payloads[self.servers.index(s)]))

    async def pause_generation(self, clear_cache=False):
        self.calls.append("pause")
        self.is_paused = True

    async def start_weight_update(self, is_checkpoint_format=True):
        await self._all("start", lambda s: s.worker.skyrl_start_weight_update(is_checkpoint_format))

    async def update_named_weights(self, update_info):
        await self._all(f"update {update_info}", lambda s: s.update_weights(update_info))

    async def finish_weight_update(self):
        await self._all("finish", lambda s: s.worker.skyrl_finish_weight_update())

    async def reset_prefix_cache(self, reset_running_requests=False):
        assert reset_running_requests, "a frozen request would go on with old keys and values"
        self.calls.append("reset")

    async def resume_generation(self):
        self.calls.append("resume")
        self.is_paused = False


class Job:
    """Two trainer ranks and two servers."""

    def __init__(self, sky: SimpleNamespace, folder: Path) -> None:
        adapter.install()
        self.sky, self.folder, self.weights = sky, folder, checkpoint()
        self.client = RemoteInferenceClient([Server(sky), Server(sky)])
        self.num_read = [0] * NUM_RANKS
        self.bad_name = ""
        self.senders = self._senders()

    def config(self, **changes: object) -> SimpleNamespace:
        settings = {
            "delta_weight_sync": SimpleNamespace(sync_dir=f"{self.folder}/run"),
            "engine_init_kwargs": {"weight_transfer_config": {"backend": "gymfast"}},
            "run_engines_locally": True,
        }
        return SimpleNamespace(**{**settings, **changes})

    def _senders(self) -> list[Any]:
        """What SkyRL's worker does in init_weight_sync_state, on each rank."""
        strategy = self.sky.get_transfer_strategy_cls(
            weight_sync_backend="delta", colocate_all=False
        )
        senders = []
        for _ in range(NUM_RANKS):
            init_info = strategy.create_init_info(
                self.config(), inference_world_size=2, base_model_path="model"
            )
            senders.append(
                strategy.create_sender(init_info=init_info, inference_client=self.client)
            )
        asyncio.run(self.client.init_weight_update_communicator(init_info))
        return senders

    def _chunks(self, rank: int) -> Iterator[Any]:
        items = list(self.weights.items())
        for start in range(0, len(items), 3):
            names, tensors = zip(*items[start : start + 3], strict=True)
            self.num_read[rank] += len(names)
            values = [
                "text" if n == self.bad_name else t for n, t in zip(names, tensors, strict=True)
            ]
            dtypes = [str(t.dtype) for t in tensors]
            yield self.sky.WeightChunk(
                list(names), dtypes, [list(t.shape) for t in tensors], values
            )

    def sync_all(self, *names: str, reset: bool = True) -> list[BaseException | None]:
        """A weight sync on all ranks; the error of each."""
        for name in names:
            self.weights[name].view(-1)[::5] += 1.0
        self.client.calls.clear()
        for server in self.client.servers:
            server.model.calls.clear()

        def run(rank: int) -> None:
            _here.rank = rank
            sender = self.senders[rank]
            chunks = self._chunks(rank)
            asyncio.run(sender.send_chunks(chunks, weight_metadata={}, reset_prefix_cache=reset))

        with ThreadPoolExecutor(NUM_RANKS) as threads:
            calls = [threads.submit(run, rank) for rank in range(NUM_RANKS)]
        return [call.exception() for call in calls]

    def sync(self, *names: str, reset: bool = True) -> None:
        for error in self.sync_all(*names, reset=reset):
            if error is not None:
                raise error

    def is_live(self) -> bool:
        """Whether every server holds exactly what the trainer has, and generates."""
        fresh = Model()
        fresh.load_weights(self.weights.items())
        expected = list(fresh.parameters())
        return not self.client.is_paused and all(
            torch.equal(live, wanted)
            for server in self.client.servers
            for live, wanted in zip(server.model.parameters(), expected, strict=True)
        )

    @property
    def version(self) -> int | None:
        return Subscriber(self.folder.as_uri(), "run", LiveTarget({})).poll()


@pytest.fixture(params=["stand-in", "real"])
def sky(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    source = os.environ.get("GYMFAST_SKYRL_SOURCE")
    if request.param == "real" and not source:
        pytest.skip("needs GYMFAST_SKYRL_SOURCE")
    vllm_stand_in.install(monkeypatch, vllm_stand_in.Engine32, "0.26.0")
    return skyrl.install(monkeypatch, Path(source) if request.param == "real" and source else None)


@pytest.fixture
def job(sky: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Ranks are threads: what they tell each other goes through a barrier."""
    barrier = threading.Barrier(NUM_RANKS, timeout=30)
    box: list[Any] = [None] * NUM_RANKS

    def all_gather_object(values: list[Any], value: Any) -> None:
        box[_here.rank] = value
        barrier.wait()
        values[:] = box
        barrier.wait()

    dist = torch.distributed
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: _here.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: NUM_RANKS)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    return Job(sky, tmp_path / "store")


def test_every_engine_follows_the_trainer(job: Job) -> None:
    for number, names in enumerate([(), (Q,), (K, "layers.0.decay.A_log"), ("embed.weight",)]):
        job.sync(*names)
        session = ["start", f"update {{'version': {number}}}", "finish"]
        assert job.client.calls == ["init", "pause", *session, "reset", "resume"]
        assert job.is_live()
    assert job.version == 3
    assert job.num_read == [4 * len(job.weights)] * NUM_RANKS


def test_engines_bug_33_what_is_fused_with_a_changed_tensor_is_loaded_with_it(job: Job) -> None:
    job.sync()
    job.sync(Q)
    layer = {name for name in job.weights if name.startswith("layers.1.")}
    assert [set().union(*s.model.calls) for s in job.client.servers] == [layer] * 2
    assert job.is_live()


def test_a_step_with_nothing_changed_is_a_version_and_loads_nothing(job: Job) -> None:
    job.sync()
    job.sync()
    assert [server.model.calls for server in job.client.servers] == [[], []]
    assert job.version == 1


def test_the_prefix_cache_is_reset_exactly_if_skyrl_asks_for_it(job: Job) -> None:
    job.sync(reset=False)
    assert "reset" not in job.client.calls
    assert job.client.calls[-1] == "resume"
    assert all(sender.handles_prefix_cache_reset for sender in job.senders)


def test_an_engine_that_starts_again_takes_everything(job: Job) -> None:
    job.sync()
    job.sync(Q)
    job.client.servers[1] = Server(job.sky)
    job.sync(K)
    assert job.is_live()


def test_versions_go_on_after_a_restart_of_the_trainer(job: Job) -> None:
    job.sync()
    job.sync(Q)
    job.senders = job._senders()
    job.sync(K)
    assert job.is_live()
    assert job.version == 2
    job.senders[0].teardown()
    job.sync(Q)
    assert job.version == 3


def test_an_engine_that_fails_is_an_error_on_all_ranks_and_the_next_sync_repairs_it(
    job: Job,
) -> None:
    job.sync()
    broken = job.client.servers[1].model
    broken.fails_at = 1
    first, second = job.sync_all(Q)
    assert isinstance(first, ChainError)
    assert "version 1 is published, but not every engine took it: " in str(first)
    assert "injected" in str(first)
    assert isinstance(second, GymfastError)
    assert str(second).startswith("updating the engines failed on rank 0: ChainError: version 1")
    assert job.client.is_paused
    broken.fails_at = 0
    job.sync(K)
    assert job.is_live()
    assert job.version == 2


def test_an_engine_that_cannot_follow_the_run_leaves_generation_as_it_is(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.sync()
    with monkeypatch.context() as patch:

        async def refuse(self, init_info):
            raise ConnectionError("no such route")

        patch.setattr(RemoteInferenceClient, "init_weight_update_communicator", refuse)
        first, _ = job.sync_all(Q)
    assert "no such route; generation is as it was" in str(first)
    assert not job.client.is_paused


def test_an_engine_that_does_not_answer_leaves_generation_paused(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.sync()

    async def away(self, update_info):
        raise ConnectionError("server is away")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteInferenceClient, "update_named_weights", away)
        patch.setattr(RemoteInferenceClient, "finish_weight_update", _away)
        first, second = job.sync_all(Q)
    assert "server is away; generation stays paused" in str(first)
    assert second is not None
    assert job.client.is_paused


async def _away(self: RemoteInferenceClient) -> None:
    for server in self.servers:  # what a server does once it is back
        server.worker.skyrl_finish_weight_update()
    raise ConnectionError("server is away")


def test_a_trainer_that_fails_commits_nothing_and_leaves_the_engines_alone(job: Job) -> None:
    job.sync()
    job.bad_name = K
    first, second = job.sync_all(Q)
    assert isinstance(first, TypeError)
    assert "publishing the weights failed on rank 0: TypeError" in str(second)
    assert job.client.calls == []
    assert job.num_read == [2 * len(job.weights)] * NUM_RANKS
    job.bad_name = ""
    job.sync()
    assert job.is_live()
    assert job.version == 1


def test_a_store_that_fails_is_an_error_on_all_ranks(job: Job) -> None:
    job.folder.write_text("no folder")
    first, second = job.sync_all()
    assert isinstance(first, StoreError)
    assert "failed on rank 0" in str(second)
    assert job.num_read == [len(job.weights)] * NUM_RANKS


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"delta_weight_sync": None}, ValueError, "sync_dir is '', expected FOLDER/RUN"),
        (
            {"delta_weight_sync": SimpleNamespace(sync_dir="modal://volume/run")},
            ValueError,
            "unknown scheme 'modal:'",
        ),
        (
            {"delta_weight_sync": SimpleNamespace(sync_dir="memory:x/run")},
            ValueError,
            "store is 'memory:x', which no engine can see",
        ),
        ({"engine_init_kwargs": {}}, ValueError, "weight_transfer_config is None, expected"),
        (
            {"engine_init_kwargs": {"weight_transfer_config": {"backend": "delta"}}},
            ValueError,
            "other engines cannot read the run",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    job: Job, changes: dict[str, object], error: type[Exception], text: str
) -> None:
    strategy = job.sky.get_transfer_strategy_cls("delta", False)
    with pytest.raises(error, match=text):
        strategy.create_init_info(job.config(**changes))


def test_servers_that_run_elsewhere_are_started_by_somebody_else(job: Job) -> None:
    strategy = job.sky.get_transfer_strategy_cls("delta", False)
    changes = {"engine_init_kwargs": {}, "run_engines_locally": False}
    assert strategy.create_init_info(job.config(**changes)).override_existing_receiver


def test_install_replaces_delta_only_and_once(sky: SimpleNamespace) -> None:
    adapter.install()
    first = sky.get_transfer_strategy_cls("delta", False)
    adapter.install()
    assert sky.get_transfer_strategy_cls("delta", False) is first
    assert issubclass(first, sky.WeightTransferStrategy)
    assert first.get_vllm_transfer_engine() is GymfastEngine
    assert sky.get_transfer_strategy_cls("nccl", False) is sky.BroadcastTransferStrategy


def test_an_unknown_skyrl_is_refused(sky: SimpleNamespace, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        new = staticmethod(lambda ie_cfg, world_size: None)
        patch.setattr(sky.DeltaTransferStrategy, "create_init_info", new)
        with pytest.raises(GymfastError, match=r"takes \('ie_cfg', 'world_size'\).*skyrl.md"):
            adapter.install()
    monkeypatch.setattr(sky.DeltaWeightTransferSender, "teardown", lambda self, now: None)
    with pytest.raises(GymfastError, match=r"Sender.teardown takes \('now',\), expected \(\)"):
        adapter.install()


def test_an_unknown_client_is_refused(job: Job, monkeypatch: Any) -> None:
    monkeypatch.delattr(RemoteInferenceClient, "update_named_weights")
    with pytest.raises(GymfastError, match=r"there is no \S+Client.update_named_weights"):
        job._senders()


def test_the_client_here_has_the_signatures_of_the_real_one() -> None:
    source = os.environ.get("GYMFAST_SKYRL_SOURCE")
    if not source:
        pytest.skip("needs GYMFAST_SKYRL_SOURCE")
    tree = ast.parse(Path(source, skyrl.CLIENT_FILE).read_text())
    found = {
        node.name: tuple(argument.arg for argument in node.args.args[1:])
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef)
    }
    assert {name: found.get(name) for name in adapter.CLIENT} == adapter.CLIENT


def test_main_is_that_of_skyrl_with_the_hook_in_every_worker(monkeypatch: Any) -> None:
    seen: dict[str, Any] = {}
    ray, main_base = ModuleType("ray"), ModuleType("skyrl.train.entrypoints.main_base")
    ray.init = lambda **options: seen.update(options)
    ray.get = lambda call: seen.update(got=call)
    config = SimpleNamespace(from_cli_overrides=lambda arguments: {"arguments": arguments})
    main_base.SkyRLTrainConfig = config
    main_base.validate_cfg = lambda cfg: seen.update(validated=cfg)
    main_base.initialize_ray = lambda cfg: ray.init(
        runtime_env={"env_vars": {"A": "1"}}, log_to_driver=True
    )
    main_base.skyrl_entrypoint = SimpleNamespace(remote=lambda cfg: ("ran", cfg))
    for name in ("skyrl", "skyrl.train", "skyrl.train.entrypoints"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, main_base.__name__, main_base)
    own = "trainer.override_entrypoint=gymfast.integrations.skyrl"
    monkeypatch.setattr(sys, "argv", ["main", "trainer.seed=1", own])
    adapter.main()
    cfg = {"arguments": ["trainer.seed=1"]}
    assert seen["validated"] == cfg
    assert seen["got"] == ("ran", cfg)
    hook = {"worker_process_setup_hook": "gymfast.integrations.skyrl.install"}
    assert seen["runtime_env"] == {"env_vars": {"A": "1"}, **hook}
    assert seen["log_to_driver"] is True
    with pytest.raises(GymfastError, match="SkyRL sets a worker_process_setup_hook"):
        ray.init(runtime_env={"worker_process_setup_hook": "other"})


def test_the_ranks_are_those_of_the_default_process_group() -> None:
    assert torch_ranks().gather(5) == [5]
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = torch_ranks()
        assert (ranks.is_first, ranks.gather("text")) == (True, ["text"])
    finally:
        dist.destroy_process_group()
