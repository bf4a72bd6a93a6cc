"""What one process of the benchmark is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One row: who updates, whether the server has the loader, and which tensors change."""

    folder: str
    source: str
    is_gymfast: bool
    has_loader: bool
    where: str
    density: float
