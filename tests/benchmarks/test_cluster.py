"""Transfers between hosts take their orders from torchrun or Slurm; the Modal app is a graph."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import modal_app
from benchmarks.cluster import jobs, orders_from, subject_of
from benchmarks.transfer_report import read_csv

ROOT = Path(__file__).parents[2]


def test_torchrun_and_slurm_say_the_same():
    common = {"MASTER_ADDR": "127.0.0.1", "GYMFAST_KEY": "ab" * 32}
    torchrun = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}
    slurm = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
    found = orders_from(common | torchrun, jobs(1024, 3))
    assert found == orders_from(common | slurm, jobs(1024, 3))
    assert (found.rank, found.num_ranks, found.root_port) == (2, 4, 29501)
    assert found.host == "127.0.0.1"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_rank_that_nobody_started_is_told_how():
    with pytest.raises(ValueError, match="torchrun"):
        orders_from({"RANK": "0"}, [])


def test_a_star_shares_the_link_of_its_root_and_a_chain_does_not():
    found = {j.fanout: subject_of(j, 5, 100.0).bound_gbps for j in jobs(1024, 3)}
    assert found == {None: 100 / 8 / 4, 1: 100 / 8}


@pytest.mark.ci
def test_two_ranks_as_torchrun_starts_them_write_a_table(tmp_path):
    path = tmp_path / "cluster.csv"
    common = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port() - 1),
        "GYMFAST_KEY": secrets.token_hex(32), "GYMFAST_NCCL_TESTS": str(tmp_path),
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.cluster", "--size-mib", "2", "--rounds", "2"]
    ranks = [
        subprocess.Popen(
            [*command, "--csv", str(path)], cwd=ROOT, env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    rows, _ = read_csv(path)
    assert {row.data for row in rows} == {"star", "chain"}
    assert all(row.nwrong == 0 for row in rows)


class Recorded:
    """Stands for objects of Modal: notes how each was made."""

    def __init__(self, calls: list[tuple[str, Any, Any]]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Recorded:
            self.calls.append((name, arguments, options))
            return self

        return call

    def __call__(self, work: Any) -> Recorded:
        self.calls.append(("work", (work,), {}))
        return self


def test_the_app_of_modal_has_one_function_on_the_gpus_asked_for(monkeypatch):
    calls: list[tuple[str, Any, Any]] = []
    module = ModuleType("modal")
    module.Image = Recorded(calls)
    module.App = lambda name: Recorded(calls).app(name)
    monkeypatch.setitem(sys.modules, "modal", module)
    modal_app.build("B200:8", timeout_s=60)
    made = {name: options for name, _, options in calls}
    assert made["function"]["gpu"] == "B200:8"
    assert made["function"]["timeout"] == 60
    assert made["env"] == {}
    assert [arguments for name, arguments, _ in calls if name == "work"] == [(modal_app.transfer,)]
    copied = next(arguments for name, arguments, _ in calls if name == "add_local_dir")
    assert copied == (str(ROOT), "/opt/gymfast")


if importlib.util.find_spec("modal") is not None:

    def test_the_package_modal_takes_that_graph():
        app, function = modal_app.build("H100:8")
        assert app.name == modal_app.NAME
        assert type(function).__name__ == "Function"
