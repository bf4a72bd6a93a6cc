"""The fused pass that is timed beside the bounds does what the codec does."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import bounds
from gymfast.delta.backends import select
from gymfast.delta.geometry import Geometry


@pytest.mark.parametrize("density", [0.0, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("num_units", [1, 63, 5000, 70_001])
def test_fused_pass_updates_snapshot_and_digest(num_units, density):
    rng = np.random.default_rng(num_units)
    old = rng.integers(0, 2**16, num_units, np.uint16)
    new = np.where(rng.random(num_units) < density, old ^ 1, old).astype(np.uint16)
    base = old.copy()
    num_changed, step = bounds.fused(base, new, 8192)
    assert num_changed == np.count_nonzero(old != new)
    assert np.array_equal(base, new)
    backend, geometry = select("reference"), Geometry(num_units, 2, num_units, 1, num_units)
    before, after = (
        backend.digest_blocks(state.view(np.uint8), geometry, 1) for state in (old, new)
    )
    assert np.array_equal((after - before)[0], np.array(step, np.uint64))
