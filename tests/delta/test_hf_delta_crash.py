"""Kill -9 and I/O errors at every system call of a pull: the next one ends with the exact bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import hf_delta_crash_work
import numpy as np
import pytest
from delta_checkpoints import read, write_sharded
from delta_weights import changed, small_pair
from hf_delta_crash_work import follow
from hf_delta_data import write_version

from gymfast.delta.hf_delta.pull import pull
from gymfast.testing.compare import assert_bits_equal
from gymfast.testing.syscalls import Syscall, SyscallFaults

WORK = Path(hf_delta_crash_work.__file__)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A folder with `base`, `versions` 1 to 3 and the states after them, `expected-N`."""
    folder = tmp_path_factory.mktemp("published")
    old, _ = small_pair()
    rng = np.random.default_rng(1)
    write_sharded(folder / "base", old)
    for number in (1, 2, 3):
        new = {n: changed(t, (0.01, 1.0, 0.0)[i % 3], rng) for i, (n, t) in enumerate(old.items())}
        write_version(folder / "versions", number, old, new, num_ranks=2)
        write_sharded(folder / f"expected-{number}", new)
        old = new
    return folder


@pytest.fixture
def work(published: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    shutil.copytree(published, folder)
    return folder


@pytest.fixture(params=["fresh", "held", "reset"])
def start(request, work: Path) -> Path:
    """A work folder in which the pull seeds, follows two deltas, or is reset by a full version."""
    if request.param != "fresh":
        pull(work / "local", work / "base", work / "versions", 1)
    if request.param == "reset":
        shutil.rmtree(work / "versions" / "weight_v000002")
        shutil.copytree(work / "expected-2", work / "versions" / "weight_v000002")
    saved = work.with_name("saved")
    shutil.copytree(work, saved)
    return work


def put_back(work: Path) -> None:
    shutil.rmtree(work)
    shutil.copytree(work.with_name("saved"), work)


def changes_the_disk(call: Syscall) -> bool:
    """Kills at two calls between which nothing is written are the same kill."""
    writes = ("fsync", "pwrite64", "rename", "unlink", "ftruncate", "mkdir")
    return call.name in writes or "O_CREAT" in call.arguments


def stock_view(local: Path) -> int | None:
    """The version that the stock code reads."""
    path = local / ".weight_sync" / "state.json"
    return int(json.loads(path.read_text())["version"]) if path.exists() else None


def assert_state_is_true(work: Path) -> None:
    """Where a state stands, the bytes are exactly those of that version."""
    version = stock_view(work / "local")
    if version is not None:
        expected = work / (f"expected-{version}" if version else "base")
        assert_bits_equal(read_raw(work / "local"), read(expected))


def read_raw(local: Path) -> dict:
    """The tensors as the stock code sees them: without completing anything."""
    copy = local.with_name("copy")
    shutil.copytree(local, copy, ignore=shutil.ignore_patterns(".*"))
    weights = read(copy)
    shutil.rmtree(copy)
    return weights


def test_a_kill_at_any_system_call_ends_with_the_exact_bytes(start: Path, request) -> None:
    start_kind = request.node.callspec.params["start"]
    seen = set()
    with SyscallFaults(WORK, "follow") as faults:
        points = [c.killed() for c in faults.trace(str(start)) if changes_the_disk(c)]
        for fault in points[:: len(points) // 80 + 1]:
            put_back(start)
            assert faults.run(str(start), fault=fault).was_killed, fault.name
            seen.add(stock_view(start / "local"))
            assert_state_is_true(start)
            report = pull(start / "local", start / "base", start / "versions", 3)
            if start_kind == "held":  # recovered, not begun again
                assert report.seed is None, fault.name
            assert stock_view(start / "local") == 3
            assert_bits_equal(read(start / "local"), read(start / "expected-3"))
    assert len(points) > 60
    assert {None, 3} < seen


def test_a_kill_during_the_recovery_from_a_kill_is_recovered(work: Path) -> None:
    pull(work / "local", work / "base", work / "versions", 2)
    saved = work.with_name("saved")
    shutil.copytree(work, saved)
    with SyscallFaults(WORK, "follow") as faults:
        calls = faults.trace(str(work))
        put_back(work)
        played = max(i for i, call in enumerate(calls) if call.name == "ftruncate")
        assert faults.run(str(work), fault=calls[played].killed()).was_killed
        assert stock_view(work / "local") is None
        shutil.rmtree(saved)
        shutil.copytree(work, saved)
        points = [call.killed() for call in faults.trace(str(work)) if changes_the_disk(call)]
        for fault in points:
            put_back(work)
            assert faults.run(str(work), fault=fault).was_killed, fault.name
            assert_state_is_true(work)
            report = pull(work / "local", work / "base", work / "versions", 3)
            assert (report.seed, report.version) == (None, 3)
            assert_bits_equal(read(work / "local"), read(work / "expected-3"))
    assert len(points) > 5


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_an_error_at_any_system_call_is_told_and_the_next_pull_heals(work, error) -> None:
    pull(work / "local", work / "base", work / "versions", 1)
    shutil.copytree(work, work.with_name("saved"))
    with SyscallFaults(WORK, "follow") as faults:
        calls = faults.trace(str(work))
        reads = [call for call in calls if not changes_the_disk(call)]
        writes = [call for call in calls if changes_the_disk(call)]
        for call in writes[:: 1 if error == "EIO" else 3] + reads[::16]:
            put_back(work)
            outcome = faults.run(str(work), fault=call.failed(error))
            assert not outcome.was_killed
            if outcome.error is not None:
                assert outcome.error[0] in ("GymfastError", "FormatError", "NotFoundError"), (
                    outcome.error,
                    call,
                )
                assert "/work" in outcome.error[1]
            assert outcome.error or stock_view(work / "local") == 3
            assert_state_is_true(work)
            follow(str(work))
            assert_bits_equal(read(work / "local"), read(work / "expected-3"))


@pytest.mark.parametrize("function", ["publish", "publish_whole"])
def test_a_kill_while_a_version_is_published_leaves_it_absent_or_whole(work, function) -> None:
    """reports.md R40: no reader sees a version that is not all there."""
    shutil.copytree(work, work.with_name("saved"))
    version = work / "versions" / "weight_v000004"
    seen = set()
    with SyscallFaults(WORK, function) as faults:
        points = [c.killed() for c in faults.trace(str(work)) if changes_the_disk(c)]
        for fault in points:
            put_back(work)
            assert faults.run(str(work), fault=fault).was_killed, fault.name
            seen.add(version.exists())
            if not version.exists():
                getattr(hf_delta_crash_work, function)(str(work))
            pull(work / "local", work / "base", work / "versions", 4)
            assert_bits_equal(read(work / "local"), read(work / "base"))
            names = sorted(path.name for path in (work / "versions").iterdir())
            assert names == [f"weight_v{number:06d}" for number in (1, 2, 3, 4)]
    assert seen == {True, False}
