"""Seconds of the phases of an update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Phases:
    """Adds up the seconds spent in named phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Counts what runs inside, also if it raises."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            passed_s = time.perf_counter() - start_s
            self.seconds[name] = self.seconds.get(name, 0.0) + passed_s


def longest(seconds: Sequence[dict[str, float]]) -> dict[str, float]:
    """For every phase the seconds of the rank that took longest."""
    merged: dict[str, float] = {}
    for one in seconds:
        for name, value in one.items():
            merged[name] = max(value, merged.get(name, 0.0))
    return merged
