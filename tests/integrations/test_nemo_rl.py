"""The adapter for NeMo-RL, driven by NeMo-RL's own synchronizer and workers, or a stand-in."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from integrations import nemo_rl_stand_in as nemo
from integrations.vllm_stand_in import Model, checkpoint

from gymfast.errors import ChainError, CoverageError, DeadlineError, FormatError, GymfastError
from gymfast.integrations.nemo_rl import GymfastEngine
from gymfast.stores import open_store
from gymfast.sync import LiveTarget, Publisher, Subscriber
from gymfast.sync.status import read_status

BACKEND = "gymfast.integrations.nemo_rl:GymfastEngine"
Q, K = "layers.1.q_proj.weight", "layers.1.k_proj.weight"
_here = threading.local()


class PolicyRank:
    """The state of a policy worker, beside NeMo-RL's own mixin."""

    def __init__(self, rank: int, weights: dict[str, torch.Tensor]) -> None:
        self.rank, self.weights = rank, weights
        self.num_read = self.fails_at = 0

    def _checkpoint_engine_weight_iterator(self, kv_scales: Any = None) -> Iterator[Any]:
        assert kv_scales is None
        for number, (name, tensor) in enumerate(self.weights.items(), start=1):
            self.num_read += 1
            yield name, "text" if number == self.fails_at else tensor

    def _prepare_checkpoint_engine_weight_send(self) -> None: ...

    def _finalize_checkpoint_engine_weight_send(self) -> None: ...


class RolloutRank:
    """A vLLM worker as NeMo-RL extends it: each batch goes straight to the live parameters."""

    def __init__(self) -> None:
        self.model = Model()

    def _load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self._load_hf_weights(weights)

    def _load_hf_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(weights)

    def _maybe_process_fp8_kv_cache(self) -> None: ...


