"""After the end of a history: old logs, objects in the place of others and a run that froze."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymfast.errors import GymfastError
from gymfast.sync import LiveTarget, Publisher, Subscriber
from gymfast.sync.keys import Span, object_of
from tests.campaign.counts import ViolationError
from tests.campaign.folding import show_folds
from tests.campaign.ground import WayStore
from tests.campaign.parties import Scene
from tests.campaign.simulation import Process
from tests.sync.harness import Weights, step

if TYPE_CHECKING:
    from tests.campaign.history import History


def epilogue(history: History) -> None:
    """Freeze, mix and match, rollback, one after the other, to readers that hold the newest."""
    history.ground.watch = lambda *_: None
    for scene in history.scenes:
        _freeze(history, scene)
        _mix(history, scene)
        _show_folds(history, scene)
        _ignore_conditions(history, scene)
    for scene in history.scenes:
        _roll_back(history, scene)


def _reader(history: History, scene: Scene, live: dict) -> tuple[Subscriber, Process]:
    process = Process(history.simulation, f"{scene.model.run}/late")
    subscriber = Subscriber(
        WayStore(history.ground, process),
        scene.model.run,
        LiveTarget(live, threads=1, allow_new_names=True),
        clock=_Clock(history),
        timeout_s=2.0,
        reader_id="late",
        freshness_s=60.0,
        key=scene.key,
    )
    return subscriber, process


class _Clock:
    """Time that passes when somebody sleeps; nobody else is there any more."""

    def __init__(self, history: History) -> None:
        self._simulation = history.simulation

    def wall_us(self) -> int:
        return int((self._simulation.now_s + 1.7e9) * 1e6)

    def monotonic_s(self) -> float:
        return self._simulation.now_s

    def sleep(self, seconds: float) -> None:
        self._simulation.now_s += max(seconds, 1e-6)


def _is_exact(scene: Scene, subscriber: Subscriber, live: dict) -> bool:
    if subscriber.version is None:
        return True
    known = scene.model.states.get(subscriber.root or "")
    return (
        known is not None
        and subscriber.root in scene.model.versions.get(subscriber.version, ())
        and {n: v.tobytes() for n, v in known.items()} == {n: v.tobytes() for n, v in live.items()}
    )


def _freeze(history: History, scene: Scene) -> None:
    live: dict = {}
    subscriber, _ = _reader(history, scene, live)
    subscriber.pull()
    history.counts.check("I03", _is_exact(scene, subscriber, live), "a late reader is not exact")
    history.simulation.now_s += 3_700.0
    subscriber.poll()
    history.counts.check("I32", subscriber.is_stale, "a frozen run is not flagged")


def _mix(history: History, scene: Scene) -> None:
    """Objects in each other's places, to a reader that has nothing."""
    ground, rng = history.ground, history.simulation.rng
    before = ground.contents()
    keys = [k for k in before if object_of(k, scene.model.keys.objects_prefix)]
    for _ in range(3):
        one, other = rng.choice(keys), rng.choice(keys)
        ground.restore({**before, one: before[other], other: before[one]})
        live: dict = {}
        subscriber, _ = _reader(history, scene, live)
        try:
            subscriber.pull()
        except GymfastError as error:
            scene.note(Process(history.simulation, "late"), "refused", error)
        text = "an exchanged object is served"
        history.counts.check("I32", _is_exact(scene, subscriber, live), text)
        ground.restore(before)


def _show_folds(history: History, scene: Scene) -> None:
    """Folds in every condition, to readers that are behind."""

    def follow(span: Span, first: dict[str, bytes], then: dict[str, bytes]) -> bool:
        live: dict = {}
        subscriber, _ = _reader(history, scene, live)
        history.ground.restore(first)
        subscriber.pull(span.base)
        history.ground.restore(then)
        staged = subscriber.fetch(span.version)
        history.counts["folds taken where they were shown"] += staged.plan.steps[0].is_fold
        subscriber.apply()
        return subscriber.version == span.version and _is_exact(scene, subscriber, live)

    if scene.model.is_strict:
        show_folds(scene, follow)


class CarelessStore(WayStore):
    """A store that ignores conditions: a create replaces what is there."""

    def create(self, key: str, data) -> None:
        self.put(key, data)


def _ignore_conditions(history: History, scene: Scene) -> None:
    ground, process = history.ground, Process(history.simulation, "late")
    before = ground.contents()
    is_refused = False
    try:
        _publisher(history, scene, process, CarelessStore(ground, process))
    except GymfastError as error:
        is_refused = "create" in str(error)
    after = {k: v for k, v in ground.contents().items() if "/probe/" not in k}
    is_same = after == {k: v for k, v in before.items() if "/probe/" not in k}
    history.counts.check("I24", is_refused and is_same, "a store without conditions is written to")


def _roll_back(history: History, scene: Scene) -> None:
    """The store of before two more versions comes back, and is gone on with."""
    ground, model = history.ground, scene.model
    live: dict = {}
    subscriber, process = _reader(history, scene, live)
    old = ground.contents()
    weights = model.states[subscriber_root(subscriber)]
    source = _publisher(history, scene, process)
    for _ in range(2):
        weights = _other(scene, weights)
        _note(scene, source.publish(weights), weights)
    subscriber.pull()
    held = subscriber.version
    ground.restore(old)
    for number in range(4):
        try:
            subscriber.pull()
        except GymfastError as error:
            scene.note(process, "refused", error)
        is_same = subscriber.version == held and _is_exact(scene, subscriber, live)
        history.counts.check("I32", is_same, f"rolled back from {held} to {subscriber.version}")
        if number == 0:
            source = _publisher(history, scene, process)
        weights = _other(scene, weights)
        fork = source.publish(weights, anchor=number > 1)
        if fork.version > (held or 0):
            _note(scene, fork, weights)
    try:
        subscriber.pull()
    except GymfastError:
        return
    if subscriber.version != held:
        raise ViolationError("I32", "a reader went over to a log that contradicts what it held")


def _other(scene: Scene, weights: Weights) -> Weights:
    """Weights that nobody had before: a fork with the same state in the same place is none."""
    scene.num_states += 1
    return step(weights, scene.num_states, 0.5)


def subscriber_root(subscriber: Subscriber) -> str:
    """The root it serves, after a pull."""
    subscriber.pull()
    assert subscriber.root is not None
    return subscriber.root


def _note(scene: Scene, report, weights) -> None:
    scene.model.states[report.root] = weights
    scene.model.versions.setdefault(report.version, set()).add(report.root)


def _publisher(
    history: History, scene: Scene, process: Process, store: WayStore | None = None
) -> Publisher:
    return Publisher(
        store or WayStore(history.ground, process),
        scene.model.run,
        clock=_Clock(history),
        key=scene.key,
        label="late",
        **{**scene.options, "keep": 50},
    )
