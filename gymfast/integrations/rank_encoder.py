"""One pass over the tensors of a rank: what changed, encoded on several threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from gymfast.delta.hf_delta.stored import Stored
from gymfast.errors import GymfastError
from gymfast.integrations.host_budget import HostBudget
from gymfast.integrations.rank_snapshot import Incoming, RankSnapshot

Add = Callable[[str, Any], None]
Walk = Callable[[Add], None]
"""Calls `add` for every tensor of this rank, in a walk that all ranks make together."""


@dataclass
class Encoded:
    """Sizes of all tensors in bytes, the changed ones, and strong digests of those ranks share."""

    sizes: dict[str, int] = field(default_factory=dict)
    changes: dict[str, Stored] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)


def walk_all(walk: Walk, add: Add) -> None:
    """Passes every tensor of a walk to `add`; raises its first error once the walk is over.

    The other ranks take part in the walk: one that is left in the middle would hold them up.
    """
    failures: list[Exception] = []

    def careful_add(name: str, value: Any) -> None:
        if not failures:
            try:
                add(name, value)
            except Exception as error:  # noqa: BLE001 - raised at the end of the walk
                failures.append(error)

    walk(careful_add)
    if failures:
        raise failures[0]


class RankEncoder:
    """Encodes tensors as they come, at most two per thread ahead."""

    def __init__(
        self, snapshot: RankSnapshot, shared: set[str], threads: int, budget: HostBudget
    ) -> None:
        self._snapshot, self._shared, self._budget = snapshot, shared, budget
        self._max_jobs = 2 * threads
        self._pool = ThreadPoolExecutor(threads, "gymfast-encode")
        self._jobs: deque[tuple[str, Future[tuple[Stored | None, str]]]] = deque()
        self._encoded = Encoded()

    def run(self, walk: Walk) -> Encoded:
        """What changed in the tensors of a walk."""
        with self._pool:
            walk_all(walk, self._add)
            while self._jobs:
                self._collect()
        return self._encoded

    def _add(self, name: str, value: Any) -> None:
        if len(self._jobs) == self._max_jobs:
            self._collect()
        incoming = self._snapshot.take(name, value)
        self._encoded.sizes[name] = incoming.num_bytes
        self._budget.take(len(incoming.frame), f"the change list of tensor {name!r}")
        self._jobs.append((name, self._pool.submit(self._encode, name, incoming)))

    def _encode(self, name: str, incoming: Incoming) -> tuple[Stored | None, str]:
        data = self._snapshot.bytes_of(name, incoming)
        digest = ""
        if name in self._shared:
            digest = blake2b(data.data, digest_size=16).hexdigest()
        return self._snapshot.encode(name, data), digest

    def _collect(self) -> None:
        name, job = self._jobs.popleft()
        change, digest = job.result()
        if digest and self._encoded.shared.setdefault(name, digest) != digest:
            raise GymfastError(
                f"tensor {name!r} was exported twice with different bytes: nothing was published; "
                "the conversion to Hugging Face names has to be corrected"
            )
        if change is not None and name not in self._encoded.changes:
            self._budget.take(len(change.frame), f"the frame of tensor {name!r}")
            self._encoded.changes[name] = change
