"""Communicators of NCCL that lose ranks and get new ones, in one process and in several."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from channel_group import Controls, in_threads
from nccl_doubles import NEW_FUNCTIONS, ROOT, Double, build

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Hub, Slot, connect
from gymfast.channels.nccl import NcclChannel, open_nccl
from gymfast.testing.channel_contract import noise


@pytest.fixture
def controls() -> Iterator[Controls]:
    group = Controls(3)
    yield group
    group.close()


def opened(
    controls: Controls, double: Double, old: list[NcclChannel | None], **options: Any
) -> list[Any]:
    options = {"path": double.path, "cuda_path": double.path, "timeout_s": 5, **options}
    works = [
        partial(open_nccl, control, replaces=one, **options)
        for control, one in zip(controls.all, old, strict=True)
    ]
    return in_threads(*works)


def broadcast(channels: list[NcclChannel], root: int, seed: int) -> None:
    """All ranks end with the bytes of the root."""
    memory = [noise(seed, 5000) if c.rank == root else np.zeros(5000, np.uint8) for c in channels]

    def work(channel: NcclChannel, bytes_: np.ndarray) -> None:
        channel.begin([Slot(root, bytes_)])
        channel.finish()

    works = [partial(work, c, m) for c, m in zip(channels, memory, strict=True)]
    assert in_threads(*works) == [None] * len(channels)
    assert all((one == noise(seed, 5000)).all() for one in memory)


def lose(controls: Controls, channels: list[NcclChannel], rank: int) -> list[NcclChannel]:
    """A rank dies, the others notice and form again; their channels."""
    controls.all.pop(rank).close()
    channels.pop(rank).discard()

    def fail(channel: NcclChannel) -> None:
        channel.begin([Slot(0, np.zeros(5000, np.uint8))])
        channel.finish()

    errors = in_threads(*(partial(fail, channel) for channel in channels))
    assert any("remote process exited" in str(error) for error in errors), errors
    for channel in channels:
        channel.abort("a rank is lost")
    controls.form()
    return channels


def go_on_after_a_loss(double: Double) -> dict[str, list[str]]:
    """Three ranks, then two, then three again; calls of each part."""
    controls = Controls(3)
    channels = opened(controls, double, [None] * 3)
    broadcast(channels, 1, 0)
    old = lose(controls, channels, 1)
    double.calls()
    two = opened(controls, double, [*old])
    broadcast(two, 1, 1)
    calls = {"lost": double.calls()}
    controls.all.append(connect(controls.hub.address, 1))
    controls.hub.control.wait_for(3, 5) if len(controls.all) == 2 else None
    assert in_threads(*(partial(c.form, 10) for c in controls.all)) == [(0, 1, 2)] * 3
    three = opened(controls, double, [*two, None])
    by_rank = sorted(three, key=lambda channel: channel.rank)
    for root in range(3):
        broadcast(by_rank, root, 2 + root)
    calls["came"] = double.calls()
    calls["order"] = [str(list(channel.members)) for channel in three]
    in_threads(*(channel.close for channel in three))
    controls.close()
    return calls


def test_after_a_loss_the_communicator_shrinks_and_grows_without_restart(double: Double) -> None:
    calls = go_on_after_a_loss(double)
    made = [call for call in calls["lost"] if "group" not in call]
    assert sorted(made) == ["r0 abort", "r0 shrink 1", "r2 abort", "r2 shrink 1"]
    # Who comes is appended: NCCL's rank 2 is rank 1 of the control plane.
    assert set(calls["order"]) == {"[0, 2, 1]"}
    grown = [call for call in calls["came"] if "grow" in call]
    assert sorted(grown) == ["r0 grow 3", "r0 grow_id", "r1 grow 3", "r2 grow_into 3"]
    assert "unique_id" not in calls["lost"] + calls["came"]


def test_an_old_nccl_makes_the_communicator_anew(double: Double, tmp_path: Path) -> None:
    path = build(double.folder, "old/libnccl.so.2", hidden=NEW_FUNCTIONS)
    program = (
        "import json, sys; sys.path.insert(0, 'tests'); sys.path.insert(0, 'tests/channels')\n"
        "from pathlib import Path; from nccl_doubles import Double\n"
        "from test_nccl_group import go_on_after_a_loss\n"
        "double = Double(Path(sys.argv[1])); double.set('version', 22203)\n"
        "assert 'shrink' not in double.load().features\n"
        "print(json.dumps(go_on_after_a_loss(double)))"
    )
    command = [sys.executable, "-P", "-c", program, str(path)]
    environment = os.environ | {"DOUBLE_SEGMENTS": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    calls = json.loads(done.stdout)
    made = [call for call in calls["lost"] if "group" not in call]
    assert sorted(made) == ["r0 init 2", "r1 init 2", "unique_id"]
    assert calls["came"].count("unique_id") == 1
    assert {f"r{rank} init 3" for rank in range(3)} <= set(calls["came"])
    assert set(calls["order"]) == {"[0, 1, 2]"}


def test_a_shrink_that_fails_becomes_a_new_communicator(
    controls: Controls, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = opened(controls, double, [None] * 3)
    old = lose(controls, channels, 2)
    double.calls()
    shrink = NcclChannel.shrink

    def fail_on_rank_0(channel: NcclChannel, parent: NcclChannel) -> None:
        if channel.rank == 0:
            double.set("async_error", 2, rank=0)
        shrink(channel, parent)

    monkeypatch.setattr(NcclChannel, "shrink", fail_on_rank_0)
    two = opened(controls, double, [*old])
    broadcast(two, 1, 1)
    calls = double.calls()
    assert calls.count("unique_id") == 1
    assert {"r0 init 2", "r1 init 2"} <= set(calls)
    in_threads(*(channel.close for channel in two))


# ---- in processes


def tensors(seed: int) -> dict[str, np.ndarray]:
    return {f"t{i}": noise(seed + i, size) for i, size in enumerate([100_000, 31, 300_000])}


def run_rank(path: str, port: int, rank: int) -> None:
    """One rank in a process of its own: a version, then a loss, then another version."""
    control = connect(("127.0.0.1", port), rank)
    control.form(20)
    follow(control, path, rank, 1 + rank)


def follow(control: Any, path: str, rank: int, stop_after: int) -> list[str]:
    """Versions with all ranks; rank 2 is killed in the second, the others go on with a third."""
    options = {"path": path, "cuda_path": path, "timeout_s": 20}
    channel = open_nccl(control, **options)
    said = []
    for version in (1, 2):
        sent = tensors(100 * version)
        memory = {n: t.copy() if rank == 0 else np.zeros_like(t) for n, t in sent.items()}
        if version == 2 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            transfer(control, channel, sent).run(version, memory)
            assert all((memory[name] == sent[name]).all() for name in sent)
            said.append("ok")
        except Exception as error:  # noqa: BLE001
            said.append(str(error))
    control.form(20)
    channel = open_nccl(control, replaces=channel, **options)
    sent = tensors(300)
    memory = {n: t.copy() if rank == 0 else np.zeros_like(t) for n, t in sent.items()}
    transfer(control, channel, sent).run(3, memory)
    assert all((memory[name] == sent[name]).all() for name in sent)
    said.append("ok")
    channel.close()
    return said


def transfer(control: Any, channel: NcclChannel, sent: dict[str, np.ndarray]) -> BucketTransfer:
    share = [BucketTensor(name, "U8", (len(t),), len(t)) for name, t in sent.items()]
    made = BucketTransfer(control, channel, {0: share}, 65536, environment=channel.environment)
    made.agree()
    return made


def test_processes_go_on_after_one_was_killed(double: Double, tmp_path: Path) -> None:
    hub = Hub()
    program = (
        "import sys; sys.path.insert(0, 'tests'); sys.path.insert(0, 'tests/channels')\n"
        "from test_nccl_group import run_rank\n"
        "run_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", program, double.path, str(hub.port), str(rank)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 2)
    ]
    try:
        hub.control.wait_for(3, 30)
        hub.control.form(20)
        said = follow(hub.control, double.path, 0, 0)
        assert said[0] == said[2] == "ok"
        assert "rank 2" in said[1]
        _, errors = ranks[0].communicate(timeout=30)
        assert ranks[0].returncode == 0, errors[-3000:]
        assert ranks[1].wait(30) == -signal.SIGKILL
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        hub.close()
