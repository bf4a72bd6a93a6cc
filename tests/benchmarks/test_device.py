"""The device run on the CPU: the shim of the CUDA module equals, and whatever is wrong is found."""

from __future__ import annotations

import csv
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from cuda_module import load_module

from benchmarks.device import codec, sanitizer
from benchmarks.device.checks import MODES
from benchmarks.device.facts import NO_GPU
from benchmarks.device.phases import PHASES
from benchmarks.device.results import Report, Subject, row_of

ROOT = Path(__file__).parents[2]
NO_DEVICE = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
Breakage = Callable[[ModuleType, ModuleType], None]


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return load_module(tmp_path_factory.mktemp("device_shim"))


def run(out: Path, *arguments: str) -> tuple[int, dict]:
    """Exit status and codec.json of a run in this process."""
    status = codec.main(["--out", str(out), *arguments])
    return status, json.loads((out / "codec.json").read_text())


def states(document: dict) -> dict[str, str]:
    return {phase["name"]: phase["state"] for phase in document["phases"]}


@pytest.mark.ci
def test_a_run_over_the_shim_compares_everything_and_writes_its_files(shim, tmp_path):
    out = ("--out", str(tmp_path), "--elements", "50000", "--densities", "1")
    command = [sys.executable, "-m", "benchmarks.device.codec", "--module", shim.__file__, *out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "codec.json").read_text())
    assert document["schema"] == "gymfast-device-codec/1"
    expected = dict.fromkeys(PHASES, "done")
    assert states(document) | {"sanitizer": "done"} == expected
    equality = document["checks"]["equality"]
    assert equality["num_problems"] == 0
    assert equality["num_elements"] > 40_000
    assert all(equality["blocks_by_mode"][mode] for mode in MODES)
    assert document["checks"]["damage"]["num_damaged"] > 1000
    lines = (tmp_path / "codec.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    assert len(rows) == len(document["rows"])
    found = {(row["codec"], row["op"]) for row in rows}
    assert {("bound", "device copy"), ("gymfast cuda", "digest"), ("torch sparse", "apply")} < found
    for profile in ("fast", "small", "auto"):
        for op in ("encode", "apply"):
            assert (f"gymfast cuda {profile}", op) in found
    for row in document["rows"]:
        assert row["rounds"] == 7
        assert row["wall_p10_s"] <= row["wall_s"] <= row["wall_p90_s"]
    assert not document["targets"]  # a host clock says nothing about a device


def body_byte(shim: ModuleType, broken: ModuleType) -> None:
    def encode_blocks(*arguments: object) -> None:
        shim.encode_blocks(*arguments)
        arguments[16][:1] ^= 1

    broken.encode_blocks = encode_blocks


def snapshot_byte(shim: ModuleType, broken: ModuleType) -> None:
    def encode_blocks(*arguments: object) -> None:
        shim.encode_blocks(*arguments)
        arguments[0][-1:] ^= 1

    broken.encode_blocks = encode_blocks


def digest_word(shim: ModuleType, broken: ModuleType) -> None:
    def digest_blocks(*arguments: object) -> None:
        shim.digest_blocks(*arguments)
        arguments[8][-1, 1] += 1

    broken.digest_blocks = digest_blocks


def applied_byte(shim: ModuleType, broken: ModuleType) -> None:
    def apply_blocks(*arguments: object) -> None:
        shim.apply_blocks(*arguments)
        arguments[0][:1] ^= 1

    broken.apply_blocks = apply_blocks


def no_rollback(shim: ModuleType, broken: ModuleType) -> None:
    broken.rollback_blocks = lambda *arguments: None


BROKEN: dict[str, Breakage] = {
    "section 0 of encode": body_byte,
    "snapshot after encode": snapshot_byte,
    "digests of the base": digest_word,
    "tensor after apply": applied_byte,
    "base after rollback": no_rollback,
}


def broken_module(shim: ModuleType, breakage: Breakage, monkeypatch) -> str:
    """The name under which a module is found that is the shim but for one function."""
    module = ModuleType("broken_cuda")
    module.__dict__.update({name: getattr(shim, name) for name in dir(shim) if name[0] != "_"})
    module.__file__ = __file__
    breakage(shim, module)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


@pytest.mark.ci
@pytest.mark.parametrize("what", BROKEN)
def test_one_wrong_byte_makes_the_run_fail(what, shim, tmp_path, monkeypatch):
    name = broken_module(shim, BROKEN[what], monkeypatch)
    arguments = ("--module", name, "--elements", "9000", "--phases", "equality")
    status, document = run(tmp_path, *arguments)
    assert status == codec.FAILED
    assert states(document) == {"equality": "different"}
    assert any(what in problem for problem in document["checks"]["equality"]["problems"])


@pytest.mark.ci
def test_a_damaged_body_that_is_taken_makes_the_run_fail(shim, tmp_path, monkeypatch):
    def says_no_error(shim: ModuleType, broken: ModuleType) -> None:
        def apply_blocks(*arguments: object) -> None:
            shim.apply_blocks(*arguments)
            arguments[14][0] = -1

        broken.apply_blocks = apply_blocks

    name = broken_module(shim, says_no_error, monkeypatch)
    status, document = run(tmp_path, "--module", name, "--phases", "damage", "--flips", "1")
    assert status == codec.FAILED
    assert "error 0, expected" in document["checks"]["damage"]["problems"][0]


@pytest.mark.ci
def test_a_phase_that_raises_fails_and_the_next_one_runs(shim, tmp_path, monkeypatch):
    def raises(shim: ModuleType, broken: ModuleType) -> None:
        def digest_blocks(*arguments: object) -> None:
            raise RuntimeError("CUDA refused a launch")

        broken.digest_blocks = digest_blocks

    name = broken_module(shim, raises, monkeypatch)
    arguments = ("--module", name, "--elements", "9000", "--phases", "equality,backends")
    status, document = run(tmp_path, *arguments)
    assert status == codec.FAILED
    assert states(document) == {"equality": "failed", "backends": "done"}
    assert "CUDA refused a launch" in document["phases"][0]["note"]


@pytest.mark.ci
def test_without_time_every_phase_is_skipped_and_the_files_say_so(shim, tmp_path, capsys):
    status, document = run(tmp_path, "--module", shim.__file__, "--budget-s", "0")
    assert status == codec.NO_TIME
    assert states(document) == dict.fromkeys(PHASES, "cut")
    assert capsys.readouterr().out.count("skipped: no time") == len(PHASES)


@pytest.mark.ci
def test_a_phase_stops_at_its_deadline(shim, tmp_path, monkeypatch):
    ticks = itertools.count(step=0.05)  # a clock that goes on when it is looked at
    clock = SimpleNamespace(monotonic=ticks.__next__)
    monkeypatch.setattr("benchmarks.device.deadline.time", clock)
    arguments = ("--module", shim.__file__, "--budget-s", "1", "--phases", "equality,speed")
    status, document = run(tmp_path, *arguments)
    assert status == codec.NO_TIME
    assert states(document) == {"equality": "cut", "speed": "cut"}
    assert 0 < document["checks"]["equality"]["num_elements"] < 50_000


@pytest.mark.ci
@pytest.mark.parametrize(
    ("script", "status", "state", "note"),
    [
        ('shift 6; "$@" --budget-s 0; test $? = 4', 0, "done", "memcheck equality: nothing found"),
        ("echo Invalid read; exit 77", codec.FAILED, "different", "Invalid read"),
        ("echo Error: Device not supported; exit 1", 0, "done", "memcheck equality skipped"),
    ],
)
def test_the_sanitizer_watches_a_run_of_its_own(
    shim, tmp_path, monkeypatch, script, status, state, note
):
    program = tmp_path / sanitizer.PROGRAM
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(ROOT)
    found, document = run(tmp_path, "--module", shim.__file__, "--phases", "sanitizer")
    assert (found, states(document)) == (status, {"sanitizer": state})
    assert note in document["phases"][0]["note"]


def copy_row(codec_name: str, op: str, copy_ratio: float, clock: str = "CUDA events"):
    subject = Subject(codec_name, op, 0.01, 10_000_000, 4 << 30, clock)
    return row_of(subject, [0.002 / copy_ratio] * 5, [0.002] * 5, 0)


def test_targets_are_shares_of_the_copy_and_only_of_device_clocks():
    report = Report({})
    report.rows = [
        copy_row("gymfast cuda fast", "encode", 0.46),
        copy_row("gymfast cuda fast", "apply", 0.89),
        copy_row("gymfast cuda small", "encode", 0.9, clock="host"),
    ]
    met = {target.what.rpartition(",")[0]: target.is_met for target in report.targets()}
    assert met == {"gymfast cuda fast, encode": True, "gymfast cuda fast, apply": False}


def test_a_row_counts_the_bytes_of_the_state_once_and_those_of_the_copy_twice():
    row = copy_row("bound", "device copy", 1.0)
    assert row.gbps == row.copy_gbps == pytest.approx((4 << 30) / 1e9 / 0.002)
    assert row.copy_moved_gbps == 2 * row.copy_gbps


def one_sentence(text: str) -> bool:
    return text.count("\n") == 1 and "this never ran" in text and "Traceback" not in text


def test_the_script_says_in_one_sentence_that_there_is_no_gpu(tmp_path):
    script = ROOT / "benchmarks/device/codec.sh"
    environment = NO_DEVICE | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == NO_GPU
    assert one_sentence(done.stdout + done.stderr)
    assert one_sentence((tmp_path / "codec.log").read_text())


def test_the_run_says_in_one_sentence_that_there_is_no_gpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.device.codec", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=NO_DEVICE, capture_output=True, text=True, check=False
    )
    assert done.returncode == NO_GPU
    assert one_sentence(done.stdout + done.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.ci
def test_a_phase_that_there_is_not_is_refused(shim, tmp_path, capsys):
    arguments = ["--module", shim.__file__, "--out", str(tmp_path), "--phases", "sped"]
    assert codec.main(arguments) == codec.USAGE
    assert "no phase sped" in capsys.readouterr().err


def test_a_module_that_is_not_there_is_named(tmp_path, capsys):
    assert codec.main(["--module", "no_such_cuda", "--out", str(tmp_path)]) == NO_GPU
    assert "no module 'no_such_cuda' here" in capsys.readouterr().err