class Job:
    """A NeMo-RL job: two policy ranks, `num_engines` vLLM engines of two ranks each."""

    def __init__(self, rl: SimpleNamespace, store: str, **settings: object) -> None:
        self.rl = rl
        self.weights = checkpoint()
        self.settings = {"store": store, "run": "run", "timeout_s": 20.0, **settings}
        self.policy_ranks = [self._policy_rank(rank) for rank in range(2)]
        self.engines = [self._engine() for _ in range(2)]
        self.sync = self._synchronizer()

    def _synchronizer(self) -> Any:
        policy = SimpleNamespace(
            worker_group=SimpleNamespace(
                workers=self.policy_ranks, run_all_workers_single_data=self._on_policy
            ),
            prepare_refit_info=dict,
        )
        generation = SimpleNamespace(
            worker_group=SimpleNamespace(
                workers=[rank for engine in self.engines for rank in engine.ranks],
                run_all_workers_single_data=self._on_engines,
                run_all_workers_multiple_data=self._on_each_engine,
            ),
            prepare_refit_info=lambda _: None,
            dp_size=len(self.engines),
            cfg={"vllm_cfg": {"async_engine": False}},
        )
        config = self.rl.checkpoint_engine_refit_config(
            {"refit_transport": BACKEND, "refit_cfg": {BACKEND: dict(self.settings)}}
        )
        return self.rl.CheckpointEngineWeightSynchronizer(policy, generation, config)

    def _policy_rank(self, rank: int) -> Any:
        kind = type("Policy", (PolicyRank, self.rl.PolicyCheckpointEngineMixin), {})
        return kind(rank, self.weights)

    def _engine(self) -> Any:
        """The process that holds vLLM, and its two workers behind `collective_rpc`."""
        kind = type("Rollout", (self.rl.VllmCheckpointEngineMixin, RolloutRank), {})
        ranks = [kind(), kind()]

        def call(rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
            _here.rank, _here.size = rank, len(ranks)
            return getattr(ranks[rank], method)(*arguments)

        def collective_rpc(method: str, args: tuple[Any, ...]) -> list[Any]:
            calls = [self.rl.start(call, rank, method, args) for rank in range(len(ranks))]
            return nemo.get(calls)

        engine = type("Engine", (self.rl.VllmCheckpointEngineRpcMixin,), {})()
        engine.llm, engine.ranks = SimpleNamespace(collective_rpc=collective_rpc), ranks
        return engine

    def _on_policy(self, method: str, **options: Any) -> list[Future[Any]]:
        return [self.rl.start(getattr(rank, method), **options) for rank in self.policy_ranks]

    def _on_engines(self, method: str, run_rank_0_only_axes: Any, **options: Any) -> list[Any]:
        return [self.rl.start(getattr(e, method), **options) for e in self.engines]

    def _on_each_engine(
        self, method: str, method_args: Any, run_rank_0_only_axes: Any, common_kwargs: Any
    ) -> list[Any]:
        pairs = zip(self.engines, method_args, strict=True)
        return [
            self.rl.start(getattr(e, method), method_args=given, **common_kwargs)
            for e, given in pairs
        ]

    @property
    def models(self) -> list[Model]:
        return [rank.model for engine in self.engines for rank in engine.ranks]

    def refit(self, *names: str) -> None:
        for name in names:
            self.weights[name].view(-1)[::5] += 1.0
        for model in self.models:
            model.calls.clear()
        self.sync.sync_weights()

    def loaded(self) -> list[list[str]]:
        """Names that each model was given in the last refit."""
        return [[name for call in model.calls for name in call] for model in self.models]

    def is_live(self) -> bool:
        """Whether every vLLM worker holds exactly what the trainer has."""
        fresh = Model()
        fresh.load_weights(self.weights.items())
        expected = list(fresh.parameters())
        return all(
            torch.equal(live, wanted)
            for model in self.models
            for live, wanted in zip(model.parameters(), expected, strict=True)
        )

    def restart_trainer(self) -> None:
        self.policy_ranks = [self._policy_rank(rank) for rank in range(2)]
        self.sync = self._synchronizer()

    @property
    def version(self) -> int | None:
        return Subscriber(str(self.settings["store"]), "run", LiveTarget({})).poll()

    def set_timeout(self, timeout_s: float) -> None:
        """How long the rollout ends wait; a policy that failed is waited for to the end."""
        for engine in self.engines:
            for rank in engine.ranks:
                rank.checkpoint_engine._timeout_s = timeout_s


@pytest.fixture(params=["stand-in", "real"])
def rl(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimpleNamespace]:
    """NeMo-RL, and `start`, which runs a method of a worker in a thread."""
    source = os.environ.get("GYMFAST_NEMO_RL_SOURCE")
    if request.param == "real" and not source:
        pytest.skip("needs GYMFAST_NEMO_RL_SOURCE")
    properties = SimpleNamespace(total_memory=100 << 20)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: _here.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: _here.size)
    rl = nemo.install(monkeypatch, Path(source) if request.param == "real" and source else None)
    with ThreadPoolExecutor(max_workers=16) as threads:
        rl.start = lambda *call, **options: threads.submit(_run, *call, **options)
        yield rl


def _run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    answer = function(*arguments, **options)
    return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer


