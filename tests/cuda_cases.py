"""Tensors and damage for the tests of the CUDA kernels."""

from __future__ import annotations

import numpy as np
from delta_cases import Case

from gymfast.delta.backends import Backend, select
from gymfast.delta.geometry import Geometry
from gymfast.errors import FormatError

_POSITION, _STREAM = 54, 55
PROFILES = {"auto": 0, "fast": 1, "small": 2}


def large_case(unit_bytes: int, density: float, profile: int) -> Case:
    """Two blocks with this share of small steps."""
    rng = np.random.default_rng(unit_bytes)
    n = 150_001
    base = (rng.standard_normal(n) * 0.02).astype("<f4").view("<u4") >> (32 - 8 * unit_bytes)
    base = base.astype(f"<u{unit_bytes}")
    new = base.copy()
    where = rng.random(n) < density
    new[where] += rng.geometric(0.7, int(where.sum())).astype(base.dtype)
    geometry = Geometry(n, unit_bytes, n, 1, 2**17)
    return Case(base.view(np.uint8), new.view(np.uint8), geometry, profile)


def many_blocks() -> Case:
    """40 blocks of BF16: few changes, many, none."""
    rng = np.random.default_rng(1)
    counts = [3, 900, 0, 0, 0, 0, 2, 700] * 5
    base = (rng.standard_normal(1000 * len(counts)) * 0.02).astype("<f4").view("<u4") >> 16
    base = base.astype("<u2")
    new = base.copy()
    for i, count in enumerate(counts):
        new[i * 1000 + rng.choice(1000, count, replace=False)] += 1
    geometry = Geometry(base.size, 2, base.size, 1, 1000)
    return Case(base.view(np.uint8), new.view(np.uint8), geometry, 0)


def ends_alike(found: tuple[bytes, bytes, int], expected: tuple[bytes, bytes, int]) -> bool:
    """Whether two outcomes are the same; where a dense body breaks two rules, either may be told.

    Source: docs/wire-format.md section 8 ("reports one of them").
    """
    return found[:2] == expected[:2] and (
        found[2] == expected[2] or {found[2], expected[2]} == {_POSITION, _STREAM}
    )


def outcome(backend: Backend, case: Case, body: bytes) -> tuple[bytes, bytes, int]:
    """What a body leaves in the tensor and the digests, and the number of the error or 0."""
    data = case.base.copy()
    digests = select("cpu").digest_blocks(data, case.geometry, 1)
    args = (case.geometry, case.params(select("cpu")), digests, 0, case.geometry.num_blocks, 1)
    number = 0
    try:
        backend.apply_blocks(data, body, *args)
    except FormatError as error:
        number = error.number
    return data.tobytes(), digests.tobytes(), number
