"""The limit column against the formula written out for one array."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.limit import limit
from gymfast.testing.weights import rl_like_update, rl_like_weights


def entropy(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, 1e-300, 1 - 1e-16)
    return -(p * np.log2(p) + (1 - p) * np.log2(1 - p))


def ordered(bits: np.ndarray) -> np.ndarray:
    wide = bits.astype(np.int32)
    return np.where(wide & 0x8000, 0x7FFF - (wide & 0x7FFF), wide | 0x8000)


def limit_bits(old: np.ndarray, new: np.ndarray) -> float:
    changed, total = old != new, 0.0
    for exponent in np.unique((old >> 7) & 0xFF):
        mine = ((old >> 7) & 0xFF) == exponent
        num, hits = mine.sum(), (mine & changed).sum()
        total += float(num * entropy(np.array(hits / num)) + 0.5 * np.log2(num + 1))
        step = (ordered(new) - ordered(old))[mine & changed]
        _, counts = np.unique(step, return_counts=True)
        if hits:
            total -= float((counts * np.log2(counts / hits)).sum())
            total += 0.5 * len(counts) * float(np.log2(hits + 1))
    return total


@pytest.mark.parametrize("density", [0.0, 0.01, 0.4, 1.0])
def test_limit_is_the_conditional_entropy_over_all_tensors(density):
    old = rl_like_weights(1 << 20, 3)
    new = rl_like_update(old, density, 4)
    found = limit(old, new)
    flat = [np.concatenate([a.reshape(-1) for a in state.values()]) for state in (old, new)]
    assert 8 * found.num_bytes == pytest.approx(limit_bits(*flat))
    assert found.num_changed == (flat[0] != flat[1]).sum()
    assert found.num_elements == flat[0].size


def test_limit_of_patterns_that_are_no_numbers_is_finite():
    rng = np.random.default_rng(1)
    old = {"x": rng.integers(0, 1 << 16, 5000).astype(np.uint16)}
    new = {"x": rng.integers(0, 1 << 16, 5000).astype(np.uint16)}
    assert 0 < limit(old, new).num_bytes < 20_000
