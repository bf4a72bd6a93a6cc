"""NCCL is found where it lies, or it is said in one sentence why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nccl_doubles import NEW_FUNCTIONS, ROOT, Double, build

from gymfast.channels.nccl_library import settings, warn_of_expandable_segments

PROGRAM = """
import ctypes, json, sys
from gymfast import _core
from gymfast.errors import GymfastError
given = json.loads(sys.argv[1])
for path in given.get("loaded", []):
    ctypes.CDLL(path)
if "version" in given:
    ctypes.CDLL(given["path"]).double_set(b"version", 0, given["version"])
said = []
for path in given.get("paths", [given.get("path", "")]):
    try:
        cuda = given.get("cuda_path", path)
        found = _core.load_nccl(path, given.get("beside", []), cuda, [])
        said.append([found.version, found.path, found.features, found.cuda_problem])
    except GymfastError as error:
        said.append(f"{type(error).__name__}: {error}")
if given.get("use"):
    try:
        _core.NcclRank(found, 0, 1)
    except GymfastError as error:
        said.append(f"{type(error).__name__}: {error}")
print(json.dumps(said))
"""


def found(**given: Any) -> list[Any]:
    """What a fresh process finds."""
    command = [sys.executable, "-P", "-c", PROGRAM, json.dumps(given)]
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: list[Any] = json.loads(done.stdout)
    return said


@pytest.fixture
def real_name(double: Double) -> str:
    """A double that has the name of NCCL."""
    return str(build(double.folder, "a/libnccl.so.2"))


ALL = [
    *("nonblocking", "memory", "registration", "windows"),
    *("shrink", "grow", "revoke", "call-config"),
]


def test_features_are_probed_by_symbol_and_version(double: Double, real_name: str) -> None:
    assert found(path=real_name, version=23203) == [["2.32.3", real_name, ALL, ""]]
    ((_, _, at_2_18, _),) = found(path=real_name, version=21800)
    assert at_2_18 == ["nonblocking", "grow", "revoke"]
    old = str(build(double.folder, "old/libnccl.so.2", hidden=NEW_FUNCTIONS))
    ((_, _, features, _),) = found(path=old, version=22203)
    assert features == ["nonblocking", "memory", "registration"]


def test_the_copy_of_the_process_comes_first_then_what_lies_beside(
    double: Double, real_name: str
) -> None:
    other = str(build(double.folder, "b/libnccl.so.2"))
    cuda = {"cuda_path": real_name}
    assert found(loaded=[other], beside=[real_name], **cuda)[0][1] == other
    assert found(beside=["/nowhere/libnccl.so.2", real_name], **cuda)[0][1] == real_name


def test_two_different_nccls_in_one_process_are_refused(double: Double, real_name: str) -> None:
    other = str(build(double.folder, "b/libnccl.so.2"))
    words = (
        f"MissingDependencyError: two different NCCLs in one process, {real_name} and {other}: "
        "start a process that loads one of them only"
    )
    assert found(loaded=[real_name], path=other) == [words]
    assert found(loaded=[real_name, other]) == [words]
    assert found(paths=[real_name, other, real_name])[1] == words
    linked = double.folder / "c"
    linked.mkdir(exist_ok=True)
    (linked / "libnccl.so.2").unlink(missing_ok=True)
    (linked / "libnccl.so.2").symlink_to(real_name)
    assert found(loaded=[real_name], path=str(linked / "libnccl.so.2"))[0][1] == real_name


def test_an_nccl_that_is_too_old_is_refused(real_name: str) -> None:
    words = (
        f"MissingDependencyError: NCCL at {real_name} is 2.17.8, 2.18.0 is the oldest that "
        "gymfast works with: install a newer"
    )
    assert found(path=real_name, version=21708) == [words]
    assert "is 2.8.3, 2.18.0 is the oldest" in found(path=real_name, version=2803)[0]


def test_an_nccl_without_a_function_is_refused(double: Double) -> None:
    path = str(build(double.folder, "cut/libnccl.so.2", hidden=("ncclCommAbort",)))
    words = f"NCCL 2.30.7 at {path} has no ncclCommAbort: it is damaged or cut down"
    assert found(path=path) == [f"MissingDependencyError: {words}"]


def test_no_nccl_is_one_sentence(tmp_path: Path) -> None:
    (said,) = found(path="/nowhere/libnccl.so.2")
    assert said.startswith("MissingDependencyError: no NCCL was found: /nowhere/libnccl.so.2: ")
    assert said.endswith(
        "; install torch with CUDA or nvidia-nccl-cu13, or give the path of libnccl.so.2"
    )
    rubbish = tmp_path / "libnccl.so.2"
    rubbish.write_text("no library")
    assert "no NCCL was found: " in found(path=str(rubbish))[0]


def test_another_library_is_no_nccl() -> None:
    assert found(path="libm.so.6") == [
        "MissingDependencyError: libm.so.6 is no NCCL: it has no ncclGetVersion"
    ]


def test_an_nccl_without_a_cuda_runtime_can_be_looked_at_but_not_used(real_name: str) -> None:
    said = found(path=real_name, cuda_path="/nowhere/libcudart.so.13", use=True)
    assert said[0][0] == "2.30.7"
    assert said[0][3].startswith("no CUDA runtime was found: /nowhere/libcudart.so.13: ")
    assert said[1] == f"MissingDependencyError: {said[0][3]}"


def test_settings_are_those_of_nccl() -> None:
    assert settings({"NCCL_ALGO": "Ring", "PATH": "/bin", "NCCL_BUFFSIZE": "1"}) == {
        "NCCL_ALGO": "Ring",
        "NCCL_BUFFSIZE": "1",
    }


@pytest.mark.parametrize(
    ("environment", "is_slow"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "a:1,expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_expandable_segments_are_warned_of(
    environment: dict[str, str], is_slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert warn_of_expandable_segments(environment) == is_slow
    assert ("expandable_segments" in caplog.text) == is_slow


def test_the_real_nccl_takes_our_calls_until_it_needs_a_gpu(double: Double) -> None:
    """Its CUDA runtime is the double's, so that NCCL itself is the first to miss the driver."""
    if not (path := os.environ.get("GYMFAST_NCCL")):
        pytest.skip("needs GYMFAST_NCCL")
    program = (
        "import sys; from gymfast import _core\n"
        "library = _core.load_nccl(sys.argv[1], [], sys.argv[2], [])\n"
        "rank = _core.NcclRank(library, 0, 3)\n"
        "unique_id = library.unique_id()\n"
        "assert len(unique_id) == 128 and any(unique_id)\n"
        "try: rank.join(unique_id, 2, 0)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "rank.close(1)"
    )
    command = [sys.executable, "-P", "-c", program, path, double.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("ChannelError rank 0: ncclCommInitRankConfig: unhandled cuda")


def run_doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "gymfast", "doctor", "nccl", *arguments]
    environment = os.environ | {"NCCL_ALGO": "Ring", "PYTORCH_ALLOC_CONF": ""}
    environment.pop("GYMFAST_NCCL", None)
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )


def test_the_doctor_says_what_it_found(real_name: str) -> None:
    done = run_doctor("--library", real_name, "--cuda-library", real_name, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "schema": "gymfast.doctor.nccl/1",
        "version": "2.30.7",
        "path": real_name,
        "features": [name for name in ALL if name != "call-config"],
        "registration": "window",
        "cuda_path": real_name,
        "cuda_problem": "",
        "driver": "13.0",
        "num_gpus": 1,
        "settings": {"NCCL_ALGO": "Ring"},
        "has_expandable_segments": False,
    }


def test_the_doctor_fails_where_there_is_no_nccl() -> None:
    done = run_doctor("--library", "/nowhere/libnccl.so.2")
    assert done.returncode == 1
    assert "NCCL          none" in done.stdout
    assert "NCCL_ALGO     Ring" in done.stdout
    assert done.stderr.startswith("Error: no NCCL was found: /nowhere/libnccl.so.2: ")