@pytest.fixture
def store(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture
def job(rl: SimpleNamespace, store: str) -> Job:
    return Job(rl, store)


def test_every_worker_of_vllm_follows_the_policy(job: Job) -> None:
    job.sync.init_communicator()
    job.refit()
    assert job.loaded() == [list(job.weights)] * 4
    assert job.is_live()
    for name in (Q, "layers.0.decay.A_log", "embed.weight"):
        job.refit(name)  # of a fused layer one part only: the loader fills its rows
        assert job.loaded() == [[name]] * 4
        assert job.is_live()
    assert job.version == 3


def test_a_step_with_nothing_changed_is_a_version_and_loads_nothing(job: Job) -> None:
    job.refit()
    job.refit()
    assert job.loaded() == [[]] * 4
    assert job.is_live()
    assert job.version == 1


def test_every_policy_rank_reads_its_stream_to_the_end(job: Job) -> None:
    job.refit()
    job.set_timeout(0.05)
    job.policy_ranks[0].fails_at = 2
    with pytest.raises(TypeError, match="expected a NumPy array"):
        job.refit(Q)
    num_tensors = len(job.weights)
    assert [rank.num_read for rank in job.policy_ranks] == [2 * num_tensors] * 2


def test_a_worker_of_vllm_that_comes_back_late_takes_everything(rl: Any, store: str) -> None:
    job = Job(rl, store, release_after_refit=True)
    for name in (Q, K, Q):
        job.refit(name)
    job.engines[1] = job._engine()
    job.sync = job._synchronizer()
    job.refit(K)
    assert job.loaded() == [[K]] * 2 + [list(job.weights)] * 2
    assert job.is_live()


def test_versions_go_on_after_a_restart_of_the_trainer(job: Job) -> None:
    job.refit()
    job.refit(Q)
    job.restart_trainer()
    job.refit(K)
    assert job.loaded() == [[K]] * 4  # its first version is an anchor, which is compared
    assert job.is_live()
    assert job.version == 2


def test_an_engine_that_fails_is_an_error_and_is_loaded_whole_the_next_time(
    rl: Any, store: str
) -> None:
    job = Job(rl, store, release_after_refit=True)
    job.refit()
    broken = job.models[2]
    broken.fails_at = 1
    with pytest.raises(RuntimeError, match="injected: the loader failed"):
        job.refit(Q)
    broken.fails_at = 0
    job.weights[Q].zero_()  # what it holds of this is unknown: the load may have begun
    job.refit(K)
    assert [len(names) for names in job.loaded()] == [2, 2, len(job.weights), 2]
    assert job.is_live()
    assert job.version == 2


def test_without_a_new_handshake_a_failed_refit_is_not_repeated(job: Job) -> None:
    job.refit()
    job.models[0].fails_at = 1
    with pytest.raises(RuntimeError, match="injected"):
        job.refit(Q)
    job.models[0].fails_at = 0
    with pytest.raises(ChainError, match="set release_after_refit: true"):
        job.refit(Q)


def test_after_finalize_both_ends_wait_for_a_handshake(job: Job) -> None:
    job.refit()
    job.sync.shutdown()
    stream = iter(job.weights.items())
    with pytest.raises(ChainError, match="do not agree on a version"):
        asyncio.run(job.policy_ranks[0].checkpoint_engine.send_weights(stream))
    assert list(stream) == []  # other ranks take part in making each tensor
    with pytest.raises(ChainError, match="do not agree on a version"):
        _received(job.engines[0].ranks[0].checkpoint_engine)
    job.refit(Q)
    assert job.loaded() == [[Q]] * 4
    assert job.is_live()


def test_a_policy_that_fails_commits_nothing_and_the_refit_can_be_repeated(
    rl: Any, store: str
) -> None:
    job = Job(rl, store, release_after_refit=True)
    job.refit()
    job.set_timeout(0.05)
    job.policy_ranks[0].fails_at = 1
    with pytest.raises(TypeError):
        job.refit(Q)
    assert job.version == 0
    job.policy_ranks[0].fails_at = 0
    job.set_timeout(20.0)
    job.refit()
    assert job.loaded() == [[Q]] * 4
    assert job.is_live()
    assert job.version == 1


def test_a_version_that_does_not_come_is_an_error_that_names_the_store(rl: Any, store: str) -> None:
    engine = GymfastEngine(1 << 20, store, "run", timeout_s=0.05)
    engine.init_rollout_process_group(
        rollout_rank=0, train_world_size=1, rollout_world_size=1, metadata=[engine.prepare()]
    )
    with pytest.raises(DeadlineError, match=f"version 0 of run 'run'.*{store}"):
        asyncio.run(anext(engine.receive_weight_batches()))


def test_a_store_that_cannot_be_one_fails_the_handshake(rl: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    job = Job(rl, (tmp_path / "file").as_uri())
    with pytest.raises(GymfastError, match="file"):
        job.sync.init_communicator()
    with pytest.raises(ValueError, match="unknown scheme 'sftp:'"):
        Job(rl, "sftp://host/runs").sync.init_communicator()


def test_another_publisher_during_the_handshake_is_refused(rl: Any, store: str) -> None:
    engine = GymfastEngine(1 << 20, store, "run")
    metadata = [engine.prepare()]
    Publisher(store, "run").publish(checkpoint())
    sizes = {"train_world_size": 1, "rollout_world_size": 1}
    with pytest.raises(ChainError, match="went from version None to 0"):
        engine.init_policy_process_group(worker_rank=0, metadata=metadata, **sizes)


def test_the_policy_signs_with_a_key_that_rollouts_do_not_have(
    rl: Any, store: str, tmp_path: Path
) -> None:
    pair, pem = ed25519.Ed25519PrivateKey.generate(), serialization.Encoding.PEM
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    private.touch(0o600)
    plain = serialization.NoEncryption()
    private.write_bytes(pair.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(pair.public_key().public_bytes(pem, spki))
    job = Job(rl, store, key_file=str(private), public_key_file=str(public))
    job.refit()
    private.unlink()  # the policy has read it; rollouts never do
    job.refit()
    assert job.version == 1
    with pytest.raises(FormatError, match="HMAC-SHA256"):
        read_status(open_store(store), "run", key=bytes(32))


@pytest.mark.parametrize("name", ["layers.0.mlp.experts.3.w1.weight", "layers.0.o.weight_scale"])
def test_engines_bug_12_what_vllm_may_have_packed_is_not_loaded_over(
    rl: Any, store: str, name: str
) -> None:
    weights = {**checkpoint(), name: torch.ones(4)}
    for is_plain in (False, True):
        engine = _follower(store, weights, is_layout_plain=is_plain)
        if not is_plain:
            with pytest.raises(CoverageError, match=f"1 tensors may be packed.*{name}"):
                _received(engine)
        else:
            assert name in dict(_received(engine)[0])


def test_batches_are_bounded_and_what_is_in_them_is_a_copy(rl: Any, store: str) -> None:
    weights = {f"t{i}": torch.full((250,), float(i)) for i in range(8)}
    weights["large"] = torch.zeros(2000)
    weights |= {"half": torch.ones(10, dtype=torch.bfloat16), "ids": torch.arange(3)}
    batches = _received(_follower(store, weights, bucket_size=3000))
    assert [[name for name, _ in batch] for batch in batches] == [
        *(["t0", "t1", "t2"], ["t3", "t4", "t5"], ["t6", "t7"], ["large"], ["half", "ids"])
    ]
    assert all(torch.equal(tensor, weights[name]) for batch in batches for name, tensor in batch)
    assert batches[-1][0][1].dtype == torch.bfloat16
    engine = _follower(store, weights)
    for batch in _received(engine):
        for _, tensor in batch:
            tensor.zero_()
    assert torch.equal(dict(engine._copy.tensors(["t7"], torch.empty(0)))["t7"], weights["t7"])


def test_unknown_and_missing_settings_are_refused_by_name(rl: Any, store: str) -> None:
    with pytest.raises(ValueError, match=r"unknown settings \['stor'\]"):
        GymfastEngine(1, store, "run", stor="x")
    with pytest.raises(ValueError, match="run ''"):
        GymfastEngine(1, store)
    with pytest.raises(ValueError, match="store is 'Memory:x', which no engine can see"):
        GymfastEngine(1, "Memory:x", "run")


def test_an_unknown_nemo_rl_is_refused(rl: Any, store: str, monkeypatch: Any) -> None:
    engine = GymfastEngine(1, store, "run")
    assert isinstance(engine, rl.CheckpointEngine)
    assert engine.get_target_weight_layout() is None
    with monkeypatch.context() as patch:
        patch.setattr(rl.CheckpointEngine, "send_weights", lambda self, weights, step: None)
        with pytest.raises(GymfastError, match=r"takes .*'step'.*expected.*nemo_rl.md"):
            GymfastEngine(1, store, "run")
    monkeypatch.setattr(rl.CheckpointEngine, "__abstractmethods__", frozenset({"resend"}))
    with pytest.raises(GymfastError, match=r"unknown to gymfast: \['resend'\]"):
        GymfastEngine(1, store, "run")


def _follower(
    store: str, weights: dict[str, torch.Tensor], *, bucket_size: int = 1 << 20, **settings: Any
) -> GymfastEngine:
    """A rollout end whose next version is the newest one, of these weights."""
    engine = GymfastEngine(bucket_size, store, "run", timeout_s=5.0, **settings)
    metadata = [engine.prepare()]
    Publisher(store, "run").publish(weights)
    engine.init_rollout_process_group(
        rollout_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata
    )
    return engine


def _received(engine: GymfastEngine) -> list[list[tuple[str, torch.Tensor]]]:
    async def collect() -> list[list[tuple[str, torch.Tensor]]]:
        return [batch async for batch in engine.receive_weight_batches()]

    return asyncio.run(collect())
