"""OpenRLHF: the trainer publishes versions of a run, engines take each with one call.

    python -m gymfast.integrations.openrlhf STORE RUN FLAGS OF openrlhf.cli.train_ppo_ray

Versions, and a script of your own: docs/integrations/openrlhf.md.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from gymfast.errors import ChainError
from gymfast.integrations.engines import Engines
from gymfast.integrations.ranks import torch_ranks
from gymfast.integrations.rebind import replace_class, require_class
from gymfast.integrations.run_stream import RunStream, drain
from gymfast.integrations.update_request import InitRequest
from gymfast.sync import Publisher

TRAINER = {"_init_vllm_sync_group": ("backend",), "broadcast_to_vllm": ()}
"""Methods of OpenRLHF's ActorPPOTrainer that are replaced, with their parameters."""

ENGINE = {"update_weight": ("name", "dtype", "shape", "empty_cache"), "reset_prefix_cache": ()}
"""Methods of OpenRLHF's RolloutRayActor that one of ours stands for."""

_TRAINER = ("openrlhf.trainer.ray.ppo_actor", "ActorPPOTrainer")
_ENGINE = ("openrlhf.trainer.ray.vllm_engine", "RolloutRayActor")
_CLI = "openrlhf.cli.train_ppo_ray"
_ENGINES_S = 540.0  # below the 10 minutes for which ranks of torch wait for each other
_log = logging.getLogger(__name__)


def install(
    store: str,
    run: str,
    *,
    key_file: str | None = None,
    make_publisher: Callable[[str, str], Publisher] = Publisher,
) -> None:
    """Has the actors that OpenRLHF makes from here on sync through a run; for the driver process.

    Rank 0 of the actor makes the publisher. `key_file` holds, for the engines, the key of a run
    whose records it signs. Raises GymfastError for an OpenRLHF that is not known, ValueError for a
    store that no engine can see.
    """
    follow = InitRequest(store=store, run=run, key_file=key_file).require_shared()
    make = partial(make_trainer, follow, partial(make_publisher, store, run))
    check_api()
    replace_class(*_TRAINER, TRAINER, make)
    replace_class(*_ENGINE, ENGINE, make_engine)


def check_api() -> None:
    """Raises GymfastError if the classes of this OpenRLHF are not the known ones."""
    require_class(*_TRAINER, TRAINER)
    require_class(*_ENGINE, ENGINE)


def main(arguments: Sequence[str]) -> None:
    """Runs OpenRLHF's trainer with what is installed for the store and the run named first."""
    if len(arguments) < 2 or any(argument.startswith("-") for argument in arguments[:2]):
        sys.exit(f"usage: python -m gymfast.integrations.openrlhf STORE RUN FLAGS OF {_CLI}")
    store, run, *flags = arguments
    install(store, run)
    sys.argv = [_CLI, *flags]
    runpy.run_module(_CLI, run_name="__main__", alter_sys=True)


def make_trainer(follow: InitRequest, open_run: Callable[[], Publisher], base: Any) -> type:
    """The trainer, derived from OpenRLHF's."""

    class Trainer(base):  # type: ignore[misc]
        """OpenRLHF's trainer without a group of processes that reaches into the engines."""

        gymfast_stream: RunStream | None = None

        def _init_vllm_sync_group(self, backend: str) -> None:
            del backend  # weights take another way

        def broadcast_to_vllm(self) -> None:
            _sync(self, follow, open_run)

    return Trainer


def make_engine(base: Any) -> Any:
    """The Ray actor around a vLLM engine, derived from OpenRLHF's."""
    import ray

    class Rollout(base):  # type: ignore[misc]
        """OpenRLHF's actor whose vLLM follows a run."""

        async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
            kwargs["weight_transfer_config"] = {"backend": "gymfast"}
            await super().__init__(*args, **kwargs)

        async def gymfast_pull(self, follow: dict[str, Any], version: int) -> None:
            await pull(self.llm, follow, version)

    return ray.remote(Rollout)


async def pull(llm: Any, follow: dict[str, Any], version: int) -> None:
    """Has an engine of vLLM take a version of a run and drop what it cached of older ones.

    Whoever calls it sees to it that nothing is generated meanwhile. Raises what vLLM raises,
    ChainError if the cache could not be dropped.
    """
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )

    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=follow))
    await llm.start_weight_update()
    try:
        await llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
    except Exception as error:
        # Workers of vLLM that did not raise keep the update open, and refuse the next one.
        ended = await asyncio.gather(llm.finish_weight_update(), return_exceptions=True)
        _log.warning("version %d: %s; closing the update: %s", version, error, ended[0])
        raise
    await llm.finish_weight_update()
    # Requests of a partial rollout hold blocks of the old weights, and nothing is reset then.
    if not await llm.reset_prefix_cache(reset_running_requests=True):
        raise ChainError(f"version {version} is loaded, but vLLM kept its prefix cache")
    if hasattr(llm, "update_weight_version"):  # since vLLM 0.28
        await llm.update_weight_version(str(version))


def _sync(trainer: Any, follow: InitRequest, open_run: Callable[[], Publisher]) -> None:
    """A version of the run, and all engines at it; an error of one rank is raised on all.

    Engines that did not fail have the version. Raises EngineError that names those that did, and
    what `RunStream.publish` raises.
    """
    import ray
    import torch

    ranks = torch_ranks()
    torch.cuda.empty_cache()
    with ranks.together("the sync of weights"):
        tensors = _gathered(trainer)
        try:
            if ranks.is_first:
                trainer.gymfast_stream = trainer.gymfast_stream or RunStream(open_run())
                version = trainer.gymfast_stream.publish(tensors).version
        finally:
            drain(tensors)  # every rank takes part in gathering each tensor
        if ranks.is_first:
            engines = Engines(trainer.vllm_engines, ray.get, _ENGINES_S)
            engines.call("gymfast_pull", asdict(follow), version)
    torch.cuda.empty_cache()  # for engines on the same GPU


def _gathered(trainer: Any) -> Iterator[tuple[str, Any]]:
    """All parameters, whole on each rank; frozen ones too, since an engine loads a checkpoint."""
    import deepspeed

    flags, model = trainer.strategy.args.ds, trainer.actor.model.module
    for name, parameter in model.named_parameters():
        if flags.tensor_parallel_size > 1:
            gather = deepspeed.module_inject.layers.GatherReplacedLayerParams
            whole = gather([parameter], model, enabled=True)
        else:
            whole = deepspeed.zero.GatheredParameters([parameter], enabled=flags.zero_stage == 3)
        with whole:
            yield name, parameter.data


if __name__ == "__main__":
    # Actors in other processes import what is installed, which they cannot from __main__.
    importlib.import_module("gymfast.integrations.openrlhf").main(sys.argv[1:])
