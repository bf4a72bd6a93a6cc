"""Kill -9 and I/O errors at every system call of writing checkpoints: old or new, never torn."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import delta_crash_work
import numpy as np
import pytest
from delta_checkpoints import read, write_sharded
from delta_crash_work import update, write_new
from delta_weights import changed, small_pair

import gymfast.delta as delta
from gymfast.delta.checkpoint import Checkpoint, recover
from gymfast.delta.journal import Journal, journal_path
from gymfast.errors import ChecksumError, ConflictError, GymfastError
from gymfast.testing.compare import assert_bits_equal
from gymfast.testing.syscalls import Fault, Outcome, SyscallFaults

WORK = Path(delta_crash_work.__file__)


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> Path:
    """A folder with `base`, `frame` and the expected tensors."""
    folder = tmp_path_factory.mktemp("versions")
    old, new = small_pair()
    rng = np.random.default_rng(1)
    old["dense"] = old["embed"].copy()
    new["dense"] = changed(old["dense"], 1.0, rng)
    write_sharded(folder / "base", old)
    write_sharded(folder / "new", new)
    (folder / "frame").write_bytes(delta.encode(old, new, backend="cpu"))
    return folder


@pytest.fixture
def work(versions: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    shutil.copytree(versions, folder)
    return folder


def put_back(versions: Path, folder: Path) -> None:
    """Makes the work folder what it was."""
    shutil.rmtree(folder)
    shutil.copytree(versions, folder)


def kills(faults: SyscallFaults, folder: Path) -> list[Fault]:
    return [call.killed() for call in faults.trace(str(folder))]


def assert_is(folder: Path, weights: str, versions: Path) -> None:
    assert_bits_equal(read(folder), read(versions / weights))


def state_of(base: Path, versions: Path) -> str:
    """Whether a checkpoint holds the old or the new version; anything else fails."""
    held = read(base)
    for name in ("base", "new"):
        try:
            assert_bits_equal(held, read(versions / name))
        except AssertionError:
            continue
        return name
    raise AssertionError("the checkpoint is torn")


def test_a_kill_at_any_system_call_leaves_the_old_or_the_new_state(versions, work) -> None:
    seen = []
    with SyscallFaults(WORK, "update") as faults:
        points = kills(faults, work)
        for fault in points:
            put_back(versions, work)
            assert faults.run(str(work), fault=fault).was_killed, fault.name
            recover(work / "base")
            seen.append(state_of(work / "base", versions))
            assert not journal_path(work / "base").exists(), fault.name
            update(str(work))
            assert_is(work / "base", "new", versions)
    assert len(points) > 30
    assert seen == sorted(seen)  # the old state up to the commit, from there on the new one
    assert {"base", "new"} == set(seen)


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from there on"])
def test_an_error_at_any_system_call_is_told_and_leaves_old_or_new(
    versions: Path, work: Path, error: str, lasting: bool
) -> None:
    with SyscallFaults(WORK, "update") as faults:
        put_back(versions, work)
        for call in faults.trace(str(work))[:: 2 if lasting else 1]:
            put_back(versions, work)
            fault = call.failed_from_here(error) if lasting else call.failed(error)
            outcome = faults.run(str(work), fault=fault)
            check_error(outcome, fault)
            recover(work / "base")
            state = state_of(work / "base", versions)
            assert outcome.error or state == "new", fault.name


def check_error(outcome: Outcome, fault: Fault) -> None:
    """An error of ours that names a path, if there is one."""
    assert not outcome.was_killed, fault.name
    if outcome.error is not None:
        kind, text = outcome.error
        assert kind in ("GymfastError", "FormatError", "NotFoundError"), (fault.name, kind, text)
        assert "/work" in text, (fault.name, text)


def test_a_kill_during_recovery_is_recovered(versions: Path, work: Path) -> None:
    half_done(versions, work)
    saved = work.with_name("killed")
    shutil.copytree(work, saved)
    with SyscallFaults(WORK, "complete") as faults:
        for fault in kills(faults, work):
            put_back(saved, work)
            assert faults.run(str(work), fault=fault).was_killed, fault.name
            assert_is(work / "base", "new", versions)


def test_a_kill_while_a_new_checkpoint_is_written_leaves_it_absent_or_whole(versions, work):
    with SyscallFaults(WORK, "write_new") as faults:
        for fault in kills(faults, work)[::3]:
            put_back(versions, work)
            assert faults.run(str(work), fault=fault).was_killed, fault.name
            if (work / "out").exists():
                assert_is(work / "out", "new", versions)
            else:
                write_new(str(work))
            assert_is(work / "base", "base", versions)
            assert {p.name for p in work.iterdir()} == {"base", "frame", "new", "out"}


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_an_error_while_a_new_checkpoint_is_written_leaves_nothing_behind(versions, work, error):
    with SyscallFaults(WORK, "write_new") as faults:
        for call in faults.trace(str(work))[::3]:
            put_back(versions, work)
            outcome = faults.run(str(work), fault=call.failed(error))
            check_error(outcome, call.failed(error))
            assert outcome.error or (work / "out").exists()
            if (work / "out").exists():
                assert_is(work / "out", "new", versions)


def test_a_damaged_journal_is_told_and_nothing_is_played(versions: Path, work: Path) -> None:
    journal = half_done(versions, work)
    whole = journal.read_bytes()
    for at in (0, 9, 20, 70, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        journal.write_bytes(damaged)
        for use in (recover, Checkpoint.open):
            with pytest.raises((ChecksumError, GymfastError), match="gymfast-journal"):
                use(work / "base")
    journal.write_bytes(whole)
    assert recover(work / "base")
    assert_is(work / "base", "new", versions)


def half_done(versions: Path, work: Path) -> Path:
    """The journal of an update that was killed after its commit."""
    with SyscallFaults(WORK, "update") as faults:
        points = faults.trace(str(work))
        put_back(versions, work)
        truncate = max(i for i, call in enumerate(points) if call.name == "ftruncate")
        assert faults.run(str(work), fault=points[truncate].killed()).was_killed
    return journal_path(work / "base")


def test_a_journal_of_other_files_is_not_played(versions: Path, work: Path) -> None:
    half_done(versions, work)
    shard = next((work / "base").glob("*.safetensors"))
    with shard.open("ab") as file:
        file.write(b"x")
    with pytest.raises(GymfastError, match="the file was replaced"):
        recover(work / "base")


def test_a_journal_that_was_not_committed_is_ignored(versions: Path, work: Path) -> None:
    for leftover in (b"", bytes(10), bytes(64), bytes(64) + b"records of an unfinished journal"):
        journal_path(work / "base").write_bytes(leftover)
        assert not recover(work / "base")
        assert not journal_path(work / "base").exists()
        assert_is(work / "base", "base", versions)


def test_a_second_process_is_refused_while_one_updates(versions: Path, work: Path) -> None:
    with Journal(work / "base"):
        with pytest.raises(ConflictError, match="another process is updating"):
            update(str(work))
        assert_is(work / "base", "base", versions)  # not committed: readers go on
    half_done(versions, work)
    with journal_path(work / "base").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConflictError, match="wait for it"):
            Checkpoint.open(work / "base")
    assert_is(work / "base", "new", versions)


def test_a_link_in_place_of_the_journal_is_not_followed(versions: Path, work: Path) -> None:
    victim = work / "victim"
    victim.write_text("mine")
    journal_path(work / "base").symlink_to(victim)
    with pytest.raises(GymfastError, match="gymfast-journal"):
        update(str(work))
    assert victim.read_text() == "mine"
    journal_path(work / "base").unlink()
    assert_is(work / "base", "base", versions)
