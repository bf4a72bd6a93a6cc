"""The time of a transfer in buckets through stages, and the bucket that makes it shortest.

Source: Hockney's alpha-beta model per stage; the formulas are derived in docs/transfer.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One step of every bucket: gather, pack, a hop, load. `fixed_s` a bucket, then a rate."""

    name: str
    fixed_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.fixed_s < math.inf or not self.bytes_per_s > 0:
            raise ValueError(
                f"stage {self.name!r} has fixed_s {self.fixed_s} and bytes_per_s "
                f"{self.bytes_per_s}, expected 0 or more, and more than 0"
            )

    def bucket_s(self, bucket_bytes: float) -> float:
        """Seconds of one bucket in this stage."""
        return self.fixed_s + bucket_bytes / self.bytes_per_s


def pipeline_s(
    num_bytes: float,
    bucket_bytes: float,
    stages: Sequence[Stage],
    *,
    depth: int = 2,
    ack_s: float = 0.0,
) -> float:
    """Seconds from the first byte to the last bucket out of the last stage.

    At most `depth` buckets are between the first stage and their acknowledgement, which takes
    `ack_s`. The last bucket counts as what it holds.
    Raises ValueError for no stage, or a bucket or depth below 1.
    """
    _check(bucket_bytes, stages, depth)
    if num_bytes <= 0:
        return 0.0
    num_full, rest_bytes = divmod(num_bytes, bucket_bytes)
    seconds = [stage.bucket_s(bucket_bytes) for stage in stages]
    period_s = max(*seconds, (sum(seconds) + ack_s) / depth)
    if not num_full:
        return sum(stage.bucket_s(rest_bytes) for stage in stages)
    whole_s = sum(seconds) + (num_full - 1) * period_s
    if not rest_bytes:
        return whole_s
    return whole_s + max(stage.bucket_s(rest_bytes) for stage in stages)


def best_bucket(
    num_bytes: float,
    stages: Sequence[Stage],
    *,
    depth: int = 2,
    ack_s: float = 0.0,
    limits: tuple[int, int] = (16 << 20, 1 << 30),
    alignment: int = 1 << 20,
    slack_ratio: float = 0.005,
) -> int:
    """The smallest bucket in bytes, within the limits, whose pipeline_s is about the shortest.

    About: longer by `slack_ratio` at most; the optimum is flat, and buckets take memory. A
    multiple of `alignment`. Raises ValueError as pipeline_s does.
    """
    low, high = limits
    _check(low, stages, depth)
    candidates = {low, high}
    steps = 64
    for i in range(steps + 1):
        size = low * (high / low) ** (i / steps)
        candidates.add(min(high, max(low, round(size / alignment) * alignment)))

    seconds = {
        size: pipeline_s(num_bytes, size, stages, depth=depth, ack_s=ack_s) for size in candidates
    }
    limit_s = min(seconds.values()) * (1 + slack_ratio)
    return min(size for size, time_s in seconds.items() if time_s <= limit_s)


def _check(bucket_bytes: float, stages: Sequence[Stage], depth: int) -> None:
    if not stages:
        raise ValueError("a transfer without stages has no time: name at least the link")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, expected 1 or more")
    if depth < 1:
        raise ValueError(f"depth is {depth}, expected 1 or more")
