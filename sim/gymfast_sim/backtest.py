"""A recorded run, replayed: real arrivals, work, failures and starts under a policy and its limits.

What the log says of a rollout or sandbox is used as it is; what it does not say (more sandboxes
than were recorded, another attempt) is drawn from all that it says. docs/sim-fit.md has the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from gymfast_sim.draws import Draws, Purpose
from gymfast_sim.engine_simpy import simulate
from gymfast_sim.fit_log import Span
from gymfast_sim.laws import NONE, Empirical, PlainLaw
from gymfast_sim.scenario import Rollouts, Sandboxes, Scenario, Training

_START = {"api": Purpose.API, "queue": Purpose.QUEUE, "boot": Purpose.BOOT, "setup": Purpose.SETUP}
_BOX = {**_START, "reset": Purpose.RESET, "teardown": Purpose.TEARDOWN}
_ROLLOUT = ("wait", "think", "exec")
_SURELY = 1 - 2.0**-53
_Known = dict[tuple[int, int, int], tuple[float, float]]  # by entity, attempt, purpose


class StepError(msgspec.Struct, frozen=True, kw_only=True):
    """One step, as it was and as it is simulated (the mean of the replications)."""

    step: int
    num_rollouts: int
    recorded_s: float
    simulated_s: float
    recorded_blocked_s: float
    simulated_blocked_s: float


class ErrorOfMean(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated by recorded, less 1; 95 % of resamples of steps lie between the ends."""

    ratio: float
    low: float | None
    high: float | None


