"""Output of NVIDIA's nccl-tests is read as its format says; see recorded/README.md."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from benchmarks import nccl_tests
from benchmarks.nccl_tests import Missing, Timing, parse_json, parse_text, row_of, run

RECORDED = Path(__file__).with_name("recorded")


def test_text_has_one_line_for_each_size_with_both_placements():
    first, second = parse_text((RECORDED / "broadcast.txt").read_text())
    assert (first.size, first.count, first.type, first.redop, first.root) == (
        67108864, 16777216, "float", "none", 0,
    )  # fmt: skip
    assert first.out_of_place == Timing(402.11, 166.89, 166.89, 0)
    assert second.in_place == Timing(769.20, 174.49, 174.49, 3)


def test_text_with_times_of_iterations_is_read_and_unchecked_results_are_none():
    (line,) = parse_text((RECORDED / "all_gather_per_iteration.txt").read_text())
    assert line.root == -1
    assert line.out_of_place == Timing(35.20, 29.79, 14.89, None)
    assert line.in_place == Timing(34.90, 30.05, 15.02, None)


def test_json_says_the_same_and_nothing_of_its_environment_is_kept():
    (line,) = parse_json((RECORDED / "broadcast.json").read_text())
    (from_text, _) = parse_text((RECORDED / "broadcast.txt").read_text())
    assert line.out_of_place == from_text.out_of_place
    assert line.in_place.num_wrong is None
    assert "must-not-be-kept" not in repr(row_of("broadcast_perf", line, 2, 20))


def test_a_row_has_the_columns_of_a_transfer():
    (_, line) = parse_text((RECORDED / "broadcast.txt").read_text())
    row = row_of("broadcast_perf", line, 2, 20)
    assert (row.path, row.ranks, row.nwrong) == ("nccl-tests broadcast_perf", 2, 3)
    assert (row.time_us, row.busbw) == (769.20, 174.49)


@pytest.mark.parametrize("text", ["", "# CUDA failure common.cu:1140 'driver version'\n"])
def test_output_without_results_is_an_error_with_its_last_words(text):
    with pytest.raises(ValueError, match="gave no results"):
        parse_text(text)


def test_a_line_with_too_few_columns_is_an_error_that_shows_it():
    with pytest.raises(ValueError, match="has 6 columns"):
        parse_text("1024 256 float none 0 12.0\n")


@pytest.mark.parametrize("text", ["{}", '{"results": []}', '{"results": [{"size": 1}]}', "[]"])
def test_a_file_without_whole_results_is_an_error(text):
    with pytest.raises(ValueError, match="nccl-tests"):
        parse_json(text)


def binary(folder: Path, body: str) -> str:
    path = folder / "broadcast_perf"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_binary_that_writes_a_file_is_read_from_it(tmp_path):
    source = RECORDED / "broadcast.json"
    body = f'while [ "$1" != -J ]; do shift; done; cp {source} "$2"'
    (line,) = run(binary(tmp_path, body), 67108864, 20, 2)
    assert line.size == 67108864


def test_a_binary_without_the_option_is_read_from_its_output(tmp_path):
    source = RECORDED / "broadcast.txt"
    body = f'case "$*" in *-J*) exit 1;; esac; cat {source}'
    assert len(run(binary(tmp_path, body), 67108864, 20, 2)) == 2


def test_a_binary_that_fails_is_quoted(tmp_path):
    with pytest.raises(RuntimeError, match="driver version is insufficient"):
        run(binary(tmp_path, "echo driver version is insufficient >&2; exit 2"), 1024, 5, 1)


def test_binaries_that_are_not_there_are_a_reason_not_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv(nccl_tests.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(Missing, match="needs nccl-tests"):
        list(nccl_tests.measure(1024, 5))


def test_binaries_without_a_gpu_are_a_reason_not_an_error(tmp_path, monkeypatch):
    binary(tmp_path, "exit 1")
    monkeypatch.setenv(nccl_tests.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(nccl_tests, "_num_gpus", lambda: 0)
    with pytest.raises(Missing, match="needs a GPU"):
        list(nccl_tests.measure(1024, 5))
