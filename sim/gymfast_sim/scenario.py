"""What is simulated: rollouts, sandboxes, limits, a policy, a trainer and prices.

Units are in the names. docs/simulator.md says what each setting means to the engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from gymfast.cost.plan import plan, sync_job
from gymfast.models import Format
from gymfast.sandbox.policies import AnyPolicy, FixedPool, KeepWarm, SnapshotResume
from gymfast_sim.checks import check_count, check_range
from gymfast_sim.draws import MAX_SEED
from gymfast_sim.laws import NONE, AnyLaw, PlainLaw
from gymfast_sim.reading import ScenarioError, from_toml, to_toml

MAX_ROLLOUTS = 50_000_000
MAX_INDEX = 2**24 - 1


class _Part(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A table of a scenario."""


class Retries(_Part, frozen=True, kw_only=True):
    """What happens to a rollout whose sandbox died; shaped like `modal.Retries`.

    Attempt k + 1 begins initial_delay_s * backoff_coefficient^(k - 1), at most max_delay_s, after
    attempt k; up to `jitter_ratio` of it is taken off at random.
    """

    max_retries: int = 5
    initial_delay_s: float = 0.0
    backoff_coefficient: float = 2.0
    max_delay_s: float = 60.0
    jitter_ratio: float = 0.0

    def delay_s(self, attempt: int, part: float) -> float:
        """Seconds before attempt 1, 2, ...; part is a number in (0, 1) for the jitter."""
        delay_s = self.initial_delay_s
        for _ in range(attempt - 1):
            delay_s = min(delay_s * self.backoff_coefficient, self.max_delay_s)
        if self.jitter_ratio and delay_s:
            delay_s = delay_s * (1.0 - self.jitter_ratio * part)
        return delay_s

    def __post_init__(self) -> None:
        if not 0 <= self.max_retries <= 1000:
            raise ValueError(f"max_retries is {self.max_retries}, expected 0 to 1000")
        check_range("initial_delay_s", self.initial_delay_s, 0)
        check_range("backoff_coefficient", self.backoff_coefficient, 1)
        check_range("max_delay_s", self.max_delay_s, 0)
        check_range("jitter_ratio", self.jitter_ratio, 0, 1)
        if self.initial_delay_s > self.max_delay_s:
            raise ValueError(
                f"initial_delay_s is {self.initial_delay_s}, more than max_delay_s, "
                f"{self.max_delay_s}"
            )


