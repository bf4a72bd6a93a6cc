"""The tensors of one trainer rank as the engines hold them."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gymfast.delta.hf_delta.stored import Stored, restore, store
from gymfast.delta.memory import CPU, PINNED, U8
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.delta.tensors import as_tensor
from gymfast.errors import CoverageError
from gymfast.integrations.host_budget import HostBudget

_log = logging.getLogger(__name__)


class RankSnapshot:
    """Bytes by tensor name. Encoding leaves them as they are; `promote` makes them the new ones."""

    def __init__(self, encoding: str, algorithm: str, budget: HostBudget) -> None:
        self._encoding, self._algorithm = encoding, algorithm
        self._budget = budget
        self._tensors: dict[str, U8] = {}
        self.repeated: set[str] = set()
        """Names that the trainer exports more than once."""

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def clear(self) -> None:
        """Forgets all tensors."""
        self._budget.give(sum(data.size for data in self._tensors.values()))
        self._tensors.clear()
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
        return store(name, held, data, self._encoding, self._algorithm)

    def promote(self, changes: dict[str, Stored], threads: int) -> None:
        """Makes what was encoded the state of this snapshot.

        What is done is taken out of `changes`: a second call, after an error, does the rest.
        """

        def apply(name: str) -> str:
            restore(changes[name], self._tensors[name], self._encoding)
            return name

        with ThreadPoolExecutor(threads, "gymfast-promote") as pool:
            jobs = [pool.submit(apply, name) for name in changes]
        for job in jobs:
            if job.exception() is None:
                del changes[job.result()]
        for job in jobs:
            job.result()


def to_host(value: Any, name: str) -> U8:
    """The bytes of a tensor in host memory: a view where it lies there, else a copy."""
    tensor = as_tensor(value, name)
    data: U8 = tensor.data if tensor.place == CPU else tensor.copy(PINNED).on_host().data
    return data
