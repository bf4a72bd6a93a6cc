"""The checkpoint engine in a real verl: its manager, workers and buckets, as processes of Ray.

Needs verl with its CPU dependencies: see docs/integrations/verl.md. The model is a dictionary of
tensors; what verl needs a GPU for (making and loading them) is not here.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from hydra import compose, initialize_config_dir

TESTS = str(Path(__file__).resolve().parents[1])
sys.path[:] = [p for p in sys.path if p != TESTS]  # torch would take its folder `triton` for Triton

from verl.checkpoint_engine import (  # noqa: E402
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.single_controller.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
)
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.utils.import_utils import import_external_libs  # noqa: E402
from verl.workers.engine_workers import ActorRolloutRefWorker  # noqa: E402

from gymfast.errors import ChainError  # noqa: E402

NUM_TRAINERS = 2


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps: some elements of each tensor change in each."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"layers.{i}.{part}.weight": torch.randn(256, 192, generator=generator).bfloat16()
        for i in range(4)
        for part in ("q_proj", "k_proj", "mlp")
    }
    weights["router.bias"] = torch.randn(33, generator=generator)
    for number in range(step):
        for tensor in weights.values():
            tensor.view(-1)[number::101] += 0.5
    return weights


def buckets() -> Any:
    """verl's module of that name; its package wants a vLLM, and the module a GPU."""
    (folder,) = importlib.util.find_spec("verl").submodule_search_locations
    file = Path(folder) / "workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
    spec = importlib.util.spec_from_file_location("bucketed_weight_transfer", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    nothing = dict.fromkeys(("synchronize", "empty_cache", "ipc_collect"), lambda: None)
    module.get_torch_device = lambda: SimpleNamespace(**nothing)
    return module


def configured(store: str) -> Any:
    """`actor_rollout_ref` of verl's own configuration, with the flags of the documentation."""
    (folder,) = importlib.util.find_spec("verl").submodule_search_locations
    place = "actor_rollout_ref.rollout.checkpoint_engine"
    flags = [
        "actor_rollout_ref.rollout.name=vllm",
        f"{place}.backend=gymfast",
        f"{place}.custom_backend_module=gymfast.integrations.verl",
        f"{place}.update_weights_bucket_megabytes=1",
        f"+{place}.engine_kwargs.gymfast.store={store}",
        f"+{place}.engine_kwargs.gymfast.run=run",
        f"+{place}.engine_kwargs.gymfast.timeout_s=5",
        f"+{place}.engine_kwargs.gymfast.sync_timeout_s=60",
    ]
    with initialize_config_dir(f"{folder}/trainer/config", version_base=None):
        return compose("ppo_trainer", overrides=flags).actor_rollout_ref


class Trainer(ActorRolloutRefWorker):
    """verl's worker with a model that is a dictionary; its weight sync is verl's."""

    def __init__(self, config: Any) -> None:
        Worker.__init__(self)
        self.config = config
        self.step = 0
        self.num_read = 0
        self.actor = SimpleNamespace(engine=self)
        checkpoint = omega_conf_to_dataclass(config.rollout.checkpoint_engine)
        import_external_libs(checkpoint.custom_backend_module or None)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            checkpoint.backend,
            is_master=self.rank == 0,
            bucket_size=checkpoint.update_weights_bucket_megabytes << 20,
            **checkpoint.engine_kwargs.get(checkpoint.backend, {}),
        )

    def get_per_tensor_param(self) -> tuple[Any, None]:
        return self._stream(), None

    def _stream(self) -> Any:
        for name, tensor in weights_of(self.step).items():
            self.num_read += 1
            yield name, tensor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_step(self, step: int) -> int:
        self.step = step
        return self.num_read


class Adapter:
    """A rollout whose tensors come through verl's own buckets, in shared memory."""

    replica_rank = 0
    is_leader_rank = True

    def __init__(self) -> None:
        self.live: dict[str, torch.Tensor] = {}
        self.num_updates = 0

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors"):
        self.num_updates += 1
        module = buckets()
        handle = f"ipc:///tmp/gymfast-verl-{os.getpid()}.sock"
        receiver = module.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
        live: dict[str, torch.Tensor] = {}

        def keep(bucket: list[tuple[str, torch.Tensor]], is_last: bool = True) -> None:
            live.update((name, tensor.clone()) for name, tensor in bucket)

        thread = threading.Thread(target=receiver.receive_weights, args=(keep,))
        thread.start()
        sender = module.BucketedWeightSender(handle, 1, use_shm=True)
        await sender.async_send_weights(weights)
        thread.join()
        self.live = live


