"""Weights may lie at any address: loaders hand out views of file buffers."""

from __future__ import annotations

import numpy as np
import pytest

from gymfast.delta import apply, encode
from gymfast.delta.tensors import Tensor


def at_offset(data: np.ndarray, offset: int) -> np.ndarray:
    room = np.zeros(data.size + 64, np.uint8)
    start = (-room.ctypes.data) % 64 + offset
    room[start : start + data.size] = data
    return room[start : start + data.size]


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "I64"])
@pytest.mark.parametrize("profile", ["auto", "fast", "small"])
def test_tensors_at_odd_addresses_are_exact(backend, dtype: str, offset: int, profile) -> None:
    rng = np.random.default_rng(offset)
    old = rng.integers(0, 256, 8 * 5000, dtype=np.uint8)
    new = old.copy()
    new[:: 8 * 61] ^= 1
    shape = (old.size // {"BF16": 2, "F32": 4, "I64": 8}[dtype],)
    base = {"w": Tensor(dtype, shape, at_offset(old, offset))}
    frame = encode(
        base,
        {"w": Tensor(dtype, shape, at_offset(new, offset + 2))},
        profile=profile,
        backend=backend.name,
    )
    assert frame == encode(
        {"w": Tensor(dtype, shape, old)}, {"w": Tensor(dtype, shape, new)}, profile=profile
    )
    apply(base, frame, backend=backend.name)
    assert np.array_equal(base["w"].data, new)
