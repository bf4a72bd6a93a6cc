"""The checkpoint engine of verl: a run of a store between its trainer and its rollout workers.

    actor_rollout_ref.rollout.checkpoint_engine.backend=gymfast
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=gymfast.integrations.verl

verl imports this module in each of its processes, which registers the engine. Options and
versions: docs/integrations/verl.md.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gymfast.errors import ChainError, GymfastError, MissingDependencyError
from gymfast.integrations.phases import Phases
from gymfast.integrations.rebind import describe
from gymfast.integrations.run_options import RunOptions
from gymfast.integrations.run_stream import NamedTensors, RunStream, drain
from gymfast.integrations.sync_round import RoundLeader, RoundMember, Ticket
from gymfast.sync import PublishReport

BACKEND = "gymfast"
KNOWN: Mapping[str, Sequence[tuple[str, ...]]] = {
    "prepare": [()],
    "build_topology": [
        ("trainer_world_size", "rollout_world_size", "metadata"),  # 0.8
        ("actor_wg_world_size", "rollout_world_size", "metadata"),
    ],
    "init_process_group": [("kwargs",)],
    "finalize": [()],
    "send_weights": [("weights", "global_steps")],
    "receive_weights": [("global_steps",)],
}
"""The abstract methods of verl's `CheckpointEngine`, with their parameters in known versions."""
_OPTIONS = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{BACKEND}"
_log = logging.getLogger(__name__)


def register() -> None:
    """Makes the engine known to verl; does nothing the second time.

    Raises MissingDependencyError without verl, GymfastError for a verl whose interface is unknown.
    """
    try:
        from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
    except ModuleNotFoundError as error:
        if error.name is None or not "verl.checkpoint_engine".startswith(error.name):
            raise  # verl is there, something that it needs is not
        raise MissingDependencyError(
            f"{__name__} needs verl 0.8 to 0.9.1: it is for verl itself, which imports it when a "
            "run names it as checkpoint_engine.custom_backend_module"
        ) from error
    found = {
        name: tuple(p for p in inspect.signature(method).parameters if p not in ("self", "cls"))
        for name in CheckpointEngine.__abstractmethods__
        if (method := getattr(CheckpointEngine, name))
    }
    unknown = {name: found.get(name) for name in KNOWN if found.get(name) not in KNOWN[name]}
    unknown |= {name: found[name] for name in found.keys() - KNOWN.keys()}
    if unknown:
        raise GymfastError(
            f"{describe('verl')}: CheckpointEngine has other methods than the known ones: "
            f"{unknown}; gymfast knows verl 0.8 to 0.9.1: install one, or set "
            "checkpoint_engine.backend to one of verl's own"
        )
    engine = type("GymfastEngine", (GymfastCheckpointEngine, CheckpointEngine), {})
    CheckpointEngineRegistry.register(BACKEND)(engine)