class Rollout(CheckpointEngineWorker):
    """verl's worker, which also tells what its rollout holds."""

    def __init__(self, rollout_config: Any, model_config: Any) -> None:
        super().__init__(rollout_config, model_config, Adapter())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def differs(self, step: int) -> list[str]:
        live, expected = self.server_adapter.live, weights_of(step)
        same = [n for n in live if n in expected and torch.equal(live[n], expected[n])]
        return sorted((expected.keys() | live.keys()) - set(same))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def num_updates(self) -> int:
        return self.server_adapter.num_updates

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def when_it_pulls(self, what: str) -> None:
        copy = self.checkpoint_engine._copy
        vars(copy).pop("pull", None)
        if what:
            copy.pull = die if what == "die" else fail


def fail(version: int) -> None:
    raise OSError("injected: the disk is full")


def die(version: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Replica:
    """What the manager asks of a rollout server."""

    def __init__(self, group: RayWorkerGroup) -> None:
        self.group, self.workers, self.calls = group, group.workers, []

    def __getattr__(self, name: str) -> Any:
        async def call(**kwargs: Any) -> None:
            self.calls.append(name)

        return call


class Job:
    """One trainer and replicas of one worker each, around verl's manager."""

    def __init__(self, store: str) -> None:
        self.config = configured(store)
        self.checkpoint = omega_conf_to_dataclass(self.config.rollout.checkpoint_engine)
        self.trainer = self.start_trainer()
        self.replicas = [self.start_replica(), self.start_replica()]
        self.manager = CheckpointEngineManager(self.checkpoint, self.trainer, list(self.replicas))

    def start_trainer(self) -> RayWorkerGroup:
        return self._start(NUM_TRAINERS, Trainer, config=self.config)

    def start_replica(self) -> Replica:
        rollout = SimpleNamespace(checkpoint_engine=self.checkpoint, name="vllm", mode="async")
        return Replica(self._start(1, Rollout, rollout_config=rollout, model_config=None))

    def _start(self, size: int, cls: type, **kwargs: Any) -> RayWorkerGroup:
        pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
        return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(cls), **kwargs))

    def sync(self, step: int) -> dict[str, float]:
        self.trainer.set_step(step)
        return self.manager.update_weights(global_steps=step)

    def differs(self, step: int) -> list[list[str]]:
        return [replica.group.differs(step)[0] for replica in self.replicas]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=12, include_dashboard=False, log_to_driver=False)
    yield Job((tmp_path_factory.mktemp("verl") / "store").as_uri())
    ray.shutdown()


def test_every_sync_brings_the_weights_of_the_trainer_to_every_rollout(job: Job) -> None:
    num_tensors = len(weights_of(0))
    for step in range(6):
        metrics = job.sync(step)
        assert job.differs(step) == [[], []]
        print(step, metrics)
        if metrics:  # verl 0.8 drops them
            assert metrics["checkpoint_engine/version"] == step
    assert job.trainer.set_step(0) == [6 * num_tensors] * NUM_TRAINERS
    assert job.replicas[0].calls[-2:] == ["resume_kv_cache", "resume_generation"]


def test_a_failed_receive_fails_the_sync_before_any_rollout_is_touched(job: Job) -> None:
    job.sync(6)
    before = [replica.group.num_updates()[0] for replica in job.replicas]
    job.replicas[1].group.when_it_pulls("fail")
    start_s = time.monotonic()
    with pytest.raises(Exception, match="injected: the disk is full"):
        job.sync(7)
    print("failed after", time.monotonic() - start_s)
    assert [replica.group.num_updates()[0] for replica in job.replicas] == before
    assert job.differs(6) == [[], []]
    job.replicas[1].group.when_it_pulls("")
    job.sync(7)
    assert job.differs(7) == [[], []]


def test_a_killed_rollout_fails_the_sync_and_another_one_takes_its_place(job: Job) -> None:
    kept, killed = job.replicas
    before = kept.group.num_updates()
    killed.group.when_it_pulls("die")
    start_s = time.monotonic()
    with pytest.raises((ray.exceptions.RayError, ChainError)):
        job.sync(8)
    print("failed after", time.monotonic() - start_s)
    assert kept.group.num_updates() == before and kept.group.differs(7) == [[]]
    job.manager.remove_replicas([killed])
    job.replicas[1] = job.start_replica()
    job.manager.add_replicas(job.replicas[1:])
    job.sync(9)
    assert job.differs(9) == [[], []]


def test_a_trainer_that_restarts_goes_on_in_the_run(job: Job) -> None:
    before = job.sync(10)
    for worker in job.trainer.workers:
        ray.kill(worker)
    job.trainer = job.manager.actor_wg = job.manager.trainer = job.start_trainer()
    metrics = job.sync(3)
    assert job.differs(3) == [[], []]
    if metrics:
        version = "checkpoint_engine/version"
        assert metrics[version] == before[version] + 1