class BacktestReport(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of a replay."""

    steps: tuple[StepError, ...]
    step_time: ErrorOfMean
    blocked_time: ErrorOfMean
    num_replications: int


class _Recorded:
    """One step of a log, in seconds since it began."""

    def __init__(self, step: int, spans: Sequence[Span], boxes: Mapping[str, list[Span]]) -> None:
        self.step = step
        by_rollout: dict[int, list[Span]] = {}
        for span in spans:
            by_rollout.setdefault(span.numbers["rollout"], []).append(span)
        self.begin_s = min(_begin(span) for span in spans)
        self.end_s = max(_end(span) for span in spans)
        order = sorted(by_rollout, key=lambda r: (min(map(_begin, by_rollout[r])), r))
        self.arrivals = [min(map(_begin, by_rollout[r])) - self.begin_s for r in order]
        self.rollouts = [_attempts(r, by_rollout[r], step) for r in order]
        used = {span.labels["sandbox"] for span in spans if span.phase == "exec"}
        ready = {name: _ready(boxes.get(name, [])) for name in used}
        warm = sorted(name for name in used if ready[name] <= self.begin_s)
        cold = sorted(
            (name for name in boxes if self.begin_s < _ready(boxes[name]) <= self.end_s),
            key=lambda name: (min(map(_begin, boxes[name])), name),
        )
        self.num_warm = len(warm)
        self.boxes = [_phases(boxes.get(name, [])) for name in [*warm, *cold]]
        self.is_failed = [
            any(span.outcome == "failed" and span.phase in _START for span in boxes.get(name, []))
            for name in [*warm, *cold]
        ]

    @property
    def blocked_s(self) -> float:
        """Of the rollout that ended last: all but its thoughts."""
        last = max(self.rollouts, key=lambda attempts: attempts[-1].end_s)
        return self.end_s - self.begin_s - math.fsum(attempt.think_s for attempt in last)


class _Attempt(msgspec.Struct, frozen=True):
    think_s: float
    work_s: float
    end_s: float
    is_failed: bool


class _Replay(Draws):
    """Random numbers, but where the log knows the answer those that give it."""

    __slots__ = ("_known",)

    def __init__(self, seed: int, replication: int, known: _Known) -> None:
        super().__init__(seed, replication)
        self._known = known

    def __call__(
        self, entity: int, attempt: int, purpose: int, index: int = 0
    ) -> tuple[float, float]:
        known = self._known.get((entity, attempt, int(purpose)))
        return super().__call__(entity, attempt, purpose, index) if known is None else known


def backtest(
    spans: Sequence[Span],
    scenario: Scenario,
    *,
    num_replications: int = 5,
    seed: int = 0,
    advance: Callable[[int, int], None] | None = None,
) -> BacktestReport:
    """Each step of a log, simulated under the policy and limits of a scenario.

    Its rollouts, arrivals, work, thoughts, failures and phases of sandboxes are those of the log.
    Raises ValueError for a log that cannot be replayed.
    """
    recorded = _read(spans)
    rows = []
    for i, step in enumerate(recorded):
        if advance is not None:
            advance(i, len(recorded))
        made, known = _scenario_of(step, scenario, seed)
        runs = [
            simulate(made, replication=r, draw=_Replay(seed, r, known)).steps[0]
            for r in range(num_replications)
        ]
        rows.append(
            StepError(
                step=step.step,
                num_rollouts=len(step.rollouts),
                recorded_s=step.end_s - step.begin_s,
                simulated_s=math.fsum(run.rollouts_s for run in runs) / len(runs),
                recorded_blocked_s=step.blocked_s,
                simulated_blocked_s=math.fsum(run.blocked_s for run in runs) / len(runs),
            )
        )
    return BacktestReport(
        steps=tuple(rows),
        step_time=_error([(r.recorded_s, r.simulated_s) for r in rows], seed),
        blocked_time=_error([(r.recorded_blocked_s, r.simulated_blocked_s) for r in rows], seed),
        num_replications=num_replications,
    )


def _read(spans: Sequence[Span]) -> list[_Recorded]:
    known = (*_BOX, *_ROLLOUT)
    boxes: dict[str, list[Span]] = {}
    steps: dict[int, list[Span]] = {}
    for span in spans:
        if span.phase not in known:
            raise ValueError(
                f"line {span.line}: phase {span.phase!r} cannot be replayed, expected one of "
                f"{', '.join(known)}"
            )
        if span.start_s is None:
            raise ValueError(
                f"line {span.line}: a duration alone cannot be replayed: give t0 and t1"
            )
        if (span.phase in _BOX or span.phase == "exec") and "sandbox" not in span.labels:
            raise ValueError(f"line {span.line}: {span.phase} has no sandbox: name it")
        if span.phase in _BOX:
            boxes.setdefault(span.labels["sandbox"], []).append(span)
        elif not {"step", "rollout"} <= set(span.numbers):
            raise ValueError(f"line {span.line}: {span.phase} has no step and rollout: number them")
        else:
            steps.setdefault(span.numbers["step"], []).append(span)
    images = sorted({span.labels["image"] for span in spans if "image" in span.labels})
    if len(images) > 1:
        raise ValueError(f"the log has the images {', '.join(images[:5])}: replay one at a time")
    if not steps:
        raise ValueError("the log has no exec with a step and a rollout, so there is no run in it")
    return [_Recorded(step, steps[step], boxes) for step in sorted(steps)]


def _attempts(rollout: int, spans: Sequence[Span], step: int) -> list[_Attempt]:
    """Attempts in order; the work of one lasts from its first exec to the end of its last."""
    by_attempt: dict[int, list[Span]] = {}
    for span in spans:
        by_attempt.setdefault(span.numbers.get("attempt", 0), []).append(span)
    found = []
    for number, attempt in enumerate(sorted(by_attempt)):
        execs = [span for span in by_attempt[attempt] if span.phase == "exec"]
        if attempt != number or not execs:
            raise ValueError(
                f"rollout {rollout} of step {step} has no exec in attempt {number}: the log is not "
                "complete; leave that rollout out"
            )
        begin_s, end_s = min(map(_begin, execs)), max(map(_end, execs))
        thoughts = [s for s in by_attempt[attempt] if s.phase == "think" and _begin(s) < begin_s]
        is_failed = any(span.outcome == "failed" for span in execs)
        think_s = math.fsum(span.seconds for span in thoughts)
        found.append(_Attempt(think_s, end_s - begin_s, end_s, is_failed))
    return found


def _phases(spans: Sequence[Span]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for span in spans:
        found.setdefault(span.phase, []).append(span.seconds)
    return found


def _ready(spans: Sequence[Span]) -> float:
    """When a sandbox had started; -inf if the log has no start of it."""
    return max((_end(span) for span in spans if span.phase in _START), default=-math.inf)


def _scenario_of(step: _Recorded, scenario: Scenario, seed: int) -> tuple[Scenario, _Known]:
    """A scenario of one step, and the places in its laws of what was recorded."""
    known: _Known = {}
    table: dict[int, list[tuple[int, int, float]]] = {}
    failures: dict[tuple[int, int, int], bool] = {}
    starts: dict[tuple[int, int, int], bool] = {}
    before_s = 0.0
    for i, (arrival_s, attempts) in enumerate(zip(step.arrivals, step.rollouts, strict=True)):
        table.setdefault(Purpose.ARRIVAL, []).append((i, 0, arrival_s - before_s))
        before_s = arrival_s
        for a, attempt in enumerate(attempts):
            table.setdefault(Purpose.WORK, []).append((i, a, attempt.work_s))
            table.setdefault(Purpose.THINK, []).append((i, a, attempt.think_s))
            failures[i, a, Purpose.WORK_FAILS] = attempt.is_failed
    for number, phases in enumerate(step.boxes):
        starts[number, 0, Purpose.START_FAILS] = step.is_failed[number]
        for phase, seconds in phases.items():
            rows = table.setdefault(_BOX[phase], [])
            if phase == "reset":
                rows += [(number, use, s) for use, s in enumerate(seconds, 1)]
            else:
                rows.append((number, 0, math.fsum(seconds)))
    laws = {purpose: _law(rows, purpose, known) for purpose, rows in table.items()}
    made = msgspec.structs.replace(
        scenario,
        seed=seed,
        rollouts=Rollouts(
            prompts=len(step.rollouts),
            hold=scenario.rollouts.hold,
            retries=scenario.rollouts.retries,
            work=laws[Purpose.WORK],
            think=laws[Purpose.THINK],
            arrival_gap=laws[Purpose.ARRIVAL],
            fail_ratio=_ratio_of(failures, known),
        ),
        sandboxes=Sandboxes(
            lifetime_s=scenario.sandboxes.lifetime_s,
            detection_s=scenario.sandboxes.detection_s,
            prewarmed=step.num_warm,
            start_fail_ratio=_ratio_of(starts, known),
            api=laws.get(Purpose.API, NONE),
            queue=laws.get(Purpose.QUEUE, NONE),
            boot=laws.get(Purpose.BOOT, NONE),
            setup=laws.get(Purpose.SETUP, NONE),
            reset=laws.get(Purpose.RESET, NONE),
            teardown=laws.get(Purpose.TEARDOWN, NONE),
        ),
        training=Training(),
    )
    return made, known


def _law(rows: Sequence[tuple[int, int, float]], purpose: int, known: _Known) -> PlainLaw:
    """All that was recorded, each as likely; `known` gets the place of each."""
    if all(seconds == 0 for _, _, seconds in rows):
        return NONE
    ordered = sorted(rows, key=lambda row: row[2])
    for rank, (entity, attempt, _) in enumerate(ordered):
        known[entity, attempt, int(purpose)] = ((rank + 0.5) / len(ordered), 0.5)
    return Empirical(values_s=tuple(max(seconds, 0.0) for _, _, seconds in ordered))


def _ratio_of(failures: Mapping[tuple[int, int, int], bool], known: _Known) -> float:
    """The part that failed; `known` gets a place on the right side of it for each."""
    ratio = sum(failures.values()) / len(failures) if failures else 0.0
    for name, is_failed in failures.items():
        known[name] = (ratio / 2 if is_failed else (1 + ratio) / 2, _SURELY)
    return min(ratio, _SURELY)


def _error(pairs: Sequence[tuple[float, float]], seed: int) -> ErrorOfMean:
    """The error of the mean over steps."""
    recorded, simulated = np.array(pairs).T
    if recorded.sum() <= 0:
        raise ValueError("the recorded time is 0, so an error has no meaning")
    ratio = float(simulated.sum() / recorded.sum() - 1)
    if len(pairs) < 5:
        return ErrorOfMean(ratio=ratio, low=None, high=None)
    chosen = np.random.default_rng(seed).integers(0, len(pairs), (2000, len(pairs)))
    ratios = simulated[chosen].sum(axis=1) / recorded[chosen].sum(axis=1) - 1
    low, high = np.quantile(ratios, (0.025, 0.975))
    return ErrorOfMean(ratio=ratio, low=float(low), high=float(high))


def _begin(span: Span) -> float:
    assert span.start_s is not None
    return span.start_s


def _end(span: Span) -> float:
    return _begin(span) + span.seconds
