"""Host memory of one trainer rank: counted before it is taken, refused with numbers."""

from __future__ import annotations

from gymfast.errors import BudgetError
from gymfast.sync.budget import available_bytes

_RESERVE_RATIO = 0.1  # of the available memory, left to everybody else


class HostBudget:
    """Bytes that a rank may hold for weight sync, and those it holds. Not thread-safe."""

    def __init__(self, limit_bytes: int | None) -> None:
        """None: what is available now, less a reserve; no limit where that is unknown."""
        available = available_bytes() if limit_bytes is None else None
        self._limit = limit_bytes
        if available is not None:
            self._limit = int(available * (1 - _RESERVE_RATIO))
        self.held_bytes = 0

    def take(self, num_bytes: int, what: str) -> None:
        """Counts bytes that are about to be allocated; raises BudgetError if they do not fit."""
        needed = self.held_bytes + num_bytes
        if self._limit is not None and needed > self._limit:
            raise BudgetError(
                f"{what} takes {num_bytes} bytes of host memory beside {self.held_bytes} held for "
                f"weight sync, the limit of this rank is {self._limit}: raise "
                "gymfast_host_memory_bytes in the file of --custom-config-path, or spread the "
                "source ranks over more hosts"
            )
        self.held_bytes = needed

    def give(self, num_bytes: int) -> None:
        """These bytes are free again."""
        self.held_bytes -= num_bytes
