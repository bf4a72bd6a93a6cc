"""SkyRL: its delta weight sync through a run of a store, put in place in each worker process.

    trainer.override_entrypoint=gymfast.integrations.skyrl

The engines take versions through the plug-in for vLLM. See docs/integrations/skyrl.md.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from gymfast.errors import ChainError, GymfastError
from gymfast.integrations.ranks import torch_ranks
from gymfast.integrations.rebind import replace_class, require_class
from gymfast.integrations.run_stream import RunStream, drain
from gymfast.integrations.update_request import InitRequest
from gymfast.integrations.vllm import BACKEND, GymfastEngine
from gymfast.stores import open_store
from gymfast.sync import Publisher

HOOK = "gymfast.integrations.skyrl.install"
_MODULE = "skyrl.backends.skyrl_train.weight_sync"
_SETTINGS = "generator.inference_engine"
# Methods of SkyRL that are replaced or called here, with their parameters.
STRATEGY = {
    "create_init_info": ("ie_cfg", "inference_world_size", "base_model_path"),
    "create_sender": ("init_info", "inference_client"),
    "get_vllm_transfer_engine": (),
}
SENDER = {"send_chunks": ("chunks", "weight_metadata", "reset_prefix_cache"), "teardown": ()}
CLIENT = {
    "init_weight_update_communicator": ("init_info",),
    "pause_generation": ("clear_cache",),
    "start_weight_update": ("is_checkpoint_format",),
    "update_named_weights": ("update_info",),
    "finish_weight_update": (),
    "reset_prefix_cache": ("reset_running_requests",),
    "resume_generation": (),
}
_log = logging.getLogger(__name__)


def main() -> None:
    """SkyRL's own entry point, with `install` in every worker process."""
    import ray

    skyrl = importlib.import_module("skyrl.train.entrypoints.main_base")
    own = "trainer.override_entrypoint="  # not a setting of SkyRL's configuration
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith(own)]
    cfg = skyrl.SkyRLTrainConfig.from_cli_overrides(arguments)
    skyrl.validate_cfg(cfg)
    ray.init = _with_hook(ray.init)
    skyrl.initialize_ray(cfg)
    ray.get(skyrl.skyrl_entrypoint.remote(cfg))


def install() -> None:
    """Puts gymfast in the place of SkyRL's `delta` in this worker process. Raises GymfastError."""
    check_api()
    replace_class(_MODULE, "DeltaTransferStrategy", STRATEGY, make_strategy)


def check_api() -> None:
    """Raises GymfastError if the delta sync of this SkyRL is not the known one."""
    require_class(_MODULE, "DeltaWeightTransferSender", SENDER)
    require_class(_MODULE, "DeltaTransferStrategy", STRATEGY)


def make_strategy(base: Any) -> type:
    """The strategy, derived from SkyRL's."""

    class GymfastTransferStrategy(base):  # type: ignore[misc]
        create_init_info = staticmethod(create_init_info)
        create_sender = staticmethod(GymfastSender)
        get_vllm_transfer_engine = staticmethod(lambda: GymfastEngine)

    return GymfastTransferStrategy


@dataclass(frozen=True)
class InitInfo:
    """What all engines are told: the run to follow."""

    follow: InitRequest
    override_existing_receiver: bool

    def for_servers(self, world_size_per_server: int, num_servers: int, dp_size: int) -> list[Any]:
        del world_size_per_server, dp_size
        return [self] * num_servers

    def to_api_payload(self) -> dict[str, Any]:
        return asdict(self.follow)