class Rollouts(_Part, frozen=True, kw_only=True):
    """The work of one step: `prompts` groups of `group_size` rollouts.

    A rollout has `turns` actions of law `work`, each after a time `think` without a sandbox. It
    keeps its sandbox from its first action to its last (`hold` "episode"), or takes one for each
    action. Rollouts come at once, or `arrival_gap` apart. An action longer than `timeout_s` is cut:
    the sandbox lives on, the rollout is done. With `fail_ratio` the sandbox dies under an action,
    with `hang_ratio` it does nothing until `timeout_s` and is dead then, with `lost_ratio` nobody
    hears of its end until `watchdog_s`. At most `gpu_slots` rollouts think at a time.

    A step ends when `enough` rollouts are done; the others are given up. With `group_fail` "drop"
    those of a group are given up when one of them is dropped. With `is_partial` what was given up
    goes on in the next step; `grading` is a second sandbox that grades a rollout; `gpu_speed` is how
    thinking slows down: that many times faster with so many at once.
    """

    prompts: int
    work: PlainLaw
    group_size: int = 1
    turns: int = 1
    think: PlainLaw = NONE
    hold: Literal["episode", "action"] = "episode"
    arrival_gap: PlainLaw | None = None
    timeout_s: float | None = None
    fail_ratio: float = 0.0
    hang_ratio: float = 0.0
    lost_ratio: float = 0.0
    watchdog_s: float | None = None
    gpu_slots: int | None = None
    enough: int | None = None
    group_fail: Literal["keep", "drop", "retry"] = "keep"
    is_partial: bool = False
    grading: PlainLaw | None = None
    gpu_speed: tuple[float, ...] = ()
    retries: Retries = Retries()

    def __post_init__(self) -> None:
        check_count("prompts", self.prompts)
        check_count("group_size", self.group_size)
        check_count("turns", self.turns, MAX_INDEX)
        if self.num_rollouts > MAX_ROLLOUTS:
            raise ValueError(
                f"{self.num_rollouts} rollouts a step, expected at most {MAX_ROLLOUTS}"
            )
        if self.timeout_s is not None and not (0 < self.timeout_s < math.inf):
            raise ValueError(f"timeout_s is {self.timeout_s}, expected a number above 0")
        for name in ("fail_ratio", "hang_ratio", "lost_ratio"):
            check_range(name, getattr(self, name), 0, 1)
        if self.hang_ratio and self.timeout_s is None:
            raise ValueError(f"hang_ratio is {self.hang_ratio} and timeout_s is not set: no end")
        if self.lost_ratio and self.watchdog_s is None:
            raise ValueError(f"lost_ratio is {self.lost_ratio} and watchdog_s is not set: no end")
        if self.watchdog_s is not None and not (0 < self.watchdog_s < math.inf):
            raise ValueError(f"watchdog_s is {self.watchdog_s}, expected a number above 0")
        if self.gpu_slots is not None:
            check_count("gpu_slots", self.gpu_slots)
        if self.enough is not None:
            check_count("enough", self.enough, self.num_rollouts)

    @property
    def num_rollouts(self) -> int:
        """Rollouts of a step."""
        return self.prompts * self.group_size


class ClassSettings(_Part, frozen=True, kw_only=True):
    """What is different for some classes of sandboxes: `prompts` of a step need them."""

    name: str
    prompts: int
    boot: AnyLaw | None = None
    setup: AnyLaw | None = None
    size: int | None = None


class Sandboxes(_Part, frozen=True, kw_only=True):
    """How sandboxes start, live and end; a start is api, queue, boot and setup, one after another.

    Prompt i needs class i modulo `classes`. With `start_fail_ratio` a start fails at its end. A
    sandbox dies `lifetime_s` after its start began, or `preempted_after` a time drawn for it. What
    died is noticed `detection_s` later.

    With `leak_ratio` an end is not carried out and the sandbox lives until its lifetime is over;
    `new_classes` replace as many of the old ones in each step; starts resume a `snapshot`, saved in
    the time `snapshot`, within `resume`; `table` has settings for single classes.
    """

    classes: int = 1
    prewarmed: int = 0
    api: AnyLaw = NONE
    queue: AnyLaw = NONE
    boot: AnyLaw = NONE
    setup: AnyLaw = NONE
    reset: PlainLaw = NONE
    teardown: PlainLaw = NONE
    start_fail_ratio: float = 0.0
    lifetime_s: float | None = None
    preempted_after: PlainLaw | None = None
    detection_s: float = 0.0
    leak_ratio: float = 0.0
    new_classes: int = 0
    snapshot: PlainLaw | None = None
    resume: PlainLaw | None = None
    table: tuple[ClassSettings, ...] = ()

    def __post_init__(self) -> None:
        check_count("classes", self.classes)
        if self.prewarmed < 0:
            raise ValueError(f"prewarmed is {self.prewarmed}, expected 0 or more")
        if not 0 <= self.start_fail_ratio < 1:
            raise ValueError(
                f"start_fail_ratio is {self.start_fail_ratio}, expected 0 to below 1: with 1 no "
                "sandbox ever starts"
            )
        if self.lifetime_s is not None and not (0 < self.lifetime_s < math.inf):
            raise ValueError(f"lifetime_s is {self.lifetime_s}, expected a number above 0")
        check_range("detection_s", self.detection_s, 0)

    @property
    def start_s(self) -> float:
        """The expected start of a sandbox alone."""
        return math.fsum(x.expected_s for x in (self.api, self.queue, self.boot, self.setup))


