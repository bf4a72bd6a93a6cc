"""`gymfast sync compact`: folds for readers far behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_commands import Gymfast
from safetensors.numpy import load_file, save_file

from gymfast.sync.bandwidth import Bandwidth

RUN = ("--run", "demo")


@pytest.fixture
def versions(files: Path) -> list[str]:
    """Checkpoint files of versions 0 to 4, each a small step after the one before."""
    weights = load_file("old.safetensors")
    names = []
    for version in range(5):
        names.append(f"v{version}.safetensors")
        save_file(weights, names[-1])
        weights = {name: value.copy() for name, value in weights.items()}
        weights["embed.weight"].reshape(-1)[version::101] += 1
    return names


def weights_of(path: str | Path) -> dict[str, bytes]:
    shards = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [path]
    return {name: w.tobytes() for shard in shards for name, w in load_file(shard).items()}


def test_compact_folds_versions_for_readers_far_behind(
    versions: list[str], gymfast: Gymfast
) -> None:
    assert gymfast("sync", "publish", "store", *versions, *RUN).code == 0
    options = ("--every", "2", "--levels", "1", "--anchors", "4", "--once")
    done = gymfast("sync", "compact", "store", "folds", *RUN, *options)
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert lines[0].startswith("fold of versions 1 to 2: ")
    assert " in place of 2 frames of " in lines[0]
    assert lines[2].startswith("full state of version 4: ")
    assert gymfast("sync", "compact", "store", "folds", *RUN, *options).out == ""
    status = gymfast("sync", "status", "store", *RUN).out
    assert "folds: 3 of " in status
    assert "up to version 4, full states of version 4" in status
    assert len(gymfast("sync", "status", "store", *RUN, "--json").json["folds"]) == 3
    pulled = gymfast("sync", "pull", "store", "late.safetensors", *RUN, "--json").json
    assert (pulled["version"], pulled["kind"], pulled["num_deltas"]) == (4, "anchor", 0)
    assert weights_of("late.safetensors") == weights_of(versions[4])
    report = gymfast("sync", "gc", "store", *RUN, "--keep", "1", "--dry-run")
    assert report.code == 0
    assert gymfast("sync", "fsck", "store", *RUN).code == 0


@pytest.mark.ci
def test_compact_waits_for_the_run_and_follows_it_until_it_is_interrupted(
    versions: list[str], gymfast: Gymfast
) -> None:
    words = ["sync", "compact", "store", "folds", *RUN, "--every", "2", "--interval", "0.05"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gymfast", *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert "not in store yet" in process.stderr.readline()
        assert "no version yet" in process.stderr.readline()
        assert gymfast("sync", "publish", "store", *versions, *RUN).code == 0
        found = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert [(f["base_version"], f["version"]) for f in found] == [(0, 2), (2, 4)]
    assert found[0]["schema"] == "gymfast.sync.compact/1"
    assert process.returncode == 130


@pytest.mark.usefixtures("files")
def test_compact_says_what_is_wrong(gymfast: Gymfast) -> None:
    odd = gymfast("sync", "compact", "store", "folds", *RUN, "--every", "4", "--anchors", "6")
    assert odd.code == 2
    assert "no multiple" in odd.err
    absent = gymfast("sync", "compact", "nowhere", "folds", *RUN, "--once")
    assert absent.code == 5
    assert "no version yet" in absent.err


@pytest.mark.parametrize("command", ["fsck", "verify", "compact"])
def test_what_reads_or_writes_bulk_takes_it_from_a_budget(
    command: str, versions: list[str], gymfast: Gymfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gymfast("sync", "publish", "store", *versions[:4], *RUN).code == 0
    taken: list[int] = []
    monkeypatch.setattr(Bandwidth, "take", lambda self, num_bytes: taken.append(num_bytes))
    more = {
        "fsck": (),
        "verify": ("new.safetensors",),  # which is no version: its frame is read to say where
        "compact": ("folds", "--every", "2", "--levels", "1", "--once"),
    }[command]
    gymfast("sync", command, "store", *more, *RUN, "--bwlimit", "100M")
    frames = sum(path.stat().st_size for path in Path("store/demo/objects").rglob("*/*"))
    smallest = min(path.stat().st_size for path in Path("store/demo/objects").rglob("*/*"))
    assert sum(taken) > (smallest if command == "verify" else frames)
