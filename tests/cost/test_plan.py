"""Plans use the NICs that are there, fit their bounds, and know what they cost."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymfast.cost.cluster import GPUS, NETWORKS, Cluster
from gymfast.cost.plan import Job, plan
from gymfast.models import model, model_bytes

KIMI_BYTES = 595_136_020_480


def job(num_bytes: int, train: str, engines: str, net: str = "rdma", nodes: int = 1) -> Job:
    return Job(num_bytes, Cluster.parse(train), Cluster.parse(engines), NETWORKS[net], nodes)


@pytest.mark.parametrize(("mib", "seconds"), [(64, 1.79), (256, 1.58), (512, 1.55)])
def test_a_striped_chain_of_17_nodes_takes_what_the_constants_of_nccl_say(
    mib: int, seconds: float
) -> None:
    """Kimi-K2.6 from one node to 16 by eight rails."""
    made = plan(job(KIMI_BYTES, "1x8:H200", "16x8:H200"), bucket_bytes=mib << 20)
    assert (made.num_roots, made.nics_per_node, made.chain_nodes) == (8, 8, 17)
    wire = made.busy_s["wire"]
    assert wire == pytest.approx(seconds, rel=0.03)
    assert made.total_s >= wire


def test_the_times_of_the_article_are_bounds() -> None:
    made = plan(job(16_380_000_000, "1x8:H100", "1x8:H100"))
    assert made.bound_s == pytest.approx(0.04095)
    assert made.bound_s < made.total_s < 1.1 * made.bound_s
    slow = plan(job(16_380_000_000, "1x8:H100", "1x8:H100", "tcp"))
    assert slow.bound_s == pytest.approx(2.6208)
    assert slow.total_s < 1.03 * slow.bound_s
    assert slow.nics_per_node == 1


def test_engines_of_two_nodes_let_two_nodes_send() -> None:
    one = plan(job(KIMI_BYTES, "16x8:H200", "8x8:H200"))
    two = plan(job(KIMI_BYTES, "16x8:H200", "8x8:H200", nodes=2))
    assert (one.num_roots, two.num_roots) == (8, 16)
    assert two.bound_s == pytest.approx(one.bound_s / 2)
    assert plan(job(KIMI_BYTES, "1x8:H200", "8x8:H200", nodes=2)).num_roots == 8


def test_a_wan_needs_buckets_under_way_for_a_round_trip() -> None:
    made = plan(job(327_629_414, "1x8:H100", "1x8:H100", "wan"))
    assert made.depth * made.bucket_bytes >= NETWORKS["wan"].nic.bytes_per_s * 0.06
    assert made.total_s == pytest.approx(made.bound_s, rel=0.1)
    waiting = plan(job(327_629_414, "1x8:H100", "1x8:H100", "wan"), bucket_bytes=1 << 20, depth=1)
    assert waiting.total_s > 18  # a round trip for each of 313 buckets


@given(
    st.integers(0, 10**12),
    st.integers(1, 8),
    st.integers(1, 16),
    st.sampled_from(sorted(NETWORKS)),
    st.sampled_from(sorted(GPUS)),
)
def test_no_plan_is_faster_than_the_line(
    num_bytes: int, train: int, engines: int, net: str, gpu: str
) -> None:
    made = plan(job(num_bytes, f"{train}x8:{gpu}", f"{engines}x8:{gpu}", net))
    assert made.total_s >= made.bound_s
    assert made.num_rounds * made.bucket_bytes >= made.bytes_per_root
    assert made.bytes_per_root * made.num_roots >= num_bytes
    assert made.bucket_bytes % 256 == 0


def test_a_trillion_parameters_are_planned_in_two_seconds() -> None:
    begin_s = time.process_time()
    made = plan(job(model_bytes(model("Kimi-K2.6"), "int4"), "16x8:H200", "8x8:H200"))
    assert made.num_roots == 8
    assert time.process_time() - begin_s < 2


@pytest.mark.parametrize("text", ["8", "4x8", "4x8:X100", "0x8:H100", "x8:H100", "4*8:H100"])
def test_what_is_no_cluster_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected (NODESxGPUS:KIND|one of A100)"):
        Cluster.parse(text)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="engines of 3 nodes each do not make up 2x8 H100"):
        job(1, "1x8:H100", "2x8:H100", nodes=3)
    with pytest.raises(ValueError, match="bucket_bytes is 1000"):
        plan(job(1, "1x8:H100", "2x8:H100"), bucket_bytes=1000)
    with pytest.raises(ValueError, match="depth is 0"):
        plan(job(1, "1x8:H100", "2x8:H100"), depth=0)