class Limits(_Part, frozen=True, kw_only=True):
    """What the provider and the client allow; None is no limit.

    Creations pass them in this order: `client_concurrency` calls under way, `max_live` sandboxes
    (those in teardown count if `teardown_counts`), `max_starting`, and `rate_per_s` after `burst`.
    One over the rate waits its turn, or is `refused` (429) and tries again after a back-off.
    """

    client_concurrency: int | None = None
    max_live: int | None = None
    max_starting: int | None = None
    rate_per_s: float | None = None
    burst: int = 1
    teardown_counts: bool = True
    refused: Retries | None = None

    def __post_init__(self) -> None:
        for name in ("client_concurrency", "max_live", "max_starting", "burst"):
            number = getattr(self, name)
            if number is not None:
                check_count(name, number)
        if self.rate_per_s is None:
            if self.burst != 1:
                raise ValueError(f"burst is {self.burst} but there is no rate_per_s")
        elif not 1e-6 <= self.rate_per_s <= 1e9:
            raise ValueError(f"rate_per_s is {self.rate_per_s}, expected 1e-6 to 1e9")
        elif self.burst * math.ceil(1e9 / self.rate_per_s) >= 2**62:
            raise ValueError(
                f"burst is {self.burst} at {self.rate_per_s} per s: a full bucket takes 146 years "
                "or more to fill, expected less"
            )

    @property
    def interval_ns(self) -> int | None:
        """Time between creations: rounded up, so that the rate is never exceeded."""
        return None if self.rate_per_s is None else math.ceil(1e9 / self.rate_per_s)


class Sync(_Part, frozen=True, kw_only=True):
    """The weight sync after a train step: `seconds`, or the cost model of `gymfast plan`."""

    seconds: float | None = None
    model: str | None = None
    train: str | None = None
    engines: str | None = None
    net: str = "rdma"
    fmt: Format = "bf16"
    lora_rank: int | None = None
    saved_ratio: float | None = None
    nodes_per_engine: int = 1

    def __post_init__(self) -> None:
        named = [self.model, self.train, self.engines]
        if self.seconds is not None:
            check_range("seconds", self.seconds, 0)
            if any(named):
                raise ValueError("give either seconds, or model, train and engines")
        elif not all(named):
            raise ValueError("model, train and engines are needed, or seconds")
        assert self.total_s >= 0  # the cost model refuses what it does not know

    @property
    def total_s(self) -> float:
        """Seconds from the end of a train step until engines serve its weights."""
        if self.seconds is not None:
            return self.seconds
        assert self.model is not None
        assert self.train is not None
        assert self.engines is not None
        job = sync_job(
            self.model,
            self.train,
            self.engines,
            self.net,
            fmt=self.fmt,
            lora_rank=self.lora_rank,
            saved_ratio=self.saved_ratio,
            nodes_per_engine=self.nodes_per_engine,
        )
        return plan(job).total_s


class Training(_Part, frozen=True, kw_only=True):
    """When the trainer works: after all rollouts of a step (`sync`), during those of the next one
    (`one-step-off`), or whenever a batch of rollouts is done (`async`).

    In `async`, `in_flight` rollouts are under way at all times, fewer where more would be trained
    on `max_staleness` versions late. The first `warm_up_steps` are no part of means.
    """

    mode: Literal["sync", "one-step-off", "async"] = "sync"
    steps: int = 1
    warm_up_steps: int = 0
    in_flight: int | None = None
    max_staleness: int | None = None
    train: PlainLaw = NONE
    sync: Sync = Sync(seconds=0.0)

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 1_000_000)
        check_range("warm_up_steps", self.warm_up_steps, 0, self.steps - 1)
        if (self.in_flight is None) == (self.mode == "async"):
            raise ValueError(f"in_flight is {self.in_flight} in mode {self.mode}: it is for async")
        if self.in_flight is not None:
            check_count("in_flight", self.in_flight, MAX_ROLLOUTS)
        if self.max_staleness is not None:
            check_range("max_staleness", self.max_staleness, 0)
            if self.mode != "async":
                raise ValueError(f"max_staleness is for async, mode is {self.mode}")


