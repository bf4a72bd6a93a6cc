"""The tensors of one trainer rank as the engines hold them."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gymfast.delta.hf_delta.stored import Stored, restore, store
from gymfast.delta.memory import CPU, PINNED, U8, allocated_bytes
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.delta.tensors import as_tensor
from gymfast.errors import CoverageError
from gymfast.integrations.device_twin import (
    DeviceSpec,
    DeviceTwin,
    check_place,
    choose_place,
    is_on_device,
)
from gymfast.integrations.host_budget import HostBudget

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Incoming:
    """A tensor as the trainer has it now: bytes in host memory, or a frame of what changed."""

    num_bytes: int
    data: U8 | None = None
    frame: bytes = b""


class RankSnapshot:
    """Bytes by tensor name. Encoding leaves them as they are; `promote` makes them the new ones.

    Tensors in CUDA memory have a twin there, or in pinned memory, with which they are compared on
    the device; of them only what changed crosses to the host.
    """

    def __init__(
        self, encoding: str, algorithm: str, budget: HostBudget, place: str = "auto"
    ) -> None:
        """`place` is that of gymfast_snapshot."""
        self._encoding, self._algorithm = encoding, algorithm
        self._budget = budget
        self._place = check_place(place)
        self._tensors: dict[str, U8] = {}
        self._on_device: dict[str, DeviceSpec] = {}
        self._twins: dict[str, DeviceTwin] = {}
        self._frames: dict[str, bytes] = {}
        self._is_pinned = False
        self.repeated: set[str] = set()
        """Names that the trainer exports more than once."""

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def clear(self) -> None:
        """Forgets all tensors."""
        self._budget.give(sum(map(self._host_bytes, self._tensors)))
        for table in (self._tensors, self._on_device, self._twins, self._frames):
            table.clear()
        self.repeated.clear()

    def seed(self, name: str, value: Any, base: Checkpoint) -> None:
        """Takes a tensor from the checkpoint that engines start from.

        One that is not there is taken as the trainer has it, with a warning. Raises CoverageError
        if the trainer exports another number of bytes than the checkpoint has.
        """
        if name in self._tensors:
            self.repeated.add(name)
            return
        tensor = as_tensor(value, name)
        self._budget.take(tensor.num_bytes, f"the snapshot of tensor {name!r}")
        if is_on_device(tensor):
            self._on_device[name] = DeviceSpec.of(tensor)
        if name not in base.names:
            _log.warning("tensor %r is not in %s: taken as the trainer has it", name, base.path)
            self._tensors[name] = tensor.copy(CPU).data
            return
        held = base.read(name)
        if held.num_bytes != tensor.num_bytes:
            raise CoverageError(
                f"tensor {name!r} has {held.num_bytes} bytes in {base.path} ({held.dtype} "
                f"{held.shape}), the trainer exports {tensor.num_bytes} ({tensor.dtype} "
                f"{tensor.shape}): --hf-checkpoint has to be the checkpoint that engines start from"
            )
        self._tensors[name] = held.data

    def seeded(self) -> None:
        """Makes the twins of all tensors that were seeded from a device.

        Raises BudgetError if there is no room for them, MissingDependencyError if no back end here
        works on the place that was asked for.
        """
        sizes: Counter[str] = Counter()
        for name, spec in self._on_device.items():
            sizes[spec.device] += self._tensors[name].size
        place = choose_place(self._place, sizes)
        if place == "host":
            return
        for name, spec in self._on_device.items():
            held = self._tensors[name]
            if place == "pinned":
                more = allocated_bytes(held.size, PINNED) - held.size
                self._budget.take(more, f"tensor {name!r} in pinned memory")
            self._twins[name] = DeviceTwin(name, spec, held, place)
            self._tensors[name] = self._twins[name].held
        self._is_pinned = place == "pinned"

    def take(self, name: str, value: Any) -> Incoming:
        """What there is to know of a tensor, for other threads; works on the current stream."""
        twin = self._twins.get(name)
        if twin is None:
            data = to_host(value, name)
            return Incoming(data.size, data)
        frame = twin.difference(value)
        self._frames[name] = frame
        return Incoming(self._tensors[name].size, None, frame)

    def bytes_of(self, name: str, incoming: Incoming) -> U8:
        """The bytes of a tensor that was taken, in host memory. Safe on several threads."""
        if incoming.data is not None:
            return incoming.data
        return self._twins[name].after(incoming.frame) if incoming.frame else self._tensors[name]

    def encode(self, name: str, data: U8) -> Stored | None:
        """What changed in a tensor; None if nothing did. Safe on several threads.

        Raises CoverageError for a tensor that the snapshot does not have, or not in this size.
        """
        held = self._tensors.get(name)
        if held is None or held.size != data.size:
            found = "is new" if held is None else f"had {held.size} bytes and has {data.size}"
            raise CoverageError(
                f"tensor {name!r} {found}: a delta cannot say that; begin a new run, whose "
                "--hf-checkpoint has the tensor as it is now"
            )
        if held is data:  # of a device that found no difference
            return None
        return store(name, held, data, self._encoding, self._algorithm)

    def promote(self, changes: dict[str, Stored], threads: int) -> None:
        """Makes what was encoded the state of this snapshot.

        What is done is taken out of `changes`: a second call, after an error, does the rest.
        """

        def apply(name: str) -> str:
            restore(changes[name], self._tensors[name], self._encoding)
            return name

        here = [name for name in changes if name not in self._twins]
        with ThreadPoolExecutor(threads, "gymfast-promote") as pool:
            jobs = [pool.submit(apply, name) for name in here]
        for job in jobs:
            if job.exception() is None:
                del changes[job.result()]
        for name in [name for name in changes if name in self._twins]:
            self._twins[name].promote(self._frames[name])
            del changes[name]
        self._frames.clear()
        for job in jobs:
            job.result()

    def abandon(self) -> None:
        """Forgets what was taken and is not promoted."""
        self._frames.clear()

    def _host_bytes(self, name: str) -> int:
        size = self._tensors[name].size
        is_pinned = self._is_pinned and name in self._twins
        return allocated_bytes(size, PINNED) if is_pinned else size


def to_host(value: Any, name: str) -> U8:
    """The bytes of a tensor in host memory: a view where it lies there, else a copy."""
    tensor = as_tensor(value, name)
    data: U8 = tensor.data if tensor.place == CPU else tensor.copy(PINNED).on_host().data
    return data
