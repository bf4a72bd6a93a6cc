"""Limit, peers, projection and audit of the demo against hand-made cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gymfast.demo.audit import Audit, OutsideRead, fingerprint
from gymfast.demo.events import Published, Served
from gymfast.demo.limit import LimitCounter
from gymfast.demo.peers import XorZstd, load_zstd
from gymfast.demo.projection import FIGURES, project, wire_s

TRUTH = "aa" * 32


def entropy(share):
    return -(share * math.log2(share) + (1 - share) * math.log2(1 - share))


def test_limit_is_the_entropy_of_positions_and_steps_given_the_exponent():
    old = np.full(4096, 0x3F80, np.uint16)
    old[2048:] = 0x3C00
    new = old.copy()
    new[:512] += 1
    new[512:768] -= 1
    limit = LimitCounter()
    limit.add(old[:1000], new[:1000])
    limit.add(old[1000:], new[1000:])
    found = limit.limit()
    positions = 2048 * entropy(768 / 2048) + 2 * 0.5 * math.log2(2049)
    values = 768 * entropy(1 / 3) + 2 * 0.5 * math.log2(769)
    assert (found.num_elements, found.num_changed) == (4096, 768)
    assert found.position_bits == pytest.approx(positions)
    assert found.value_bits == pytest.approx(values)
    assert found.size_bytes == pytest.approx((positions + values) / 8)


def test_limit_of_no_change_is_next_to_nothing():
    limit = LimitCounter()
    bits = np.arange(1000, dtype=np.uint16)
    limit.add(bits, bits.copy())
    assert limit.limit().num_changed == 0
    assert limit.limit().size_bytes < 16


def test_xor_zstd_peer_reaches_the_new_state_again_and_again():
    zstd = load_zstd()
    assert zstd is not None
    rng = np.random.default_rng(1)
    state = {
        name: rng.integers(0, 256, size, dtype=np.uint8) for name, size in (("a", 64), ("b", 7))
    }
    peer = XorZstd(zstd, state)
    for _ in range(3):
        state = {name: data ^ (rng.random(data.size) < 0.1) for name, data in state.items()}
        frames = peer.encode(state)
        peer.promote(state)
        assert not peer.holds(state)
        peer.apply(frames)
        assert peer.holds(state)


def test_projection_gives_the_published_figures_for_their_sizes():
    qwen, glm = FIGURES
    assert wire_s(0.02 * qwen.published_bytes) == pytest.approx(qwen.published_s, abs=0.005)
    assert wire_s(0.02 * glm.published_bytes) == pytest.approx(glm.published_s, abs=0.02)
    assert (qwen.published_dtype, glm.published_dtype) == ("BF16", "FP8")


def test_projection_scales_with_the_bytes_of_the_model():
    projection = project(FIGURES[0], 0.01, 0.005, None)
    assert projection.full_s == pytest.approx(13.12)
    assert projection.saving_98_s == pytest.approx(0.2624)
    assert projection.small_s == pytest.approx(0.0656)
    assert projection.xor_zstd1_s is None


def published(version):
    return Published(
        version=version,
        kind="delta",
        root="11" * 32,
        fingerprint=TRUTH,
        num_changed=1,
        raw_bytes=1,
        frame_bytes=1,
        reward=0.0,
        step_s=0.0,
        publish_s=0.0,
    )


def served(version=3, root="11" * 32, found=TRUTH, kept_pointers=True):
    return Served(
        version=version,
        root=root,
        fingerprint=found,
        num_versions=1,
        apply_s=0.1,
        kept_pointers=kept_pointers,
    )


@pytest.mark.parametrize(
    ("event", "word"),
    [
        (served(), ""),
        (served(version=9), "did not publish"),
        (served(root="22" * 32), "root"),
        (served(found="bb" * 32), "other bytes"),
        (served(kept_pointers=False), "moved its tensors"),
    ],
)
def test_audit_finds_every_sort_of_wrong_service(event, word):
    audit = Audit()
    audit.add_served("live", event)
    audit.add_published(published(3))
    wrong = audit.wrong()
    assert bool(wrong) == bool(word)
    assert word in "".join(wrong)


def test_audit_finds_a_checkpoint_that_is_not_what_it_is_declared_to_be():
    audit = Audit()
    audit.add_published(published(3))
    audit.add_outside_read(OutsideRead(3, TRUTH))
    audit.add_outside_read(OutsideRead(None, "bb" * 32))
    assert audit.wrong() == []
    audit.add_outside_read(OutsideRead(3, "bb" * 32))
    audit.add_outside_read(OutsideRead(4, TRUTH))
    wrong = audit.wrong()
    assert len(wrong) == 2
    assert "declared to be version 3" in wrong[0]


def test_fingerprint_sees_names_bytes_and_where_one_tensor_ends():
    first = fingerprint([("a", b"12"), ("b", b"3")])
    assert first == fingerprint([("b", b"3"), ("a", memoryview(b"12"))])
    others = [[("a", b"1"), ("b", b"23")], [("a", b"12"), ("c", b"3")], [("a", b"12"), ("b", b"4")]]
    assert all(fingerprint(other) != first for other in others)
