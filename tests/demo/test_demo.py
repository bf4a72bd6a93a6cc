"""The quick demo from end to end: real processes, a real SIGKILL, a really damaged object."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gymfast.demo.options import DemoOptions
from gymfast.demo.run import run_demo
from gymfast.errors import GymfastError, MissingDependencyError

LIMIT_S = 200
COMMAND = [sys.executable, "-m", "gymfast", "demo", "--quick", "--versions", "9"]


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """One quick run: folder, parsed JSON, stderr."""
    folder = tmp_path_factory.mktemp("demo")
    report, keep = folder / "report.html", folder / "kept"
    done = subprocess.run(
        [*COMMAND, "--json", "--report", str(report), "--keep", str(keep)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout), done.stderr


def test_nothing_wrong_is_served_and_all_digests_are_equal(quick_run):
    _, result, _ = quick_run
    audit = result["audit"]
    assert audit["wrong"] == []
    assert audit["digests_equal"] is True
    assert audit["num_served"] >= 10
    assert audit["num_outside_reads"] >= 1
    assert all(codec["is_exact"] for codec in result["codecs"] if codec["name"] != "full")


def test_the_receiver_killed_in_mid_apply_restarts_and_heals(quick_run):
    _, result, progress = quick_run
    kill = next(incident for incident in result["incidents"] if incident["kind"] == "kill")
    checkpoint = next(r for r in result["receivers"] if r["name"] == "checkpoint")
    assert kill["receiver"] == "checkpoint"
    assert kill["healed_at_s"] > kill["at_s"]
    assert checkpoint["num_starts"] == 2
    assert "killed with SIGKILL" in progress


def test_both_receivers_refuse_the_damaged_object_and_heal(quick_run):
    _, result, _ = quick_run
    damage = next(i for i in result["incidents"] if i["kind"] == "corruption")
    assert damage["version"] == DemoOptions(num_versions=9, quick=True).damage_version
    assert all(receiver["num_refusals"] >= 1 for receiver in result["receivers"])
    last = result["versions"][-1]["version"]
    assert all(receiver["last_version"] == last for receiver in result["receivers"])


def test_json_has_the_schema_and_the_numbers_of_the_issue(quick_run):
    _, result, _ = quick_run
    assert result["schema"] == "gymfast.demo/1"
    names = [codec["name"] for codec in result["codecs"]]
    assert names == ["full", "xor + zstd-1", "gymfast fast", "gymfast small"]
    for codec in result["codecs"][1:]:
        assert 0 < codec["saving_ratio"] < 1
        assert codec["encode"]["median_gbps"] > 0
        assert codec["apply"]["median_gbps"] > 0
    small = result["codecs"][3]
    assert 1 < small["over_limit_ratio"] < result["codecs"][1]["over_limit_ratio"]
    assert result["memcpy"]["num_samples"] == len(result["versions"]) - 1 >= 6
    assert [p["model"] for p in result["projections"]] == ["Qwen3-8B", "GLM 4.7"]
    assert [p["published_dtype"] for p in result["projections"]] == ["BF16", "FP8"]
    assert "FP8 and INT4" in result["unmeasured"]


def test_stored_bytes_are_those_of_the_small_profile(quick_run):
    _, result, _ = quick_run
    deltas = [version for version in result["versions"] if version["kind"] == "delta"]
    assert deltas
    for version in deltas:  # the replay leaves out the record of the tied head
        assert 0 <= version["stored_bytes"] - version["small_bytes"] < 200


def test_report_of_a_real_run_is_small_and_needs_no_network(quick_run):
    folder, _, _ = quick_run
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 300_000
    assert "http" not in page.replace('http-equiv="', "")
    assert "<script" not in page


def test_keep_leaves_store_checkpoint_and_logs(quick_run):
    folder, _, _ = quick_run
    assert {path.name for path in (folder / "kept").iterdir()} >= {"store", "checkpoint", "logs"}


def test_an_interrupted_demo_leaves_no_process(tmp_path):
    keep = tmp_path / "kept"
    demo = subprocess.Popen(
        [*COMMAND, "--keep", str(keep)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        _wait_for(lambda: len(_processes_of(keep)) >= 2)
        demo.send_signal(signal.SIGINT)
        _, progress = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 130, progress
    assert "Traceback" not in progress
    assert _processes_of(keep) == []


def test_a_killed_demo_takes_its_processes_along(tmp_path):
    keep = tmp_path / "kept"
    with subprocess.Popen([*COMMAND, "--keep", str(keep)], stderr=subprocess.DEVNULL) as demo:
        _wait_for(lambda: len(_processes_of(keep)) >= 2)
        demo.kill()
    _wait_for(lambda: _processes_of(keep) == [])


def test_missing_torch_is_one_sentence_with_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"install gymfast\[torch\]"):
        run_demo(DemoOptions(quick=True), console=None)


def test_keep_refuses_a_folder_with_other_files(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(GymfastError, match=r"thesis\.txt"):
        run_demo(DemoOptions(quick=True, keep=tmp_path), console=None)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def _processes_of(folder: Path) -> list[int]:
    """Processes of the demo that mention the folder of the run, this run's own command aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        is_child = any(word.startswith(b"gymfast.demo.") for word in words)
        if is_child and any(os.fsencode(folder) in word for word in words):
            found.append(int(path.parent.name))
    return found


def _wait_for(condition) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)
