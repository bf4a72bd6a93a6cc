"""A receiver process of the demo: follows the store, serves what it holds, tells what it serves."""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path

import msgspec
import numpy as np

from gymfast.delta import Tensor
from gymfast.demo import events
from gymfast.demo.audit import NamedBytes, fingerprint, read_checkpoint
from gymfast.demo.holding import HoldPoint
from gymfast.demo.options import EMBEDDING, HEAD, RUN, DemoOptions, weight_shapes
from gymfast.demo.processes import end_with_parent
from gymfast.errors import GymfastError
from gymfast.sync import CheckpointTarget, LiveTarget, Subscriber, Target

POLL_S = 0.05
RETRY_S = 0.4


class ReceiverPlan(msgspec.Struct, frozen=True):
    """What a receiver process is started with; `hold_version` 0 means never."""

    name: str
    store_path: str
    checkpoint_path: str
    options: DemoOptions
    is_restart: bool = False
    hold_version: int = 0


class Weights(ABC):
    """What a receiver serves from, and a way to read it that shares nothing with the codec."""

    @abstractmethod
    def target(self) -> Target:
        """The target for gymfast.sync.Subscriber."""

    @abstractmethod
    def read(self) -> list[NamedBytes]:
        """Names and bytes of everything held."""

    def kept_pointers(self) -> bool | None:
        """True if all tensors are where they were at the start; None where that means nothing."""
        return None


class LiveWeights(Weights):
    """Tensors in memory, allocated once, as an engine's are; the head shares the embedding."""

    def __init__(self, plan: ReceiverPlan) -> None:
        self.tensors: dict[str, Tensor] = {}
        for name, dims in weight_shapes(plan.options.shape).items():
            data = np.zeros(2 * int(np.prod(dims)), np.uint8)
            self.tensors[name] = Tensor("BF16", dims, data)
        self.tensors[HEAD] = self.tensors[EMBEDDING]
        self._memory = {name: tensor.data for name, tensor in self.tensors.items()}
        self._addresses = self._current_addresses()

    def target(self) -> Target:
        return LiveTarget(self.tensors)

    def read(self) -> list[NamedBytes]:
        return [(name, data.data) for name, data in self._memory.items()]

    def kept_pointers(self) -> bool | None:
        return self._current_addresses() == self._addresses

    def _current_addresses(self) -> dict[str, int]:
        return {name: tensor.address for name, tensor in self.tensors.items()}


class CheckpointWeights(Weights):
    """A safetensors checkpoint on the receiver's disk."""

    def __init__(self, plan: ReceiverPlan) -> None:
        self.path = Path(plan.checkpoint_path)

    def target(self) -> Target:
        return CheckpointTarget(self.path)

    def read(self) -> list[NamedBytes]:
        return read_checkpoint(self.path)


class LastWarning(logging.Handler):
    """Remembers the last warning: why an object was refused."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Take the text of a record."""
        self._text = record.getMessage()

    def take(self) -> str:
        """The last warning since the last call; empty if there was none."""
        text, self._text = self._text, ""
        return text


class Receiver:
    """Polls, fetches, applies, serves, for ever."""

    def __init__(self, plan: ReceiverPlan) -> None:
        is_live = plan.name == "live"
        self.weights: Weights = LiveWeights(plan) if is_live else CheckpointWeights(plan)
        self.hold = HoldPoint(Path(plan.checkpoint_path), plan.hold_version)
        self.subscriber = Subscriber(
            plan.store_path, RUN, self.weights.target(), reader_id=plan.name
        )
        self.warnings = LastWarning()
        logging.getLogger("gymfast").addHandler(self.warnings)
        version = self.subscriber.version
        events.tell(events.Attached(version=version, is_restart=plan.is_restart))
        if version is not None:
            self._serve(version, self.subscriber.root or "", num_versions=0, apply_s=0.0)

    def run(self) -> None:
        """Follow the store until the process is ended."""
        while True:
            try:
                is_idle = not self._step()
            except GymfastError as error:
                self._refuse(error)
                time.sleep(RETRY_S)
            else:
                if is_idle:
                    time.sleep(POLL_S)

    def _step(self) -> bool:
        """True if a newer version was there and is served now."""
        newest = self.subscriber.poll()
        if newest is None or newest == self.subscriber.version:
            return False
        self.subscriber.fetch(newest)
        self.hold.arm(newest)
        report = self.subscriber.apply()
        self._serve(
            report.version,
            report.root,
            num_versions=max(report.num_deltas, 1),
            apply_s=report.seconds.apply + report.seconds.check,
        )
        return True

    def _serve(self, version: int, root: str, *, num_versions: int, apply_s: float) -> None:
        events.tell(
            events.Served(
                version=version,
                root=root,
                fingerprint=fingerprint(self.weights.read()),
                num_versions=num_versions,
                apply_s=apply_s,
                kept_pointers=self.weights.kept_pointers(),
            )
        )

    def _refuse(self, error: GymfastError) -> None:
        events.tell(
            events.Refused(
                version=self.subscriber.version,
                error=type(error).__name__,
                message=str(error),
                warning=self.warnings.take(),
            )
        )


def main(arguments: list[str]) -> int:
    """Run a receiver: the argument is its ReceiverPlan as JSON."""
    end_with_parent()
    plan = msgspec.json.decode(arguments[0], type=ReceiverPlan)
    try:
        Receiver(plan).run()
    except GymfastError as error:
        events.tell(events.Failed(error=type(error).__name__, message=str(error)))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
