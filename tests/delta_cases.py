"""Pairs of unit arrays with their geometry, for the tests of back ends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from gymfast.delta.backends import Backend, BlockParams, EncodedBlocks
from gymfast.delta.geometry import Geometry

DENSITIES = (0.0, 0.001, 0.004, 0.02, 0.1, 0.3, 0.5, 0.75, 1.0)
KINDS = ("weights", "bits", "steps", "flips", "constant")


@dataclass(frozen=True)
class Case:
    """A base and a new tensor as bytes, how they are cut, and the profile to code them with."""

    base: np.ndarray
    new: np.ndarray
    geometry: Geometry
    profile: int = 0
    has_base: bool = True

    def params(self, backend: Backend) -> BlockParams:
        class_params = (0, 0)
        if self.has_base:
            class_params = backend.class_params(self.base, self.geometry.unit_bytes)
        return BlockParams(self.profile, *class_params, self.has_base)

    def num_changed(self) -> int:
        dtype = f"<u{self.geometry.unit_bytes}"
        return int((self.base.view(dtype) != self.new.view(dtype)).sum())


def case_of(base, new, unit_bytes: int, *, profile: int = 0, has_base: bool = True) -> Case:
    """A case of one flat block from lists of unit values."""
    dtype = f"<u{unit_bytes}"
    base, new = (np.array(units, dtype).view(np.uint8) for units in (base, new))
    n = base.size // unit_bytes
    cols = (n, 1, n) if n else (0, 0, 0)
    return Case(base, new, Geometry(n, unit_bytes, *cols), profile, has_base)


def encode(backend: Backend, case: Case, *, update=False, undo=False) -> EncodedBlocks:
    """All blocks of a case in one section, coded from a copy of the base's digests."""
    digests = backend.digest_blocks(case.base, case.geometry, 1)
    return backend.encode_blocks(
        case.base,
        case.new,
        case.geometry,
        case.params(backend),
        digests,
        0,
        case.geometry.num_blocks,
        update=update,
        undo=undo,
        threads=1,
    )


def apply(backend: Backend, case: Case, body: bytes) -> tuple[np.ndarray, int]:
    """The base after a body was applied to it, and the number of units changed."""
    data, geometry = case.base.copy(), case.geometry
    digests = backend.digest_blocks(data, geometry, 1)
    num_changed = backend.apply_blocks(
        data, body, geometry, case.params(backend), digests, 0, geometry.num_blocks, 1
    )
    assert np.array_equal(digests, backend.digest_blocks(data, geometry, 1))
    return data, num_changed


@st.composite
def geometries(draw, max_units: int = 3000) -> Geometry:
    """Flat and tiled geometries, with blocks cut at the edges, from one unit upwards."""
    unit_bytes = draw(st.sampled_from((1, 2, 4)))
    rows = draw(st.integers(1, 40))
    cols = draw(st.integers(1, max_units // rows))
    if draw(st.booleans()):
        num_units = rows * cols
        tile_cols = draw(st.integers(max(1, num_units // 6), num_units))
        return Geometry(num_units, unit_bytes, num_units, 1, tile_cols)
    tile_rows = draw(st.integers(max(1, rows // 3), rows))
    tile_cols = draw(st.integers(max(1, cols // 3), cols))
    return Geometry(rows * cols, unit_bytes, cols, tile_rows, tile_cols)


@st.composite
def cases(draw, max_units: int = 3000) -> Case:
    """Random cases: every unit size, density and profile; weights, any bits, small steps, signs."""
    geometry = draw(geometries(max_units))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    has_base = draw(st.integers(0, 5)) > 0
    base = _base(draw(st.sampled_from(KINDS)), geometry, rng)
    if not has_base:
        base[:] = 0
    change = draw(st.sampled_from(("bits", "steps", "flips", "one step")))
    new = _changed(change, base, draw(st.sampled_from(DENSITIES)), rng)
    case = Case(base.view(np.uint8), new.view(np.uint8), geometry, 0, has_base)
    return replace(case, profile=draw(st.integers(0, 2)))


def _base(kind: str, geometry: Geometry, rng: np.random.Generator) -> np.ndarray:
    n, unit_bytes = geometry.num_units, geometry.unit_bytes
    dtype = f"<u{unit_bytes}"
    if kind == "weights":
        values = (rng.standard_normal(n) * 0.02).astype("<f4").view("<u4")
        return (values >> (32 - 8 * unit_bytes)).astype(dtype)
    if kind == "constant":
        return np.full(n, rng.integers(0, 256**unit_bytes), dtype)
    return rng.integers(0, 256**unit_bytes, n).astype(dtype)


def _changed(kind: str, base: np.ndarray, density: float, rng: np.random.Generator) -> np.ndarray:
    new = base.copy()
    where = np.flatnonzero(rng.random(base.size) < density)
    bits = 8 * base.itemsize
    if kind == "bits":
        new[where] = rng.integers(0, 2**bits, where.size).astype(base.dtype)
    elif kind == "flips":
        new[where] ^= base.dtype.type(2 ** (bits - 1))
    else:
        size = 1 if kind == "one step" else rng.geometric(0.5, where.size)
        step = np.where(rng.random(where.size) < 0.5, size, -size)
        new[where] = (base[where].astype(np.int64) + step).astype(base.dtype)
    return new
