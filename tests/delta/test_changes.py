"""The list of what differs: the native one is the one of NumPy, for all targets."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymfast import _core
from gymfast.delta.changes import list_changes


@given(
    num_units=st.integers(0, 1000),
    unit_bytes=st.sampled_from([1, 2, 4]),
    density=st.sampled_from([0, 0.01, 0.3, 1]),
    seed=st.integers(0, 2**32),
)
def test_every_target_lists_what_numpy_lists(
    num_units: int, unit_bytes: int, density: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 256, num_units * unit_bytes, np.uint8)
    after = np.where(rng.random(before.size) < density, before ^ 129, before)
    units = f"<u{unit_bytes}"
    numbers = np.flatnonzero(before.view(units) != after.view(units))
    expected = numbers.astype("<u4").tobytes(), after.view(units)[numbers].tobytes()
    try:
        for target in _core.cpu_targets():
            _core.force_cpu_target(target)
            assert list_changes(before, after, unit_bytes) == expected
    finally:
        _core.force_cpu_target(None)


def test_without_native_code_the_list_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    before = np.arange(64, dtype=np.uint8)
    after = before.copy()
    after[[2, 3, 40]] += 1
    native = list_changes(before, after, 2)
    monkeypatch.setitem(sys.modules, "gymfast._core", None)
    monkeypatch.delattr("gymfast._core", raising=False)
    assert list_changes(before, after, 2) == native


@pytest.mark.parametrize(
    ("before", "after", "unit_bytes"),
    [
        (np.zeros(4, np.uint8), np.zeros(6, np.uint8), 2),
        (np.zeros(5, np.uint8), np.zeros(5, np.uint8), 2),
        (np.zeros(9, np.uint8)[1:], np.zeros(8, np.uint8), 4),
        (np.zeros(8, np.uint8), np.zeros(8, np.uint8), 3),
    ],
)
def test_other_buffers_are_refused(before, after, unit_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"alignment|unit_bytes is"):
        _core.list_changes(before, after, unit_bytes)
