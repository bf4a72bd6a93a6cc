"""A tiny run of the driver: codecs checked bit for bit, valid JSON and CSV, tables from the CSV."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def csv(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("benchmarks") / "delta.csv"


@pytest.fixture(scope="module")
def document(csv) -> dict:
    found = run(
        "delta", "--json", "--csv", str(csv), "--size", "2MiB", "--density", "1,100",
        "--threads", "1,2", "--rounds", "5", "--hot", "--data", "generator",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_driver_prints_one_json_document_with_all_rows(document):
    assert document["schema"] == "gymfast-benchmarks/1"
    rows = document["rows"]
    codecs = {row["codec"] for row in rows}
    assert {"bound", "gymfast fast", "gymfast small", "gymfast auto", "xor+zstd-1+xxh3"} < codecs
    assert {"coo+zstd-1+xxh3", "int32+bf16", "pcodec", "xor+blosc2", "xor+lz4"} < codecs
    ops = {row["op"] for row in rows}
    assert {"memcpy", "stream copy", "compare", "read", "encode", "apply", "attach"} <= ops
    assert {"first apply", "verify", "encode blocks", "apply blocks", "fused pass"} <= ops
    for row in rows:
        assert row["rounds"] >= 5
        assert row["wall_p10_s"] <= row["wall_s"] <= row["wall_p90_s"]
        assert row["gbps"] > 0
        assert row["copy_ratio"] > 0
        if row["op"] in ("encode", "apply"):
            assert row["limit_ratio"] > 1
            assert row["frame_bytes"] > 0


def test_frames_are_never_larger_than_the_raw_state_by_more_than_a_thousandth(document):
    for row in document["rows"]:
        if row["codec"].startswith("gymfast") and row["frame_bytes"]:
            assert row["frame_bytes"] <= 1.001 * row["state_bytes"] + 64 * 1024  # names of tensors


def test_environment_names_machine_and_commit_but_no_host(document):
    environment = document["environment"]
    assert {"cpu", "cores", "compiler", "python", "numpy", "commit", "command"} <= set(environment)
    host = socket.gethostname()
    assert not re.search(rf"\b{re.escape(host)}\b", json.dumps(environment))


def test_report_makes_the_same_rows_from_the_csv(document, csv, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- benchmark:begin -->\n<!-- benchmark:end -->\n")
    assert run("report", str(csv), "--readme", str(readme)).returncode == 0
    text = readme.read_text()
    for row in document["rows"]:
        if row["frame_bytes"]:
            assert f"{row['frame_bytes']:,}" in text


def test_fewer_rounds_than_five_are_refused():
    found = run("delta", "--rounds", "3")
    assert found.returncode == 2
    assert "less than 5" in found.stderr


def test_frames_of_the_published_format_are_measured_beside_their_peers():
    found = run(
        "hf-delta", "--json", "--size", "2MiB", "--density", "1,100", "--rounds", "5", "--hot",
        "--data", "generator",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    rows = json.loads(found.stdout)["rows"]
    assert {row["codec"] for row in rows} == {
        "bound", "xor, zstd level 1", "gymfast xor", "overwrite, zstd level 1", "gymfast overwrite",
    }  # fmt: skip
    assert {row["op"] for row in rows} == {"memcpy", "compare", "xxh3-128", "encode"}
    assert all(row["rounds"] >= 5 and row["gbps"] > 0 for row in rows)


def test_version_directories_are_carried_through_a_store_in_fewer_bytes():
    found = run(
        "hf-store", "--json", "--size", "4MiB", "--density", "1", "--rounds", "5", "--hot",
        "--threads", "1", "--data", "generator",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    rows = json.loads(found.stdout)["rows"]
    size = {row["codec"]: row["frame_bytes"] for row in rows if row["op"] in ("size", "encode")}
    for codec in ("xor, zstd level 1", "gymfast xor", "gymfast overwrite"):
        assert size[f"store: {codec}"] < 0.9 * size[codec]
    assert {row["op"] for row in rows} == {"memcpy", "size", "encode", "apply"}
