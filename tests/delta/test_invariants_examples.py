"""Invariant I01 at the count of its nightly tier."""

from __future__ import annotations

import pytest
from delta_weights import copies, pairs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gymfast.delta as delta
from gymfast.delta import State
from gymfast.testing.compare import assert_bits_equal


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=20_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(pair=pairs(), profile=st.sampled_from(("auto", "fast", "small")))
def test_I01_encode_then_apply_is_exact_in_20_000_examples(pair, profile) -> None:
    old, new = pair
    frame = delta.encode(old, new, backend="cpu", profile=profile)
    held = copies(old)
    report = delta.apply(held, frame, backend="cpu")
    assert_bits_equal(held, new)
    assert report.new_root == State.reading(new).root