class Prices(_Part, frozen=True, kw_only=True):
    """Money in dollars; all numbers are inputs, `source` and `date` say where they come from."""

    gpus: int
    gpu_per_s: float
    cores: float
    core_per_s: float
    gib: float
    gib_per_s: float
    starting_is_billed: bool = True
    source: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        if self.gpus < 0:
            raise ValueError(f"gpus is {self.gpus}, expected 0 or more")
        for name in ("gpu_per_s", "cores", "core_per_s", "gib", "gib_per_s"):
            check_range(name, getattr(self, name), 0)

    @property
    def sandbox_per_s(self) -> float:
        """Dollars for one sandbox and second."""
        return self.cores * self.core_per_s + self.gib * self.gib_per_s


class Scenario(_Part, frozen=True, kw_only=True):
    """One run. Raises ScenarioError for settings that contradict each other."""

    name: str
    rollouts: Rollouts
    policy: AnyPolicy
    sandboxes: Sandboxes = Sandboxes()
    limits: Limits = Limits()
    training: Training = Training()
    prices: Prices | None = None
    seed: int = 0
    horizon_s: float = 30 * 86400.0
    max_changes: int | None = None
    grid_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}, expected 0 to {MAX_SEED}")
        if not 0 < self.horizon_s <= 1e9:
            raise ValueError(f"horizon_s is {self.horizon_s}, expected more than 0, at most 1e9")
        if self.grid_s is not None:
            check_range("grid_s", self.grid_s, self.horizon_s * 1e-7)
        if self.max_changes is not None:
            check_count("max_changes", self.max_changes, 10**12)
        problem = next(iter(contradictions(self)), None)
        if problem is not None:
            raise ValueError(problem)

    @property
    def most_changes(self) -> int:
        """Changes of state after which a run is given up: 1000 for each action unless set."""
        if self.max_changes is not None:
            return self.max_changes
        actions = self.rollouts.num_rollouts * self.rollouts.turns * self.training.steps
        return 1_000_000 + 1_000 * actions

    @classmethod
    def from_toml(cls, text: str) -> Scenario:
        """The scenario in a TOML text. Raises ScenarioError."""
        return from_toml(text, cls)

    @classmethod
    def from_file(cls, path: Path) -> Scenario:
        """The scenario in a TOML file. Raises ScenarioError, with the name of the file."""
        try:
            return from_toml(path.read_text(encoding="utf-8"), cls)
        except (ScenarioError, UnicodeDecodeError) as error:
            raise ScenarioError(f"{path}: {error}") from error

    def to_toml(self) -> str:
        """What from_toml reads."""
        return to_toml(self)


def contradictions(scenario: Scenario) -> Iterable[str]:
    """Why the settings of a scenario cannot all hold, or no run of it can end."""
    yield from _pool_contradictions(scenario)
    yield from _lifetime_contradictions(scenario)
    rollouts = scenario.rollouts
    if rollouts.fail_ratio == 1:
        yield "rollouts.fail_ratio is 1: no rollout is ever done"
    training = scenario.training
    if training.mode == "async":
        if rollouts.enough is not None or rollouts.group_fail != "keep":
            yield "rollouts.enough and group_fail are for steps, training.mode is async"
        late, flight = training.max_staleness, training.in_flight or 0
        if late is not None and flight > (late + 1) * rollouts.num_rollouts:
            yield (
                f"training.in_flight is {flight}, more than max_staleness {late} ever allows, "
                f"{(late + 1) * rollouts.num_rollouts}"
            )
        if rollouts.arrival_gap is not None:
            yield "rollouts.arrival_gap is for a single step, training.mode is async"
    if rollouts.arrival_gap is not None and (rollouts.enough or rollouts.group_fail != "keep"):
        yield "rollouts.arrival_gap is for steps that end when all rollouts are over"
    gap = rollouts.arrival_gap
    if gap is not None and scenario.training.steps > 1:
        yield "rollouts.arrival_gap is for a single step, training.steps is more than 1"


