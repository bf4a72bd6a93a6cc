"""A receiver process of the demo: follows the store, serves what it holds, tells what it serves."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gymfast.delta import Tensor
from gymfast.demo import events
from gymfast.demo.audit import NamedBytes, fingerprint, read_checkpoint
from gymfast.demo.options import EMBEDDING, HEAD, RUN, DemoOptions, weight_shapes
from gymfast.demo.processes import end_with_parent
from gymfast.errors import GymfastError

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
    def target(self) -> Any:
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

    def target(self) -> Any:
        from gymfast.sync import LiveTarget

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

    def target(self) -> Any:
        from gymfast.sync import CheckpointTarget

        return CheckpointTarget(self.path)

    def read(self) -> list[NamedBytes]:
        return read_checkpoint(self.path)


class HoldPoint:
    """Stops the process for good at its first rename inside the apply of one version.

    The file operation is seen through an audit hook, so that no code of gymfast knows of it.
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._is_armed = False
        if version:
            sys.addaudithook(self._hook)

    def arm(self, version: int) -> None:
        """The apply of `version` begins."""
        self._is_armed = bool(self._version) and version >= self._version
        self._current = version

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_armed and event == "os.rename":
            self._is_armed = False
            name = Path(str(arguments[1])).name
            events.tell(events.Holding(version=self._current, at_file=name))
            threading.Event().wait()  # until SIGKILL


class Receiver:
    """Polls, fetches, applies, serves, for ever."""

    def __init__(self, plan: ReceiverPlan) -> None:
        from gymfast.sync import Subscriber

        self.weights = LiveWeights(plan) if plan.name == "live" else CheckpointWeights(plan)
        self.hold = HoldPoint(plan.hold_version)
        self.subscriber = Subscriber(
            plan.store_path, RUN, self.weights.target(), reader_id=plan.name
        )
        events.tell(events.Attached(version=self.subscriber.version, is_restart=plan.is_restart))

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
        before = self.subscriber.version
        newest = self.subscriber.poll()
        if newest is None or newest == before:
            return False
        self.subscriber.fetch(newest)
        self.hold.arm(newest)
        start_s = time.perf_counter()
        report = self.subscriber.apply()
        apply_s = time.perf_counter() - start_s
        events.tell(
            events.Served(
                version=newest,
                root=report.new_root.hex(),
                fingerprint=fingerprint(self.weights.read()),
                num_versions=newest - (-1 if before is None else before),
                apply_s=apply_s,
                kept_pointers=self.weights.kept_pointers(),
            )
        )
        return True

    def _refuse(self, error: GymfastError) -> None:
        events.tell(
            events.Refused(
                version=self.subscriber.version, error=type(error).__name__, message=str(error)
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