def create_init_info(ie_cfg: Any, **_others: object) -> InitInfo:
    """Store and run from `delta_weight_sync.sync_dir`: the run is the last part of the path.

    Raises ValueError for settings or a store that do not fit, and what `open_store` raises.
    """
    sync_dir = getattr(ie_cfg.delta_weight_sync, "sync_dir", "")
    store, _, run = sync_dir.rstrip("/").rpartition("/")
    if not store or not run:
        raise ValueError(
            f"{_SETTINGS}.delta_weight_sync.sync_dir is {sync_dir!r}, expected FOLDER/RUN"
        )
    open_store(store)
    transfer = (ie_cfg.engine_init_kwargs or {}).get("weight_transfer_config")
    if ie_cfg.run_engines_locally and transfer != {"backend": BACKEND}:
        raise ValueError(
            f"{_SETTINGS}.engine_init_kwargs.weight_transfer_config is {transfer}, expected "
            f"{ {'backend': BACKEND} }: other engines cannot read the run"
        )
    return InitInfo(InitRequest(store, run).require_shared(), not ie_cfg.run_engines_locally)


class GymfastSender:
    """The trainer's side of the sync, on each of its ranks; rank 0 publishes."""

    handles_prefix_cache_reset = True

    def __init__(self, init_info: InitInfo, inference_client: Any) -> None:
        """Takes nothing over yet. Raises GymfastError for an unknown client."""
        client = type(inference_client)
        require_class(client.__module__, client.__name__, CLIENT)
        self._init_info, self._client = init_info, inference_client
        self._stream: RunStream | None = None

    async def send_chunks(
        self,
        chunks: Iterable[Any],
        weight_metadata: object = None,
        reset_prefix_cache: bool = False,
    ) -> None:
        """Publishes while the engines generate, then pauses them for the update.

        Called on all ranks, and fails on all of them. Raises what `RunStream.publish` raises,
        ChainError if an engine failed: once it was paused, it stays so until a call succeeds.
        """
        del weight_metadata
        ranks = torch_ranks()
        with ranks.together("publishing the weights"):
            version = await asyncio.to_thread(self._publish, chunks, ranks.is_first)
        with ranks.together("updating the engines"):
            if ranks.is_first:
                await self._update(version, reset_prefix_cache)

    def teardown(self) -> None:
        """Forgets the snapshot: what is published next is an anchor."""
        self._stream = None

    def _publish(self, chunks: Iterable[Any], is_first: bool) -> int:
        stream = (pair for c in chunks for pair in zip(c.names, c.tensors, strict=True))
        try:
            if not is_first:
                return -1
            if self._stream is None:
                follow = self._init_info.follow
                self._stream = RunStream(Publisher(follow.store, follow.run))
            return self._stream.publish(stream).version
        finally:
            drain(stream)

    async def _update(self, version: int, reset_prefix_cache: bool) -> None:
        client, generation = self._client, "is as it was"
        try:  # first of all the run: an engine that started again follows none yet
            await client.init_weight_update_communicator(self._init_info)
            generation = "stays paused until a weight sync succeeds"
            await client.pause_generation()
            await client.start_weight_update(is_checkpoint_format=False)
            await client.update_named_weights({"version": version})
            await client.finish_weight_update()
            if reset_prefix_cache:
                await client.reset_prefix_cache(reset_running_requests=True)
        except Exception as error:
            # SkyRL's engines refuse an update while an earlier one is open.
            ended = await asyncio.gather(client.finish_weight_update(), return_exceptions=True)
            _log.warning("version %d: %s; closing the update: %s", version, error, ended[0])
            raise ChainError(
                f"version {version} is published, but not every engine took it: {error}; "
                f"generation {generation}"
            ) from error
        await client.resume_generation()


def _with_hook(init: Any) -> Any:
    """`ray.init`, but that every worker process calls `install` first."""

    def init_with_hook(*arguments: Any, runtime_env: Any = None, **options: Any) -> Any:
        environment = {"worker_process_setup_hook": HOOK} | dict(runtime_env or {})
        if environment["worker_process_setup_hook"] != HOOK:
            raise GymfastError(f"SkyRL sets a worker_process_setup_hook: call {HOOK} in that one")
        return init(*arguments, runtime_env=environment, **options)

    return init_with_hook
