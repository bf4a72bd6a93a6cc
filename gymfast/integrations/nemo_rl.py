"""NeMo-RL: refits through a run of a store, chosen by two settings and no patch.

    policy.generation.refit_transport: "gymfast.integrations.nemo_rl:GymfastEngine"
    policy.generation.refit_cfg["gymfast.integrations.nemo_rl:GymfastEngine"]: {store: S, run: R}

Policy rank 0 publishes, every vLLM worker follows. See docs/integrations/nemo_rl.md.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

from gymfast.errors import ChainError, CoverageError, DeadlineError, GymfastError, NotFoundError
from gymfast.integrations.canonical import CanonicalCopy
from gymfast.integrations.rebind import require_class
from gymfast.integrations.run_stream import NamedTensors, RunStream, drain
from gymfast.integrations.update_request import InitRequest
from gymfast.key_file import read_key_file
from gymfast.stores import open_store
from gymfast.sync import Publisher
from gymfast.sync.status import read_status

_MODULE = "nemo_rl.utils.checkpoint_engines.base"
_TOPOLOGY = ("train_world_size", "rollout_world_size", "metadata")
EXPECTED = {
    **dict.fromkeys(("get_target_weight_layout", "prepare", "finalize"), ()),
    "init_policy_process_group": ("worker_rank", *_TOPOLOGY),
    "init_rollout_process_group": ("rollout_rank", *_TOPOLOGY),
    "send_weights": ("weights",),
    "receive_weight_batches": (),
}
"""Methods of NeMo-RL's CheckpointEngine, with their parameters: all of them are here."""
_SCALES = ("_scale", "_scale_2", "_scale_inv")


def check_api() -> None:
    """Raises GymfastError if the CheckpointEngine of this NeMo-RL is not the known one."""
    base: Any = require_class(_MODULE, "CheckpointEngine", EXPECTED)
    if new := sorted(base.__abstractmethods__ - EXPECTED.keys()):
        raise GymfastError(f"{_MODULE}.CheckpointEngine has methods unknown to gymfast: {new}")
    base.register(GymfastEngine)


