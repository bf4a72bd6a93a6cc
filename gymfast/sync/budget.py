"""Memory: what a publisher or subscriber needs, what there is, and refusal with numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gymfast.errors import BudgetError

SECTION_BYTES = 128 << 20
"""Bytes of the sections that are under way at once: new values, block tables and copies of 2^23
units, twice. Source: docs/wire-format.md section 10."""
_RESERVE_RATIO = 0.1  # of the available memory, left to everybody else
_LEAST_PIECE_BYTES = 256 << 10
_COPIES = 2  # of a piece: as it comes, and as it is handed over


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes a publisher needs: its snapshot, buffers, and what is left for the way back."""

    snapshot_bytes: int
    buffer_bytes: int
    limit_bytes: int

    @property
    def undo_bytes(self) -> int:
        """Bytes that the way back from a version may take; then an anchor is published instead."""
        return self.limit_bytes - self.snapshot_bytes - self.buffer_bytes


@dataclass(frozen=True)
class Reading:
    """How frames are read: in pieces of so many bytes, with so many more under way."""

    num_ahead: int
    piece_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Bytes held beside those that were handed over."""
        return _COPIES * (self.num_ahead + 1) * self.piece_bytes

    @classmethod
    def within(cls, room_bytes: int | None, num_ahead: int, piece_bytes: int) -> Reading:
        """The quickest way to read in that memory (None: any), at most so much ahead.

        Where there is no room for one piece they are smaller: a quarter MiB at least.
        """
        num_pieces = num_ahead + 1
        if room_bytes is not None:
            num_pieces = min(num_pieces, room_bytes // (_COPIES * piece_bytes))
            if num_pieces == 0:
                return cls(0, min(piece_bytes, max(room_bytes // _COPIES, _LEAST_PIECE_BYTES)))
        return cls(num_pieces - 1, piece_bytes)


def plan_memory(
    snapshot_bytes: int,
    object_bytes: int,
    budget_bytes: int | None,
    resident_bytes: int = 0,
    put_bytes: int = 0,
) -> MemoryPlan:
    """The plan for a snapshot of that size within the budget (None: the memory there is).

    `resident_bytes` is what the snapshot has already, `put_bytes` what a put to the store takes
    beside the object.
    Raises BudgetError with the numbers if snapshot and buffers do not fit.
    """
    free = available_bytes()
    available = None if free is None else free + resident_bytes
    if budget_bytes is None:
        limit = None if available is None else int(available * (1 - _RESERVE_RATIO))
        what = f"of {available} bytes available {limit} may be used"
    else:
        limit, what = budget_bytes, f"the budget is {budget_bytes} bytes"
    buffer_bytes = object_bytes + put_bytes + SECTION_BYTES
    plan = MemoryPlan(snapshot_bytes, buffer_bytes, limit or 2**62)
    if limit is not None and plan.undo_bytes < 0:
        raise BudgetError(
            f"publishing needs {snapshot_bytes} bytes for the snapshot, {object_bytes} for an "
            f"object, {put_bytes} for its upload and {SECTION_BYTES} for sections, "
            f"{snapshot_bytes + buffer_bytes} in all, but {what}: raise memory_budget_bytes, lower "
            "object_bytes, or publish fewer tensors"
        )
    return plan


def require_staging(num_bytes: int, limit_bytes: int | None, where: str) -> int | None:
    """Bytes that are left if frames of that size are staged; None if nobody knows.

    Raises BudgetError with the numbers if they may not be.
    """
    limit = available_bytes() if limit_bytes is None else limit_bytes
    if limit is not None and num_bytes > limit:
        raise BudgetError(
            f"frames of {num_bytes} bytes are to be staged in {where}, the limit is {limit} bytes: "
            "raise max_staging_bytes, or give a staging_dir on disk"
        )
    return None if limit is None else limit - num_bytes


def available_bytes() -> int | None:
    """Memory this process may still get, of machine and control group; None if unknown."""
    found = [value for value in (_of_machine(), _of_group()) if value is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    text = _read(Path("/proc/meminfo"))
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_group() -> int | None:
    group = Path("/sys/fs/cgroup")
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if not limit.isdigit() or not used.isdigit():
        return None
    return max(0, int(limit) - int(used))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
