"""Random numbers that depend on what they are for, never on what was drawn before.

A number is named by (seed, replication, entity, attempt, purpose, index): see docs/simulator.md
section 3. Two policies, or two engines, that ask for the same number get the same one.
"""

from __future__ import annotations

from enum import IntEnum

from gymfast import _core

MAX_SEED = 2**32 - 1
_MASK = 2**32 - 1


class Purpose(IntEnum):
    """What a number is for; part of its name, so a value never changes its meaning."""

    WORK = 0  # entity: the rollout
    THINK = 1  # entity: the rollout
    WORK_FAILS = 2  # entity: the rollout; value: whether, branch: when
    RETRY = 3  # entity: the rollout
    ARRIVAL = 4  # entity: the rollout
    TRAIN = 5  # entity: the step
    HANGS = 6  # entity: the rollout; value: hangs, branch: its completion is lost
    START_FAILS = 15  # entity: the sandbox
    API = 16  # 16 and above: a phase of a sandbox
    QUEUE = 17
    BOOT = 18
    SETUP = 19
    RESET = 20
    TEARDOWN = 21
    PREEMPTED = 22
    REFUSED = 23  # jitter; attempt: how often the creation was refused


class Draws:
    """Random numbers of one replication."""

    __slots__ = ("replication", "seed")

    def __init__(self, seed: int, replication: int = 0) -> None:
        for name, number in (("seed", seed), ("replication", replication)):
            if not 0 <= number <= MAX_SEED:
                raise ValueError(f"{name} is {number}, expected 0 to {MAX_SEED}")
        self.seed, self.replication = seed, replication

    def __call__(
        self, entity: int, attempt: int, purpose: int, index: int = 0
    ) -> tuple[float, float]:
        """Two independent numbers in (0, 1): the place in a law, and the branch of a mixture."""
        return _core.sim_draw(self.seed, self.replication, entity, attempt, purpose, index)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10; the engines use its twin in `gymfast._core`.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _MASK, (a >> 32) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def reference_draw(
    key: tuple[int, int], entity: int, attempt: int, purpose: int, index: int = 0
) -> tuple[float, float]:
    """What Draws(*key) returns, from `philox` above."""
    counter = (entity & _MASK, entity >> 32, attempt, purpose << 24 | index)
    w0, w1, w2, w3 = philox(counter, key)
    return _unit(w0, w1), _unit(w2, w3)


def _unit(low: int, high: int) -> float:
    """The middle of one of 2^52 equal parts of (0, 1)."""
    return (float((high << 32 | low) >> 12) + 0.5) * 2.0**-52