class GymfastEngine:
    """One end of the refit: that of a policy worker, or that of a vLLM worker. Not thread-safe.

    Both ends count versions from the newest one at the handshake (`prepare`, then one of the
    `init_` methods). An end that fails refuses to go on until the next handshake.
    """

    shard_expert_weights = False

    def __init__(
        self,
        bucket_size: int,
        store: str = "",
        run: str = "",
        *,
        staging_dir: str | None = None,
        timeout_s: float = 600.0,
        key_file: str | None = None,
        public_key_file: str | None = None,
        device: str | None = None,
        is_layout_plain: bool = False,
        release_after_refit: bool = False,
        **unknown: object,
    ) -> None:
        """Batches of at most `bucket_size` bytes (or one tensor) go to `device`, the GPU if None.

        `timeout_s` bounds the wait for the version of a refit. `is_layout_plain` promises that vLLM
        keeps experts and scales as they come. NeMo-RL reads `release_after_refit`. The policy signs
        with `key_file`; it also checks signatures, unless `public_key_file` is given for that.
        Raises ValueError for settings that cannot be used, GymfastError for an unknown NeMo-RL.
        """
        check_api()
        if unknown or not store or not run:
            raise ValueError(
                f"refit_cfg has store {store!r}, run {run!r} and the unknown settings "
                f"{sorted(unknown)}: see docs/integrations/nemo_rl.md for those that there are"
            )
        self.release_after_refit = release_after_refit
        self._bucket_size, self._device, self._timeout_s = bucket_size, device, timeout_s
        self._is_layout_plain = is_layout_plain
        checks = public_key_file or key_file
        self._follow = InitRequest(store, run, staging_dir, key_file=checks).require_shared()
        self._key_file = key_file
        self._next: int | None = None
        self._stream: RunStream | None = None
        self._copy: CanonicalCopy | None = None
        self._is_known = self._is_live_known = False

    def get_target_weight_layout(self) -> None:
        """None: every vLLM worker gets whole tensors."""

    def prepare(self) -> dict[str, Any]:
        """The newest version of the run, as far as this end knows; that of policy rank 0 counts.

        Raises StoreError, ValueError for an address that is none.
        """
        if self._stream is not None:
            return {"newest": self._stream.publisher.version}
        newest = None
        if not self._is_known:  # which end this is: it may be policy rank 0
            with suppress(NotFoundError):
                store = open_store(self._follow.store)
                key = read_key_file(self._follow.key_file) if self._follow.key_file else None
                newest = read_status(store, self._follow.run, key=key).newest
        return {"newest": newest and newest.version}

    def init_policy_process_group(self, *, worker_rank: int, metadata: list[Any], **_: int) -> None:
        """Rank 0 takes the run over. Raises what `Publisher` raises, ChainError for a new tip."""
        newest = self._agree(metadata)
        if worker_rank != 0 or self._stream is not None:
            return
        key = read_key_file(self._key_file) if self._key_file else None
        publisher = Publisher(self._follow.store, self._follow.run, key=key)
        if publisher.version != newest:
            raise ChainError(
                f"run '{self._follow.run}' went from version {newest} to {publisher.version} "
                "during the handshake: stop the other trainer that publishes to it"
            )
        self._stream = RunStream(publisher)

    def init_rollout_process_group(self, *, metadata: list[Any], **_: int) -> None:
        """Follows the run. Raises what `Subscriber` raises."""
        self._agree(metadata)
        self._copy = self._copy or self._follow.open()

    def finalize(self) -> None:
        """Ends what the handshake agreed on; snapshot and copy stay, so the next refit is small."""
        self._next = None

    async def send_weights(self, weights: NamedTensors) -> None:
        """Rank 0 publishes the tensors, others read them to the end, as collectives need it.

        Raises what `RunStream.publish` raises, ChainError without a handshake.
        """
        if self._stream is None:
            drain(weights)
            return
        try:
            version = self._take_next()
            report = self._stream.publish(weights)
        finally:
            drain(weights)
        if report.version != version:
            raise ChainError(f"version {version} was agreed on, {report.version} was committed")
        self._next = version + 1

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """The tensors to load: those that changed since the last refit, all where that is unknown.

        NeMo-RL loads each batch into the live parameters. Raises DeadlineError if the version does
        not come, CoverageError for tensors that would be loaded wrongly, ChainError without a
        handshake, and what `Subscriber.pull` raises.
        """
        import torch

        version, copy = self._take_next(), self._copy
        if copy is None:
            raise ChainError("a policy worker sends weights, it receives none")
        try:
            copy.pull(version, timeout_s=self._timeout_s)
        except DeadlineError as error:
            where = f"{error}: it did not come through {self._follow.store}"
            raise DeadlineError(f"{where}; did the policy fail, or see another store?") from error
        self._require_loadable(copy.names)
        names = copy.changed() if self._is_live_known else copy.names
        if gone := sorted(set(names) - set(copy.names)):
            raise CoverageError(f"{len(gone)} tensors are in no checkpoint any more: {gone[:3]}")
        self._is_live_known = False
        device = self._device or ("cuda" if torch.cuda.is_available() else "cpu")
        for batch in copy.batches(names, torch.empty(0), self._bucket_size):
            yield [(name, tensor.to(device, copy=True)) for name, tensor in batch]
        copy.mark_loaded()
        self._is_live_known = True
        self._next = version + 1

    def _agree(self, metadata: list[Any]) -> int | None:
        newest: int | None = metadata[0]["newest"]
        self._next, self._is_known = 0 if newest is None else newest + 1, True
        return newest

    def _take_next(self) -> int:
        """The version of this refit; nothing is agreed on any more, until the refit succeeded."""
        version, self._next = self._next, None
        if version is None:
            raise ChainError(
                "the last refit failed here, so the ends do not agree on a version: restart the "
                "job, or set release_after_refit: true, which agrees anew before each refit"
            )
        return version

    def _require_loadable(self, names: Sequence[str]) -> None:
        """Experts and scales may be packed for a kernel: a load over them is silent garbage."""
        packed = [n for n in names if ".experts." in n or n.endswith(_SCALES)]
        if packed and not self._is_layout_plain:
            raise CoverageError(
                f"{len(packed)} tensors may be packed in vLLM, and NeMo-RL loads over live "
                f"weights without packing again: {packed[:3]}; choose a backend that keeps them "
                "as they are (vllm_kwargs.moe_backend: triton) and set is_layout_plain: true"
            )
