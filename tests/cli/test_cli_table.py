"""`gymfast table`: both tables of the article, cell by cell, as it prints them."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest
from cli_commands import Gymfast

from gymfast.cost.article import (
    CLUSTER_ROWS,
    WAN_ROWS,
    Networks,
    corrected_cluster,
    corrected_wan,
    published_cluster,
    published_wan,
)
from gymfast.cost.links import Link

CLUSTER = """\
| Qwen3 8B | 16.3 GB BF16 | 2.62 s | 41 ms | 1x8 H100 | $0.21 |
| Qwen3-30B-A3B | 61.1 GB BF16 | 9.78 s | 153 ms | 1x8 H100 | $0.77 |
| Qwen3-30B-A3B LoRA r=32 shared-outer | 1.0 GB | 160 ms | 2.5 ms | 1x8 H100 | $0.013 |
| GLM 4.7 | 716.7 GB BF16 | 114.67 s | 1.79 s | 4x8 B200 | $36.12 |
| GLM 4.7 LoRA r=32 shared-outer | 4.7 GB | 752 ms | 11.75 ms | 4x8 B200 | $0.24 |
| GLM 4.7 LoRA r=32 per-expert | 18.8 GB | 3.01 s | 47 ms | 4x8 B200 | $0.95 |
| Kimi K2.6 | 595.2 GB INT4 MoE / BF16 attention | 95.23 s | 1.49 s | 16x8 H200 | $119.99 |
| Kimi K2.6 LoRA r=32 shared-outer | 9.4 GB | 1.50 s | 23.5 ms | 16x8 H200 | $1.90 |
| Kimi K2.6 LoRA r=32 per-expert | 41.0 GB | 6.56 s | 102.5 ms | 16x8 H200 | $8.27 |
""".splitlines()

WAN = """\
| Qwen3 8B | 16 GB BF16 | 12.8 s | 0.26 s |
| Qwen3 30B-A3B | 60 GB BF16 | 48 s | 0.96 s |
| GLM 4.7 (~355B) | 357 GB BF16 | 285.6 s | 5.73 s |
| Kimi K2.6 (~1T) | 595.2 GB INT4 MoE / BF16 attention | 480 s | 9.6 s |
""".splitlines()

CORRECTED = """\
| Qwen3 8B | 16.381 GB | 2.62 s | 40.95 ms | 64 | $0.023 |
| GLM 4.7 | 716.676 GB | 114.67 s | 1.79 s | 64 | $6.27 |
| Kimi K2.6 LoRA r=32 per-expert | 41.013 GB | 6.56 s | 102.53 ms | 64 | $1.04 |
| GLM 4.7 (~355B) | 361.66 GB FP8 | 289.33 s | 5.79 s | 5.85 s | 6.53 s | 42.85 s | 18.3 s |
""".splitlines()


def test_both_tables_are_those_of_the_article(gymfast: Gymfast) -> None:
    lines = gymfast("table", "--markdown").out.splitlines()
    begin = lines.index("**In a cluster, as published**") + 4
    assert lines[begin : begin + len(CLUSTER) + 1] == [*CLUSTER, ""]
    begin = lines.index("**Between data centres, as published**") + 4
    assert lines[begin : begin + len(WAN) + 1] == [*WAN, ""]


def test_the_corrected_rows_stand_beside_them(gymfast: Gymfast) -> None:
    lines = gymfast("table", "--markdown").out.splitlines()
    assert [line for line in CORRECTED if line not in lines] == []
    kimi = next(row for row in WAN_ROWS if row.label.startswith("Kimi"))
    assert corrected_wan(kimi, Networks()).full_s == pytest.approx(476.1, abs=0.05)


def test_every_time_and_cost_follows_the_rates() -> None:
    networks = Networks()
    twice = Networks(Link(100), Link(6400), Link(20, rtt_s=0.06), saved_ratio=0.99)
    for row in CLUSTER_ROWS:
        for compute in (published_cluster, corrected_cluster):
            slow, fast = compute(row, networks), compute(row, twice)
            assert slow.num_bytes == fast.num_bytes
            assert astuple(slow)[1:] == pytest.approx([2 * x for x in astuple(fast)[1:]])
    for row in WAN_ROWS:
        for compute in (published_wan, corrected_wan):
            slow, fast = compute(row, networks), compute(row, twice)
            assert slow.full_s == pytest.approx(2 * fast.full_s)
            assert slow.delta_s == pytest.approx(4 * fast.delta_s)
            assert (slow.warm_s, slow.cold_s) > (fast.warm_s, fast.cold_s)


def test_json_has_the_numbers_behind_the_cells(gymfast: Gymfast) -> None:
    fields = json.loads(gymfast("table", "--json", "--wan-gbps", "5").out)
    assert fields["schema"] == "gymfast.table/1"
    assert [row["model"] for row in fields["wan"]] == [row.label for row in WAN_ROWS]
    assert fields["wan"][0]["published"]["full_s"] == pytest.approx(25.6)
    assert fields["cluster"][3]["published"]["saved_dollars"] == pytest.approx(36.12, abs=0.005)


@pytest.mark.parametrize("option", ["--wan-gbps=0", "--rtt-ms=-1", "--saved=1", "--tcp-gbps=nan"])
def test_impossible_networks_are_refused(gymfast: Gymfast, option: str) -> None:
    result = gymfast("table", option)
    assert result.code == 2
    assert "expected" in result.err