class GymfastCheckpointEngine:
    """On rank 0 of the trainer the publisher of the run, on rollout workers a copy that follows it.

    The other ranks of the trainer only take part in making each tensor. Not thread-safe.
    """

    def __init__(
        self, bucket_size: int, is_master: bool | None = None, **engine_kwargs: object
    ) -> None:
        """`is_master` is None on rollout workers; both sides need the same `engine_kwargs`.

        Raises ValueError for the options, and what `Publisher` and `Subscriber` raise.
        """
        del bucket_size  # whoever loads the tensors packs them
        self._options = RunOptions.of(engine_kwargs, _OPTIONS)
        self._stream = RunStream(self._options.publisher()) if is_master else None
        self._copy = self._options.follow() if is_master is None else None
        self._leader: RoundLeader | None = None
        self._member: RoundMember | None = None
        self._num_readers = 0

    def prepare(self) -> dict[str, Any]:
        """Where the readers of the next sync connect; empty unless this is the publisher."""
        self.finalize()
        if self._stream is None:
            return {}
        import ray

        self._leader = RoundLeader(ray.util.get_node_ip_address().strip("[]"))
        return {"ticket": msgspec.to_builtins(self._leader.ticket)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """What each worker is told by `init_process_group`: trainer ranks first."""
        num_readers = {"num_readers": [rollout_world_size] * actor_wg_world_size}
        tickets = [metadata[0]["ticket"]] * rollout_world_size
        return num_readers, {"ticket": tickets, "reader": list(range(rollout_world_size))}

    def init_process_group(
        self, num_readers: int = 0, ticket: dict[str, Any] | None = None, reader: int = 0
    ) -> None:
        """Raises ChannelError if this reader cannot reach the publisher."""
        self._num_readers = num_readers
        if ticket is not None:
            where = msgspec.convert(ticket, Ticket)
            self._member = RoundMember(where, reader, self._options.timeout_s)

    def finalize(self) -> None:
        """Ends the sync; a side that still waits for the other one gets an error."""
        for side in (self._leader, self._member):
            if side is not None:
                side.close()
        self._leader = self._member = None

    async def send_weights(
        self, weights: NamedTensors, global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Publishes all tensors, then has all readers take that version; None if not rank 0.

        Raises what `RunStream.publish` raises, ChainError if a reader failed.
        """
        import torch

        with torch.no_grad():
            if self._stream is None or self._leader is None:
                drain(weights)
                if self._stream is not None:
                    raise ChainError("send_weights was called before prepare")
                return None
            return self._publish(self._stream, self._leader, weights, global_steps)

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, Any]]:
        """All tensors of the published version, each on the accelerator of this process.

        Returns once every reader holds it; an error comes before verl has told its engine anything.
        Raises what `RoundMember.taking` and `CanonicalCopy.pull` raise.
        """
        if self._copy is None or self._member is None:
            raise ChainError("receive_weights was called before init_process_group, or not here")
        with self._member.taking(self._options.sync_timeout_s) as version:
            self._copy.pull(version, wait_s=self._options.timeout_s)
        _log.info("step %s is version %d, state %s", global_steps, version, self._copy.root[:16])
        return self._tensors(self._member)

    def _publish(
        self, stream: RunStream, leader: RoundLeader, weights: NamedTensors, step: int | None
    ) -> dict[str, float]:
        phases = Phases()
        try:
            with phases("publish"):
                report = stream.publish(weights)
        except BaseException as error:
            reason = f"the trainer published nothing: {type(error).__name__}: {error}"
            leader.call_off(reason, self._num_readers)
            raise
        with phases("settle"):
            leader.settle(report.version, self._num_readers, self._options.sync_timeout_s)
        _log.info("step %s is version %d, state %s", step, report.version, report.root[:16])
        return _metrics(report, phases.seconds)

    def _tensors(self, member: RoundMember) -> Iterator[tuple[str, Any]]:
        import torch

        assert self._copy is not None
        accelerator = torch.accelerator.current_accelerator()
        device = accelerator if torch.accelerator.is_available() else torch.device("cpu")
        for name, tensor in self._copy.tensors(self._copy.names, torch.empty(0)):
            if self._member is not member:
                raise ChainError("the sync ended while its tensors were being loaded")
            yield name, tensor.to(device, copy=True)


def _metrics(report: PublishReport, seconds: Mapping[str, float]) -> dict[str, float]:
    """The names are those of verl's own delta engine, as far as it has them."""
    num_bytes = report.frame_bytes + report.anchor_bytes
    values = {
        "changed_ratio": report.num_changed / max(1, report.num_units),
        "changed_elems": float(report.num_changed),
        "payload_mbytes": num_bytes / 2**20,
        "version": float(report.version),
        **{f"{phase}_seconds": passed_s for phase, passed_s in seconds.items()},
    }
    return {f"checkpoint_engine/{name}": value for name, value in values.items()}


register()
