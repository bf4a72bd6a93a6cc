"""New checkpoints in place of one whose in-place update was interrupted: its journal is settled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from delta_checkpoints import read, write
from delta_weights import small_pair

import gymfast.delta as delta
from gymfast.delta.checkpoint import apply_checkpoint
from gymfast.delta.journal import Journal, journal_path
from gymfast.errors import ConflictError, GymfastError
from gymfast.testing.compare import assert_bits_equal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a base, a frame, and an output whose update is committed but not written."""
    old, new = small_pair()
    write(tmp_path / "base.safetensors", old)
    (tmp_path / "frame").write_bytes(delta.encode(old, new, backend="cpu"))
    out = write(tmp_path / "out.safetensors", new)
    with Journal(out) as journal:
        journal.begin([out])
        tail = np.frombuffer(out.read_bytes()[-64:], np.uint8)
        journal.add(0, out.stat().st_size - 64, 1, tail, tail ^ np.uint8(0xFF))
        journal.commit()
    assert journal_path(out).exists()
    return tmp_path


def apply_in(folder: Path) -> None:
    apply_checkpoint(
        folder / "base.safetensors", folder / "frame", folder / "out.safetensors", backend="cpu"
    )


def test_the_journal_of_a_file_that_is_replaced_does_not_change_the_new_one(folder: Path) -> None:
    apply_in(folder)
    assert_bits_equal(read(folder / "out.safetensors"), small_pair()[1])
    names = {path.name for path in folder.iterdir()}
    assert names == {"base.safetensors", "frame", "out.safetensors"}


def test_the_journal_of_a_file_that_is_gone_is_refused_by_name(folder: Path) -> None:
    (folder / "out.safetensors").unlink()
    with pytest.raises(GymfastError, match=r"\.gymfast-journal.*delete it"):
        apply_in(folder)
    assert not (folder / "out.safetensors").exists()
    journal_path(folder / "out.safetensors").unlink()
    apply_in(folder)
    assert_bits_equal(read(folder / "out.safetensors"), small_pair()[1])


def test_a_file_that_another_process_updates_is_not_replaced(folder: Path) -> None:
    out = folder / "out.safetensors"
    before = out.read_bytes()
    with Journal(out) as journal:  # plays what was left
        after = out.read_bytes()
        assert after != before
        journal.begin([out])
        tail = np.frombuffer(after[-64:], np.uint8)
        journal.add(0, out.stat().st_size - 64, 1, tail, tail ^ np.uint8(0xFF))
        journal.commit()
        with pytest.raises(ConflictError, match="another process"):
            apply_in(folder)
        assert out.read_bytes() == after
