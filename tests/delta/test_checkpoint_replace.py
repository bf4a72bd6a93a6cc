"""A checkpoint directory written in the place of another: old or new, and nothing else removed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import delta_crash_work
import pytest
from delta_checkpoints import read, write_sharded
from delta_weights import small_pair

import gymfast.delta as delta
from gymfast.delta import checkpoint_replace
from gymfast.delta.checkpoint import apply_checkpoint
from gymfast.delta.checkpoint_replace import put_back
from gymfast.errors import GymfastError
from gymfast.testing.compare import assert_bits_equal
from gymfast.testing.syscalls import SyscallFaults

WORK = Path(delta_crash_work.__file__)
NAMES = {"base", "frame", "out"}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with `base`, `frame`, and at `out` a checkpoint of other weights in more shards."""
    old, new = small_pair()
    folder = tmp_path / "work"
    folder.mkdir()
    write_sharded(folder / "base", old)
    write_sharded(folder / "out", dict(list(old.items())[:3]), num_shards=3)
    (folder / "frame").write_bytes(delta.encode(old, new, backend="cpu"))
    return folder


def state_of(out: Path) -> str:
    """Whether a checkpoint is the one that was there, or the new one; anything else fails."""
    old, new = small_pair()
    held = read(out)
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    if len(shards) == 3:
        assert_bits_equal(held, dict(list(old.items())[:3]))
        return "old"
    assert_bits_equal(held, new)
    assert {path.name for path in out.iterdir()} == {
        *(*shards, "model.safetensors.index.json", "config.json")
    }
    return "new"


def test_a_kill_at_any_system_call_leaves_the_old_or_the_new_checkpoint(work: Path) -> None:
    saved, out = work.with_name("saved"), work / "out"
    shutil.copytree(work, saved)
    seen = []
    with SyscallFaults(WORK, "replace") as faults:
        points = faults.trace(str(work))
        assert state_of(out) == "new"
        for call in points[len(points) // 2 :]:
            shutil.rmtree(work)
            shutil.copytree(saved, work)
            assert faults.run(str(work), fault=call.killed()).was_killed, call.name
            put_back(out)
            seen.append(state_of(out))
            delta_crash_work.replace(str(work))
            assert state_of(out) == "new"
            assert {path.name for path in work.iterdir()} == NAMES, call.name
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {"old", "new"}


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_an_error_at_any_system_call_leaves_the_old_or_the_new_checkpoint(
    work: Path, error: str
) -> None:
    saved, out = work.with_name("saved"), work / "out"
    shutil.copytree(work, saved)
    with SyscallFaults(WORK, "replace") as faults:
        for call in faults.trace(str(work))[-60:]:
            shutil.rmtree(work)
            shutil.copytree(saved, work)
            outcome = faults.run(str(work), fault=call.failed(error))
            put_back(out)
            assert state_of(out) == "new" or outcome.error, call.name


def add_file(out: Path) -> None:
    (out / "thesis.txt").write_text("mine")


def add_folder(out: Path) -> None:
    (out / "results").mkdir()


def add_hidden(out: Path) -> None:
    (out / ".git").mkdir()


def add_other_weights(out: Path) -> None:
    (out / "adapter.safetensors").write_bytes(b"mine")


def damage(out: Path) -> None:
    next(out.glob("*.safetensors")).write_bytes(b"cut")


def link_a_shard(out: Path) -> None:
    shard = next(out.glob("*.safetensors"))
    shutil.copy(shard, out / "blob.safetensors")
    shard.unlink()
    shard.symlink_to("blob.safetensors")


def link_all(out: Path) -> None:
    out.rename(out.with_name("elsewhere"))
    out.symlink_to("elsewhere")


def no_checkpoint(out: Path) -> None:
    shutil.rmtree(out)
    out.mkdir()
    (out / "config.json").write_text("{}")


CHANGES = [
    *(add_file, add_folder, add_hidden, add_other_weights),
    *(damage, link_a_shard, link_all, no_checkpoint),
]


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_directory_with_anything_else_in_it_is_refused_untouched(
    change: Callable[[Path], None], work: Path
) -> None:
    change(work / "out")
    before = tree(work)
    with pytest.raises(GymfastError, match="out") as caught:
        apply_checkpoint(work / "base", work / "frame", work / "out", backend="cpu", replace=True)
    assert type(caught.value) is GymfastError
    assert tree(work) == before


def test_a_file_that_comes_while_the_new_one_is_written_stays(work: Path, monkeypatch) -> None:
    real = checkpoint_replace.replace_directory

    def add_then_replace(new: Path, out: Path, known: set[str]) -> None:
        add_file(out)
        real(new, out, known)

    monkeypatch.setattr("gymfast.delta.checkpoint_write.replace_directory", add_then_replace)
    with pytest.raises(GymfastError, match=r"thesis\.txt"):
        apply_checkpoint(work / "base", work / "frame", work / "out", backend="cpu", replace=True)
    assert (work / "out" / "thesis.txt").read_text() == "mine"
    assert {path.name for path in work.iterdir()} == NAMES
    (work / "out" / "thesis.txt").unlink()
    assert state_of(work / "out") == "old"


def test_without_replace_a_checkpoint_stays(work: Path) -> None:
    before = tree(work)
    with pytest.raises(GymfastError, match="is there already"):
        apply_checkpoint(work / "base", work / "frame", work / "out", backend="cpu")
    assert tree(work) == before
