"""A folder store on a FUSE mount that shows what is written late: I34 with a real clock."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from sync.harness import assert_same, history, publisher, reader, zeros_like

from gymfast.errors import DeadlineError, NotFoundError
from gymfast.stores import FileStore, check_create_only

LAG_S = 0.3
WAIT_S = 60.0


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """The mounted folder."""
    if importlib.util.find_spec("mfusepy") is None:
        pytest.skip("needs kernel feature FUSE, libfuse and mfusepy")
    folder, mounted = tmp_path / "folder", tmp_path / "mounted"
    folder.mkdir()
    mounted.mkdir()
    script = Path(__file__).parents[1] / "late_mount.py"
    command = [sys.executable, str(script), str(folder), str(mounted), str(LAG_S)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as server:
        try:
            end_s = time.monotonic() + WAIT_S
            while not os.path.ismount(mounted):
                if server.poll() is not None:
                    said = server.stderr.read().decode()
                    assert re.search(r"Unable to find libfuse|/dev/fuse|fuse: ", said), said
                    pytest.skip("needs kernel feature FUSE, libfuse and mfusepy")
                assert time.monotonic() < end_s
                time.sleep(0.02)
            yield mounted
        finally:
            subprocess.run(["umount", "-l", str(mounted)], check=False, capture_output=True)
            server.kill()


@pytest.mark.ci
def test_I34_a_mount_that_shows_writes_late_only_delays(mount: Path) -> None:
    store = FileStore(mount / "runs")
    check_create_only(store)
    store.create("late", b"1")
    with pytest.raises(NotFoundError):
        store.get("late", max_bytes=1)
    states = history(5, num_tensors=2, size=40)
    source = publisher(store, anchor_every=2, keep=3)
    live = zeros_like(states[0])
    follower, seen = reader(FileStore(mount / "runs"), live, timeout_s=WAIT_S), -1
    for weights in states:
        source.publish(weights)
        with suppress(NotFoundError, DeadlineError):
            follower.pull()
        if follower.version is not None:
            assert follower.version >= seen
            seen = follower.version
            assert_same(live, states[seen])
    follower.wait_until_visible(len(states) - 1, WAIT_S)
    assert follower.pull().version == len(states) - 1
    assert_same(live, states[-1])
    assert store.get("late", max_bytes=1) == b"1"
