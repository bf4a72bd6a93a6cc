"""Publish and apply at every crash point: killed, EIO and ENOSPC at each system call (strace).

Whatever happens to a publisher: a reader gets exactly the old or exactly the new version, and the
next publisher goes on. Whatever happens to a reader: the next one serves exactly what its
checkpoint holds, or nothing, and ends exactly at the newest version.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sync_crash_work as work
from safetensors.numpy import load_file
from sync.harness import RUN, assert_same, publisher, reader, zeros_like

from gymfast.errors import GymfastError
from gymfast.stores import FileStore
from gymfast.sync import CheckpointTarget, Publisher, Subscriber
from gymfast.sync.fsck import fsck
from gymfast.testing.syscalls import Fault, Outcome, Syscall, SyscallFaults

WORK = Path(work.__file__)
STATES = work.STATES
needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="needs kernel feature ptrace (strace)"
)
EFFECTS = {
    *("write", "pwrite64", "pwritev", "fsync", "fdatasync", "renameat", "rename", "renameat2"),
    *("linkat", "link", "unlinkat", "unlink", "mkdirat", "mkdir", "ftruncate", "rmdir"),
}
ERRORS: dict[str, Callable[[Syscall], Fault]] = {
    "EIO once": lambda call: call.failed("EIO"),
    "EIO from here": lambda call: call.failed_from_here("EIO"),
    "ENOSPC once": lambda call: call.failed("ENOSPC"),
    "ENOSPC from here": lambda call: call.failed_from_here("ENOSPC"),
}
Outcomes = list[tuple[str, Outcome]]


@pytest.fixture(autouse=True)
def _tests_are_importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(WORK.parent))


def effects_of(calls: list[Syscall]) -> list[Syscall]:
    """The calls that change something, or open a file in order to."""
    return [c for c in calls if c.name in EFFECTS or "O_CREAT" in c.arguments]


def sampled(calls: list[Syscall], count: int) -> list[Syscall]:
    """About `count` of the calls, from the first to the last."""
    stride = max(1, len(calls) // count)
    return calls[::stride]


class Scene:
    """A prepared folder that every run gets a fresh copy of."""

    def __init__(self, folder: Path) -> None:
        self.prepared = folder / "prepared"
        self.work = folder / "work"
        self.prepared.mkdir()

    def fresh(self) -> Path:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.prepared, self.work)
        return self.work


def runs(
    faults: SyscallFaults,
    scene: Scene,
    arguments: Callable[[Path], list[str]],
    pick: Callable[[list[Syscall]], list[Fault]],
) -> Iterator[tuple[Fault, Outcome]]:
    """The outcome of one run for each fault, right after it happened."""
    for fault in pick(faults.trace(*arguments(scene.fresh()))):
        yield fault, faults.run(*arguments(scene.fresh()), fault=fault)


def killed_at_effects(calls: list[Syscall]) -> list[Fault]:
    return [call.killed() for call in effects_of(calls)]


def failing(how: str, count: int) -> Callable[[list[Syscall]], list[Fault]]:
    return lambda calls: [ERRORS[how](call) for call in sampled(calls, count)]


def everything(calls: list[Syscall]) -> list[Fault]:
    return [f for c in calls for f in (c.killed(), *(make(c) for make in ERRORS.values()))]


# Publish


@pytest.fixture
def published(tmp_path) -> Scene:
    scene = Scene(tmp_path)
    source = publisher(FileStore(scene.prepared / "store"), anchor_every=2, keep=1)
    source.publish(STATES[0])
    source.publish(STATES[1])
    return scene


def check_publish(scene: Scene, fault: Fault, outcome: Outcome) -> None:
    store = FileStore(scene.work / "store")
    live = zeros_like(STATES[0])
    found = reader(store, live, timeout_s=0.2).pull()
    assert found.version in (1, 2), fault
    assert_same(live, STATES[found.version])
    if outcome.result is not None:
        assert outcome.result == "2", fault
        assert found.version == 2, fault
    elif not outcome.was_killed:
        assert outcome.error is not None
        assert issubclass(error_type(outcome.error[0]), GymfastError), (fault, outcome)
    assert not fsck(store, RUN).damage, fault
    source = Publisher(store, RUN, anchor_ratio=100.0, threads=1, single_writer=True, keep=1)
    assert source.version == found.version
    assert source.adopt(STATES[found.version])
    assert source.publish(STATES[3]).kind == "delta"
    follower = reader(store, live)
    follower.pull()
    assert_same(live, STATES[3])
    named = {ref.digest for record in source_records(source) for ref in record.frame.objects}
    stored = {key.rpartition("/")[2] for key in store.list(f"{RUN}/objects/")}
    assert named <= stored, fault


def source_records(source: Publisher) -> list:
    return source._upkeep.states


@needs_strace
def test_i20_i21_a_publisher_killed_at_any_change_leaves_old_or_new(published):
    with SyscallFaults(WORK, "publish") as faults:
        found = runs(faults, published, lambda w: [str(w / "store")], killed_at_effects)
        num_points = 0
        for fault, outcome in found:
            assert outcome.was_killed, fault
            check_publish(published, fault, outcome)
            num_points += 1
        assert num_points > 40


@needs_strace
@pytest.mark.parametrize("how", ERRORS)
def test_i04_i21_i25_a_publisher_with_a_failing_disk_leaves_old_or_new(published, how):
    with SyscallFaults(WORK, "publish") as faults:
        for fault, outcome in runs(
            faults, published, lambda w: [str(w / "store")], failing(how, 16)
        ):
            check_publish(published, fault, outcome)


@needs_strace
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_i04_i20_i21_i25_every_fault_at_every_call_of_publish(published):
    with SyscallFaults(WORK, "publish") as faults:
        for fault, outcome in runs(faults, published, lambda w: [str(w / "store")], everything):
            check_publish(published, fault, outcome)


# Apply


@pytest.fixture(params=["file in place", "file anew", "directory in place", "directory anew"])
def followed(request, tmp_path) -> tuple[Scene, str, str]:
    """A checkpoint at version 0 of a run that is at version 2, its name, and whether in place."""
    kind, _, how = request.param.partition(" ")
    name = "c.safetensors" if kind == "file" else "c"
    scene = Scene(tmp_path)
    store = FileStore(scene.prepared / "store")
    source = publisher(store)
    source.publish(STATES[0])
    with Subscriber(store, RUN, CheckpointTarget(scene.prepared / name)) as follower:
        follower.pull()
    source.publish(STATES[1])
    source.publish(STATES[2])
    return scene, name, str(how == "in place")


def content(path: Path) -> dict | None:
    if not path.exists():
        return None
    return load_file(path / "model.safetensors" if path.is_dir() else path)


def check_pull(scene: Scene, name: str, fault: Fault, outcome: Outcome) -> None:
    path, store = scene.work / name, FileStore(scene.work / "store")
    if outcome.result is not None:
        assert outcome.result == "2", fault
        assert_same(content(path), STATES[2])
    elif not outcome.was_killed:
        assert outcome.error is not None
        assert issubclass(error_type(outcome.error[0]), GymfastError), (fault, outcome)
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        assert follower.version in (0, 1, 2), (fault, outcome, follower.status)
        assert_same(content(path), STATES[follower.version])
        follower.pull()
        assert follower.version == 2
    assert_same(content(path), STATES[2])
    left = {p.name for p in scene.work.iterdir()}
    assert left <= {"store", name, f".gymfast.position.{name}", f".gymfast.lock.{name}"}, fault


def error_type(name: str) -> type:
    import gymfast.errors

    return getattr(gymfast.errors, name, Exception)


def pull_arguments(name: str, in_place: str) -> Callable[[Path], list[str]]:
    return lambda w: [str(w / "store"), str(w / name), in_place]


@needs_strace
def test_i40_r53_a_reader_killed_at_any_change_holds_a_whole_version(followed):
    scene, name, in_place = followed
    with SyscallFaults(WORK, "pull") as faults:
        arguments = pull_arguments(name, in_place)
        num_points = 0
        for fault, outcome in runs(faults, scene, arguments, killed_at_effects):
            assert outcome.was_killed, fault
            check_pull(scene, name, fault, outcome)
            num_points += 1
        assert num_points > 15


@needs_strace
@pytest.mark.parametrize("how", ERRORS)
def test_i25_i40_r53_a_reader_with_a_failing_disk_holds_a_whole_version(followed, how):
    scene, name, in_place = followed
    with SyscallFaults(WORK, "pull") as faults:
        arguments = pull_arguments(name, in_place)
        for fault, outcome in runs(faults, scene, arguments, failing(how, 6)):
            check_pull(scene, name, fault, outcome)


@needs_strace
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_i25_i40_r53_every_fault_at_every_call_of_pull(followed):
    scene, name, in_place = followed
    with SyscallFaults(WORK, "pull") as faults:
        for fault, outcome in runs(faults, scene, pull_arguments(name, in_place), everything):
            check_pull(scene, name, fault, outcome)
