"""What a killed `gymfast delta encode` leaves, and what the next one to the same output removes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_commands import Gymfast

from gymfast.cli.files import new_file
from gymfast.delta import temporary

ENCODE = ("delta", "encode", "old.safetensors", "new.safetensors", "-o", "step.gfd")
KILLED = """
import os, signal, sys
from gymfast.cli import main
from gymfast.delta.checkpoint_encode import CheckpointEncoder
real = CheckpointEncoder.sections
def sections(self, progress):
    yield next(real(self, progress))
    os.kill(os.getpid(), signal.SIGKILL)
CheckpointEncoder.sections = sections
sys.exit(main(sys.argv[1:]))
"""


def kill_an_encode(*options: str) -> None:
    """Runs the command in a process that kills itself (SIGKILL) behind the first section."""
    done = subprocess.run([sys.executable, "-c", KILLED, *ENCODE, *options], check=False)
    assert done.returncode == -9


def hidden() -> list[Path]:
    return sorted(Path().glob(".*"))


@pytest.mark.parametrize("options", [(), ("--force",)], ids=["new", "forced"])
def test_the_next_encode_removes_what_killed_ones_left(
    options: tuple[str, ...], files: Path, gymfast: Gymfast
) -> None:
    if options:
        Path("step.gfd").write_bytes(b"an older frame")
    kill_an_encode(*options)
    kill_an_encode(*options)
    assert len(hidden()) == 1, "the second one removed what the first one left"
    assert Path("step.gfd").exists() == bool(options)
    assert gymfast(*ENCODE[:-1], "other.gfd").code == 0
    assert len(hidden()) == 1, "it may be of use to nobody, but it is not of this output"
    assert gymfast(*ENCODE, *options).code == 0
    assert hidden() == []
    assert Path("step.gfd").read_bytes() == Path("other.gfd").read_bytes()


def test_what_a_live_encode_writes_stays(files: Path, gymfast: Gymfast) -> None:
    with new_file(Path("step.gfd"), is_forced=True) as stream:
        stream.write(b"half a frame")
        stream.flush()
        (mine,) = hidden()
        assert gymfast(*ENCODE).code == 0
        assert hidden() == [mine]
        assert mine.read_bytes() == b"half a frame"
    assert hidden() == []
    assert Path("step.gfd").read_bytes() == b"half a frame"


def test_other_names_and_other_sorts_of_files_stay(files: Path, gymfast: Gymfast) -> None:
    Path("target").write_bytes(b"mine")
    for name in (
        *("step.gfd.gymfast-0123abcd", ".step.gfd.gymfast-0123abcd.bak"),
        ".step.gfd.gymfast-journal",
    ):
        Path(name).write_bytes(b"mine")
    Path(".step.gfd.gymfast-0123ABCD").write_bytes(b"mine")
    Path(".step.gfd.gymfast-aaaaaaaa").symlink_to("target")
    os.mkfifo(".step.gfd.gymfast-bbbbbbbb")
    Path(".step.gfd.gymfast-cccccccc").write_bytes(b"of the dead")
    before = {path.name for path in Path().iterdir()}
    assert gymfast(*ENCODE).code == 0
    after = {path.name for path in Path().iterdir()} - {"step.gfd"}
    assert before - after == {".step.gfd.gymfast-cccccccc"}
    assert Path("target").read_bytes() == b"mine"


def test_a_file_swept_before_it_was_locked_is_made_again(files: Path, monkeypatch) -> None:
    real, names = temporary._open_locked, []

    def swept_at_first(path: Path, flags: int, **options: bool) -> int:
        fd = real(path, flags, **options)
        names.append(path.name)
        if len(names) == 1:
            path.unlink()
        return fd

    monkeypatch.setattr(temporary, "_open_locked", swept_at_first)
    with new_file(Path("step.gfd"), is_forced=False) as stream:
        stream.write(b"a frame")
    assert len(names) == 2
    assert Path("step.gfd").read_bytes() == b"a frame"
    assert hidden() == []


def test_without_locks_files_are_written_and_none_is_removed(files: Path, monkeypatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(temporary.errno.ENOLCK, "no locks available")

    monkeypatch.setattr(temporary.fcntl, "flock", no_locks)
    Path(".step.gfd.gymfast-cccccccc").write_bytes(b"dead or alive")
    with new_file(Path("step.gfd"), is_forced=False) as stream:
        stream.write(b"a frame")
    assert Path("step.gfd").read_bytes() == b"a frame"
    assert [path.name for path in hidden()] == [".step.gfd.gymfast-cccccccc"]
