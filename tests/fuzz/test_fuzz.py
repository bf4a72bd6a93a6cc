"""The fuzz targets: the stored corpus with the compiler at hand, and runs of the fuzzer (I12)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(3600)]

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
TARGETS = ["fuzz_parse", "fuzz_apply", "fuzz_round_trip", "fuzz_targets_agree", "fuzz_zstd_sparse"]


def _run(*command: str | Path, **environment: str) -> str:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PATH": path, **environment}
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regression")
    _run(BIN / "cmake", "-S", HERE, "-B", folder, "-DFUZZER=OFF")
    _run(BIN / "cmake", "--build", folder, "--parallel", "2")
    return folder


@pytest.mark.ci
@pytest.mark.parametrize("target", TARGETS)
def test_I12_the_stored_corpus_breaks_no_invariant(target: str, programs: Path) -> None:
    corpus = HERE / "corpus" / target
    printed = _run(programs / target, corpus)
    assert printed == f"{len(list(corpus.iterdir()))} inputs\n"


@pytest.mark.ci
def test_an_empty_corpus_is_a_failure(programs: Path, tmp_path: Path) -> None:
    assert subprocess.run([programs / "fuzz_parse", tmp_path], check=False).returncode == 1


@pytest.mark.ci
@pytest.mark.parametrize("target", TARGETS)
def test_I12_a_short_run_of_the_fuzzer_finds_nothing(
    target: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    build = tmp_path_factory.getbasetemp() / "fuzzers"
    _run(HERE / "run.sh", "30", target, BUILD=str(build))


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_I12_ten_minutes_of_the_fuzzer_find_nothing(
    target: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    build = tmp_path_factory.getbasetemp() / "fuzzers"
    _run(HERE / "run.sh", "600", target, BUILD=str(build))


def test_the_stored_corpus_is_small() -> None:
    files = [path for path in (HERE / "corpus").rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == set(TARGETS)
    assert sum(path.stat().st_size for path in files) < 200_000
