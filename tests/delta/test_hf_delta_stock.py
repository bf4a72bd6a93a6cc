"""slime's own receiver on our versions and directories; needs GYMFAST_SLIME_SOURCE=<a checkout>."""

from __future__ import annotations

import os
import shutil
import types
from pathlib import Path

import hf_delta_crash_work
import numpy as np
import pytest
from delta_checkpoints import read, write_sharded
from delta_weights import changed, random_tensor

from gymfast.delta.hf_delta import publish_delta, publish_full, pull
from gymfast.testing.compare import assert_bits_equal
from gymfast.testing.syscalls import SyscallFaults

PATCH = Path("docker/patch/latest/sglang-pull_weights.patch")
MODULE = "+++ b/python/sglang/srt/weight_sync/local_checkpoint.py\n"


@pytest.fixture(scope="module")
def stock() -> types.ModuleType:
    """The engine-side module that slime adds to SGLang, taken out of its patch."""
    source = os.environ.get("GYMFAST_SLIME_SOURCE")
    if source is None:
        pytest.skip("needs GYMFAST_SLIME_SOURCE")
    added = (Path(source) / PATCH).read_text().partition(MODULE)[2].split("\ndiff --git ")[0]
    text = "\n".join(line[1:] for line in added.splitlines() if line.startswith("+"))
    module = types.ModuleType("local_checkpoint")
    exec(compile(text, str(PATCH), "exec"), module.__dict__)
    return module


@pytest.fixture
def states(tmp_path: Path) -> list[dict]:
    """Five states; the first is in `base`, all in `state-N`."""
    rng = np.random.default_rng(0)
    states = [{d: random_tensor(d, (200, 33), rng) for d in ("BF16", "F32", "U8", "I64")}]
    for _ in range(4):
        states.append({n: changed(t, 0.05, rng) for n, t in states[-1].items()})
    for number, state in enumerate(states):
        write_sharded(tmp_path / (f"state-{number}" if number else "base"), state)
    return states


def publish(folder: Path, states: list[dict], encoding: str, algorithm: str) -> None:
    old = folder / "base"
    for number in range(1, len(states)):
        new = folder / f"state-{number}"
        publish_delta(folder / "versions", number, old, new, encoding=encoding, algorithm=algorithm)
        old = new


def paths(folder: Path) -> list[str]:
    return [str(folder / name) for name in ("local", "base", "versions")]


@pytest.mark.parametrize("algorithm", ["xxh3-128", "blake3", "adler32"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_the_stock_receiver_accepts_our_versions(
    stock, states, tmp_path: Path, encoding: str, algorithm: str
) -> None:
    publish(tmp_path, states, encoding, algorithm)
    for number, state in enumerate(states):
        stock.pull(*paths(tmp_path), number)
        assert_bits_equal(read(tmp_path / "local"), state)


def test_the_two_receivers_take_turns_in_one_directory(stock, states, tmp_path: Path) -> None:
    publish(tmp_path, states, "xor", "xxh3-128")
    for number, state in enumerate(states):
        (stock.pull if number % 2 else pull)(*paths(tmp_path), number)
        assert_bits_equal(read(tmp_path / "local"), state)


def test_both_are_reset_by_a_full_version(stock, states, tmp_path: Path) -> None:
    publish(tmp_path, states, "xor", "xxh3-128")
    publish_full(tmp_path / "versions", 5, tmp_path / "state-2")
    for receiver in (stock.pull, pull):
        local, base, versions = paths(tmp_path)
        receiver(local, base, versions, 3)
        receiver(local, base, versions, 5)
        assert_bits_equal(read(Path(local)), states[2])
        (tmp_path / "local").rename(tmp_path / receiver.__module__)


def test_the_stock_code_begins_again_where_our_pull_was_killed(stock, states, tmp_path) -> None:
    """Between our journal's commit and its end there is no state that the stock code believes."""
    publish(tmp_path, states, "xor", "xxh3-128")
    pull(*paths(tmp_path), 1)
    state = tmp_path / "local" / ".weight_sync" / "state.json"
    state.unlink()
    shard = next((tmp_path / "local").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-50] + b"x" * 50)
    (tmp_path / "local" / ".gymfast-journal").write_bytes(b"left over")
    stock.pull(*paths(tmp_path), 3)
    assert_bits_equal(read(tmp_path / "local"), states[3])
    pull(*paths(tmp_path), 4)
    assert_bits_equal(read(tmp_path / "local"), states[4])


def test_the_stock_code_ends_with_the_exact_bytes_wherever_our_pull_is_killed(
    stock, states, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    publish(tmp_path, states, "xor", "xxh3-128")
    for name in ("base", "versions"):
        (tmp_path / name).rename(work / name)
    pull(*paths(work), 1)
    saved = tmp_path / "saved"
    shutil.copytree(work, saved)
    with SyscallFaults(Path(hf_delta_crash_work.__file__), "follow") as faults:
        writes = ("fsync", "pwrite64", "rename", "unlink", "ftruncate")
        for call in [call for call in faults.trace(str(work)) if call.name in writes]:
            shutil.rmtree(work)
            shutil.copytree(saved, work)
            assert faults.run(str(work), fault=call.killed()).was_killed
            stock.pull(*paths(work), 3)
            assert_bits_equal(read(work / "local"), states[3])
