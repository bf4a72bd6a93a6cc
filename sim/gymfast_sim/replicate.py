"""Many runs of one scenario, and how sure their mean is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from gymfast_sim.engine_simpy import simulate
from gymfast_sim.records import RunRecord
from gymfast_sim.scenario import Scenario


class Estimate(msgspec.Struct, frozen=True):
    """A mean over independent runs, with its standard error."""

    mean: float
    standard_error: float
    num_runs: int

    def agrees(self, exact: float, *, num_errors: float = 3.0) -> bool:
        """Whether a number lies within so many standard errors."""
        return abs(self.mean - exact) <= num_errors * self.standard_error


def estimate(numbers: Sequence[float]) -> Estimate:
    """The estimate from one number of each run. Raises ValueError for fewer than 2."""
    if len(numbers) < 2:
        raise ValueError(f"{len(numbers)} numbers, expected at least 2: one run has no error")
    mean = math.fsum(numbers) / len(numbers)
    variance = math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)
    return Estimate(mean, math.sqrt(variance / len(numbers)), len(numbers))


def replications(
    scenario: Scenario, num_runs: int, *, keep_trace: bool = False
) -> Iterable[RunRecord]:
    """Runs that differ in their random numbers only: replications 0, 1, ..."""
    for replication in range(num_runs):
        yield simulate(scenario, replication=replication, keep_trace=keep_trace)


def estimate_of(
    scenario: Scenario, num_runs: int, number: Callable[[RunRecord], float]
) -> Estimate:
    """The estimate of a number that each run has."""
    return estimate([number(record) for record in replications(scenario, num_runs)])
