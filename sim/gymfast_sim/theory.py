"""What is known in closed form: the truth that the engines are tested against.

Sources: Kleinrock, "Queueing Systems" (1975) for Erlang's formulas and machine repair; Halfin and
Whitt (1981) for square-root staffing; David and Nagaraja, "Order Statistics" (2003) for maxima.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gymfast_sim.laws import Law


def fixed_makespan_s(num_rollouts: int, num_sandboxes: int, work_s: float) -> float:
    """The step of rollouts that all take the same, on sandboxes that are ready (G1)."""
    return -(-num_rollouts // num_sandboxes) * work_s


def slot_s(n: int, rate_per_s: float, burst: int) -> float:
    """When the n-th creation, from 1, passes a token bucket that was full (G5)."""
    return max(0.0, (n - burst) / rate_per_s)


def reuse_ramp_s(
    num_rollouts: int, rate_per_s: float, burst: int, *, start_s: float, work_s: float
) -> float:
    """The step on sandboxes that are reused while more of them come (G31), to a nanosecond."""
    slots = [slot_s(n, rate_per_s, burst) for n in range(1, num_rollouts + 1)]
    first = np.array(slots) + start_s
    low, high = 0.0, first[-1] + work_s
    while high - low > 1e-9:
        middle = (low + high) / 2
        done = np.floor(np.maximum(middle - first, 0) / work_s).sum()
        low, high = (low, middle) if done >= num_rollouts else (middle, high)
    return float(high)


def exponential_makespan_s(num_rollouts: int, num_sandboxes: int, mean_s: float) -> float:
    """The expected step of exponential rollouts on ready sandboxes (G9)."""
    harmonic = math.fsum(1 / i for i in range(1, num_sandboxes + 1))
    return (num_rollouts - num_sandboxes) / num_sandboxes * mean_s + harmonic * mean_s


def expected_max_s(law: Law, n: int, least_s: float = 0.0) -> float:
    """The expected longest of n and of least_s (G11, G12, G24): the integral of 1 - F^n."""
    return least_s + _integral_s(law, least_s, lambda p: 1 - p**n)


def expected_order_s(law: Law, n: int, k: int) -> float:
    """The expected k-th shortest of n (G27): the integral of P(fewer than k of n are over)."""
    ways = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
                     for i in range(k)])  # fmt: skip
    counts = np.arange(k)

    def is_under_way(p: float) -> float:
        if not 0 < p < 1:
            return 1.0 - p
        logs = ways + counts * math.log(p) + (n - counts) * math.log1p(-p)
        return float(min(np.exp(logs).sum(), 1.0))

    return _integral_s(law, 0.0, is_under_way)


def _integral_s(law: Law, low_s: float, of: Callable[[float], float]) -> float:
    """The integral of a function of the distribution from low_s on."""
    top = law.max_s
    if not math.isfinite(top):
        top = law.quantile(1 - 1e-13)
    if top <= low_s:
        return 0.0
    edges = low_s + np.concatenate([[0.0], np.geomspace(top * 1e-6, top - low_s, 2_000)])
    nodes, weights = np.polynomial.legendre.leggauss(6)
    total = 0.0
    for low, high in itertools.pairwise(edges):
        half = (high - low) / 2
        places = low + half * (nodes + 1)
        total += half * sum(w * of(law.cdf(float(x))) for w, x in zip(weights, places, strict=True))
    return float(total)


def failing_makespan_s(num_rollouts: int, work_s: float, fail_ratio: float) -> float:
    """The expected step with a sandbox ready for each attempt, which dies at a uniform point (G14).

    The time of k lost attempts is a sum of k uniform parts (Irwin and Hall).
    """
    p, depth, points = fail_ratio, 9, 4_500
    places = np.linspace(0, depth, points + 1)
    single = np.zeros_like(places)
    for k in range(depth):
        single += (1 - p) * p**k * np.array([_irwin_hall(k, x) for x in places])
    above = 1 - (single / (1 - p**depth)) ** num_rollouts
    trapezoid = (above[:-1] + above[1:]).sum() / 2 * (depth / points)
    return work_s * (1 + float(trapezoid))


def expected_attempts(fail_ratio: float) -> float:
    """Attempts of a rollout that is tried until it is done (G13)."""
    return 1 / (1 - fail_ratio)


def some_needs_ratio(num_rollouts: int, fail_ratio: float, attempts: int) -> float:
    """The probability that some rollout needs at least so many attempts (G13)."""
    return 1 - (1 - fail_ratio ** (attempts - 1)) ** num_rollouts


class Queue(NamedTuple):
    """A queue in steady state."""

    wait_ratio: float  # of those who have to wait
    wait_s: float  # the mean, of all
    length: float  # the mean number in the system


def erlang_b(load: float, num_servers: int) -> float:
    """The part of arrivals that finds all servers busy, where nobody waits (G17, G18)."""
    blocked = 1.0
    for n in range(1, num_servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked


def erlang_c(rate_per_s: float, work_s: float, num_servers: int) -> Queue:
    """M/M/c (G16, G17). Raises ValueError if the servers cannot do the work."""
    load = rate_per_s * work_s
    if load >= num_servers:
        raise ValueError(f"{num_servers} servers for a load of {load}: the queue has no end")
    blocked = erlang_b(load, num_servers)
    waits = num_servers * blocked / (num_servers - load * (1 - blocked))
    wait_s = waits * work_s / (num_servers - load)
    return Queue(waits, wait_s, load + rate_per_s * wait_s)


def smallest_pool(load: float, wait_ratio: float) -> int:
    """The fewest servers at which at most that part of arrivals waits (G18)."""
    num_servers = math.floor(load) + 1
    while erlang_c(load, 1.0, num_servers).wait_ratio > wait_ratio:
        num_servers += 1
    return num_servers


class MachineRepair(NamedTuple):
    """Episodes that think, and share sandboxes for their actions (G21) and GPU slots (G22)."""

    actions_per_s: float
    wait_s: float
    wait_ratio: float
    gpu_wait_s: float


def machine_repair(
    num_episodes: int,
    think_s: float,
    work_s: float,
    num_sandboxes: int,
    num_slots: int | None = None,
) -> MachineRepair:
    """The closed queue of exponential thinking and actions, from its birth-death equations."""
    num_slots = num_episodes if num_slots is None else num_slots
    logs = [0.0]
    for n in range(1, num_episodes + 1):
        birth = min(num_episodes - n + 1, num_slots) / think_s
        logs.append(logs[-1] + math.log(birth * work_s / min(n, num_sandboxes)))
    top = max(logs)
    weights = np.exp(np.array(logs) - top)
    share = weights / weights.sum()
    acting = np.arange(num_episodes + 1)
    per_s = float((share * np.minimum(acting, num_sandboxes)).sum() / work_s)
    queued = float((share * np.maximum(acting - num_sandboxes, 0)).sum())
    arriving = share * np.minimum(num_episodes - acting, num_slots)
    for_slots = float((share * np.maximum(num_episodes - acting - num_slots, 0)).sum())
    waits = float(arriving[num_sandboxes:].sum() / arriving.sum())
    return MachineRepair(per_s, queued / per_s, waits, for_slots / per_s)


def group_survival(fail_ratio: float, group_size: int) -> float:
    """The part of groups in which no rollout fails (G15)."""
    return (1 - fail_ratio) ** group_size


def keep_warm_break_even_s(
    num_sandboxes: int, idle_s: float, *, sandbox_per_s: float, gpus: int, gpu_per_s: float
) -> float:
    """Seconds of GPU time that have to be saved for idle sandboxes to pay (G29)."""
    return num_sandboxes * sandbox_per_s * idle_s / (gpus * gpu_per_s)


def newsvendor_ratio(cost_under: float, cost_over: float) -> float:
    """The part of steps in which the best pool is large enough (G30)."""
    return cost_under / (cost_under + cost_over)


def _irwin_hall(k: int, x: float) -> float:
    """The probability that k uniform numbers sum to at most x."""
    if x >= k:
        return 1.0
    terms = ((-1) ** j * math.comb(k, j) * (x - j) ** k for j in range(math.floor(x) + 1))
    return math.fsum(terms) / math.factorial(k)
