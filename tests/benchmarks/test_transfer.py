"""Transfers are measured as they are described: checked bytes, both models, tables from the CSV."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.namespaces import Network, why_not
from benchmarks.ranks import Job, Sample, run_group
from benchmarks.transfer import MIB, Row, Subject, document
from benchmarks.transfer_cases import per_expert_lora, qwen3
from benchmarks.transfer_report import check_targets, is_transfer, read_csv, tables, write_csv
from gymfast.cost import Stage, pipeline_s

ROOT = Path(__file__).parents[2]
SHAPED = pytest.mark.skipif(
    bool(why_not()), reason=f"needs kernel feature network namespaces: {why_not()}"
)


def flat(size: int) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [("flat", "U8", (size,), size)]


def samples(*seconds: float, num_wrong: int = 0) -> list[Sample]:
    stages = {"0": {"pack": 0.1, "wire": 0.2}, "1": {"unpack": 0.3, "wire": 0.4}}
    return [Sample(one, stages, num_wrong, 1000) for one in seconds]


def subject(**changes) -> Subject:
    options = {"case": "chain", "path": "tcp", "data": "flat", "size": 2000, "type": "bfloat16"}
    return Subject(**(options | changes))


def test_a_row_has_the_median_and_the_stages_of_the_slowest_rank():
    row = subject(bound_gbps=1e-6, bound="link").row(samples(1.0, 4.0, 2.0, num_wrong=1))
    assert (row.time_us, row.count, row.nwrong, row.rounds) == (2e6, 1000, 3, 3)
    assert row.algbw == row.busbw == pytest.approx(1e-6)
    assert (row.pack_s, row.wire_s, row.unpack_s) == (0.1, 0.4, 0.3)
    assert row.of_bound == pytest.approx(1.0)


def test_a_csv_comes_back_as_it_was_written(tmp_path):
    rows = [subject(path=path, predicted_s=1.0).row(samples(1.0)) for path in ("tcp", "gloo")]
    path = tmp_path / "transfer.csv"
    write_csv(path, rows, {"cpu": "a cpu", "command": "python -m benchmarks transfer"})
    found, stamp = read_csv(path)
    assert is_transfer(path)
    assert found == rows
    assert stamp["cpu"] == "a cpu"
    assert "| tcp | flat |" in tables(found, stamp)


def test_json_has_the_results_of_nccl_tests_and_only_its_environment(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("A_TOKEN", "must-not-be-kept")
    found = document([subject().row(samples(1.0))], {})
    assert found["env"] == {key: v for key, v in os.environ.items() if key.startswith("NCCL_")}
    assert "must-not-be-kept" not in json.dumps(found)
    (result,) = found["results"]
    assert {"size", "count", "type", "redop", "root", "in_place"} < result.keys()
    assert result["in_place"].keys() == {"time", "alg_bw", "bus_bw", "nwrong"}


def test_targets_that_are_missed_are_told():
    slow = subject(predicted_s=1.0).row(samples(1.2))
    (target,) = check_targets([slow])
    assert not target.is_met
    assert target.measured == pytest.approx(0.2)


def test_the_lists_are_those_of_the_published_models():
    tensors, adapters = qwen3(), per_expert_lora()
    assert len(tensors) == 310
    assert sum(one[3] for one in tensors) == 1_192_099_840
    assert sum(one[3] for one in adapters) / len(adapters) <= 256 << 10
    assert len({one[0] for one in adapters}) == len(adapters)


@pytest.mark.parametrize("kind", ["channel", "transfer"])
def test_ranks_in_processes_deliver_every_byte(kind):
    job = Job(kind=kind, tensors=flat(300_001), bucket_bytes=65536, rounds=2, streams=2)
    (found,) = run_group([job], 3, timeout_s=60)
    assert len(found) == 2
    assert all(one.num_wrong == 0 and one.seconds > 0 for one in found)
    assert all(one.stages.keys() == {"0", "1", "2"} for one in found)


def test_live_versions_are_measured_from_encode_to_verify():
    job = Job(kind="live", size_bytes=2 * MIB, rounds=2)
    (found,) = run_group([job], 2, timeout_s=60)
    assert all(0 < one.sent_bytes < MIB for one in found)
    assert all({"receive", "apply", "verify"} < one.stages["1"].keys() for one in found)


def test_a_rank_that_fails_is_quoted():
    job = Job(kind="transfer", tensors=flat(4096), bucket_bytes=17)
    with pytest.raises(RuntimeError, match="bucket_bytes is 17"):
        run_group([job], 2, timeout_s=60)


@SHAPED
@pytest.mark.ci
def test_a_shaped_link_carries_what_it_is_set_to():
    size = 120 * MIB
    job = Job(kind="channel", tensors=flat(size), bucket_bytes=4 * MIB, rounds=3)
    with Network(2, 1.0) as network:
        (found,) = run_group([job], 2, network, timeout_s=120)
        expected_s = size * 8 / (network.payload_gbps * 1e9)
    assert median(found) == pytest.approx(expected_s, rel=0.04)


@SHAPED
@pytest.mark.ci
def test_a_chain_of_three_hops_takes_as_long_as_the_formula_says():
    size, bucket, depth = 238 * MIB, 4 * MIB, 6
    job = Job(
        kind="channel", tensors=flat(size), bucket_bytes=bucket, fanout=1, depth=depth, rounds=3
    )
    with Network(4, 2.0) as network:
        (found,) = run_group([job], 4, network, timeout_s=120)
        hops = [Stage(f"hop {i}", 0.0, network.payload_gbps * 1e9 / 8) for i in range(3)]
    expected_s = pipeline_s(size, bucket, hops, depth=depth)
    assert median(found) == pytest.approx(expected_s, rel=0.03)


@SHAPED
@pytest.mark.ci
def test_no_namespace_is_left_when_work_within_a_network_fails():
    network = Network(2, 1.0)

    def fail() -> None:
        with network:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    name = network.within(0)[-1]
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert name not in listed.stdout


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_driver_writes_rows_of_each_case(tmp_path, monkeypatch):
    pytest.importorskip("torch.distributed")
    path = tmp_path / "transfer.csv"
    command = [sys.executable, "-m", "benchmarks", "transfer", "--quick", "--size", "2MiB"]
    command += ["--cases", "lists,nccl", "--csv", str(path)]
    monkeypatch.setenv("GYMFAST_NCCL_TESTS", str(tmp_path))  # where none are
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows, stamp = read_csv(path)
    assert {row.path for row in rows} >= {"torch gloo per tensor", "gloo flat buckets"}
    assert all(row.nwrong == 0 for row in rows)
    assert "skipped nccl" in stamp
    assert all(isinstance(row, Row) for row in rows)


def median(found: list[Sample]) -> float:
    return sorted(one.seconds for one in found)[len(found) // 2]