def _pool_contradictions(scenario: Scenario) -> Iterable[str]:
    policy, boxes, limits = scenario.policy, scenario.sandboxes, scenario.limits
    size = policy.size if isinstance(policy, FixedPool) else policy.max_size
    if limits.max_live is not None:
        if size > limits.max_live:
            yield f"policy: a pool of {size} is over the quota, limits.max_live {limits.max_live}"
        if boxes.prewarmed > limits.max_live:
            yield (
                f"sandboxes.prewarmed is {boxes.prewarmed}, over the quota, limits.max_live "
                f"{limits.max_live}"
            )
    if boxes.prewarmed > size:
        yield f"sandboxes.prewarmed is {boxes.prewarmed}, more than the pool, {size}"
    if boxes.prewarmed and policy.binding == "early":
        yield "sandboxes.prewarmed are of no use to a policy that makes one for each rollout"
    if boxes.classes > scenario.rollouts.prompts:
        yield (
            f"sandboxes.classes is {boxes.classes}, more than rollouts.prompts, "
            f"{scenario.rollouts.prompts}: some class would have no rollout"
        )
    shared = policy.warm if isinstance(policy, KeepWarm) else size
    if isinstance(policy, FixedPool | KeepWarm) and shared < boxes.classes:
        yield f"policy: {shared} sandboxes cannot be shared by {boxes.classes} classes"


def _lifetime_contradictions(scenario: Scenario) -> Iterable[str]:
    rollouts, boxes = scenario.rollouts, scenario.sandboxes
    if boxes.lifetime_s is None:
        return
    if rollouts.timeout_s is not None and rollouts.timeout_s > boxes.lifetime_s:
        yield (
            f"rollouts.timeout_s is {rollouts.timeout_s}, more than sandboxes.lifetime_s, "
            f"{boxes.lifetime_s}: the sandbox ends first"
        )
    one_s = rollouts.work.expected_s
    if rollouts.timeout_s is not None:
        one_s = rollouts.work.limited_s(rollouts.timeout_s)
    needed_s = one_s
    if rollouts.hold == "episode":
        needed_s = rollouts.turns * one_s + (rollouts.turns - 1) * rollouts.think.expected_s
    if boxes.start_s + needed_s > boxes.lifetime_s:
        yield (
            f"sandboxes.lifetime_s is {boxes.lifetime_s}, less than a start and the work of one "
            f"rollout, {boxes.start_s + needed_s:.6g} s on average: raise it, or most rollouts fail"
        )


class NotSimulatedError(ScenarioError):
    """A scenario asks for what no engine does yet."""


def refuse_unknown(scenario: Scenario) -> None:
    """Raises NotSimulatedError for settings that are part of a scenario and of no engine yet."""
    rollouts, boxes = scenario.rollouts, scenario.sandboxes
    asked = {
        "rollouts.is_partial": rollouts.is_partial,
        "rollouts.grading": rollouts.grading is not None,
        "rollouts.gpu_speed": bool(rollouts.gpu_speed),
        "rollouts.group_fail = 'retry'": rollouts.group_fail == "retry",
        "sandboxes.leak_ratio": boxes.leak_ratio != 0,
        "sandboxes.new_classes": boxes.new_classes != 0,
        "sandboxes.snapshot": boxes.snapshot is not None,
        "sandboxes.resume": boxes.resume is not None,
        "sandboxes.table": bool(boxes.table),
        "policy = 'snapshot-resume'": isinstance(scenario.policy, SnapshotResume),
    }
    named = [name for name, is_asked in asked.items() if is_asked]
    if named:
        raise NotSimulatedError(f"not simulated yet: {', '.join(named)}; leave it out")
