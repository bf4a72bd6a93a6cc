"""The checkpoint engine of verl: a run of a store between its trainer and its rollout workers.

    actor_rollout_ref.rollout.checkpoint_engine.backend=gymfast
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=gymfast.integrations.verl

verl imports this module, which registers the engine. See docs/integrations/verl.md.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gymfast.errors import ChainError, GymfastError, MissingDependencyError
from gymfast.integrations.canonical import CanonicalCopy
from gymfast.integrations.phases import Phases
from gymfast.integrations.rebind import describe
from gymfast.integrations.run_options import RunOptions
from gymfast.integrations.run_stream import NamedTensors, RunStream, drain
from gymfast.integrations.sync_round import RoundLeader, RoundMember, Ticket
from gymfast.sync import PublishReport

Metrics = dict[str, float]
KNOWN: Mapping[str, Sequence[tuple[str, ...]]] = {
    "prepare": [("self",)],
    "build_topology": [
        ("trainer_world_size", "rollout_world_size", "metadata"),  # 0.8
        ("actor_wg_world_size", "rollout_world_size", "metadata"),
    ],
    "init_process_group": [("self", "kwargs")],
    "finalize": [("self",)],
    "send_weights": [("self", "weights", "global_steps")],
    "receive_weights": [("self", "global_steps")],
}
"""The abstract methods of verl's `CheckpointEngine`, with their parameters in known versions."""
_OPTIONS = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gymfast"
_log = logging.getLogger(__name__)


def register() -> None:
    """Makes the engine known to verl.

    Raises MissingDependencyError without verl, GymfastError for a verl whose interface is unknown.
    """
    try:
        verl = importlib.import_module("verl.checkpoint_engine")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{__name__} needs verl 0.8 to 0.9.1, which imports it when a run names it as "
            f"checkpoint_engine.custom_backend_module: {error}"
        ) from error
    base = verl.CheckpointEngine
    methods = base.__abstractmethods__
    found = {n: tuple(inspect.signature(getattr(base, n)).parameters) for n in methods}
    names = sorted(found.keys() | KNOWN.keys())
    if unknown := {n: found.get(n) for n in names if found.get(n) not in KNOWN.get(n, ())}:
        raise GymfastError(
            f"{describe('verl')}: CheckpointEngine has other methods than the known ones: "
            f"{unknown}; gymfast knows verl 0.8 to 0.9.1: install one, or set "
            "checkpoint_engine.backend to one of verl's own"
        )
    engine = type("GymfastEngine", (GymfastCheckpointEngine, base), {})
    verl.CheckpointEngineRegistry.register("gymfast")(engine)


class GymfastCheckpointEngine:
    """On rank 0 of the trainer the publisher of the run, on rollout workers a copy that follows it.

    The other ranks of the trainer only take part in making each tensor. Not thread-safe.
    """

    wire_format = "named_tensors"  # pairs of name and whole tensor

    def __init__(self, bucket_size: int, is_master: bool | None = None, **options: object) -> None:
        """`is_master` is None on rollout workers; both sides need the same options.

        Raises ValueError for the options, and what `Publisher` and `Subscriber` raise.
        """
        del bucket_size  # whoever loads the tensors packs them
        self._options = RunOptions.of(options, _OPTIONS)
        self._stream = RunStream(self._options.publisher()) if is_master else None
        self._copy = self._options.follow() if is_master is None else None
        self._leader: RoundLeader | None = None
        self._member: RoundMember | None = None
        self._num_readers = 0
        self._needs_anchor = False

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
        tickets = [metadata[0]["ticket"]] * rollout_world_size
        readers = {"ticket": tickets, "reader": list(range(rollout_world_size))}
        return {"num_readers": [rollout_world_size] * actor_wg_world_size}, readers

    def init_process_group(
        self, num_readers: int = 0, ticket: dict[str, Any] | None = None, reader: int = 0
    ) -> None:
        """Raises ChannelError if this reader cannot reach the publisher."""
        self._num_readers = num_readers
        if ticket:
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
    ) -> Metrics | None:
        """Publishes all tensors, then has all readers take that version; None if not rank 0.

        Raises what `RunStream.publish` raises, ChainError if a reader failed.
        """
        import torch

        with torch.no_grad():
            if self._stream is None:
                drain(weights)
                return None
            return self._publish(self._stream, weights, global_steps)

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, Any]]:
        """All tensors of the published version, each on the accelerator of this process.

        Returns once every reader holds it; an error comes before verl has told its engine anything.
        Raises what `RoundMember.taking` and `CanonicalCopy.pull` raise.
        """
        if self._copy is None or self._member is None:
            raise ChainError("receive_weights was called before init_process_group, or not here")
        with self._member.taking(self._options.sync_timeout_s) as version:
            self._copy.pull(version, timeout_s=self._options.timeout_s)
        _log.info("step %s is version %d, state %s", global_steps, version, self._copy.root[:16])
        return self._tensors(self._copy, self._member)

    def _publish(self, stream: RunStream, weights: NamedTensors, step: int | None) -> Metrics:
        leader, phases = self._leader, Phases()
        if leader is None:
            raise ChainError("send_weights was called before prepare")
        try:
            with phases("publish"):
                report = stream.publish(weights, anchor=self._needs_anchor)
        except BaseException as error:
            reason = f"the trainer published nothing: {type(error).__name__}: {error}"
            leader.call_off(reason, self._num_readers)
            raise
        self._needs_anchor = True  # unless all readers take it: a frame may be damaged
        with phases("settle"):
            leader.settle(report.version, self._num_readers, self._options.sync_timeout_s)
        self._needs_anchor = False
        _log.info("step %s is version %d, state %s", step, report.version, report.root[:16])
        return _metrics(report, phases.seconds)

    def _tensors(self, copy: CanonicalCopy, member: RoundMember) -> Iterator[tuple[str, Any]]:
        import torch

        device = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        )
        for name, tensor in copy.tensors(copy.names, torch.empty(0)):
            if self._member is not member:
                raise ChainError("the sync ended while its tensors were being loaded")
            yield name, tensor.to(device, copy=True)


def _metrics(report: PublishReport, seconds: Mapping[str, float]) -> Metrics:
    """The names are those of verl's own delta engine, as far as it has them."""
    values = {
        "changed_ratio": report.num_changed / max(1, report.num_units),
        "changed_elems": report.num_changed,
        "payload_mbytes": (report.frame_bytes + report.anchor_bytes) / 2**20,
        "version": report.version,
        **{f"{phase}_seconds": passed_s for phase, passed_s in seconds.items()},
    }
    return {f"checkpoint_engine/{name}": float(value) for name, value in values.items()}


register()
