"""Generated cases: every unit width, geometry, density and kind of change, in many small blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.device.memory import U8
from gymfast.delta.backends import BlockParams, select
from gymfast.delta.frame import PROFILES
from gymfast.delta.geometry import DEFAULT_BLOCK_UNITS, Geometry

DENSITIES = (0.0, 0.001, 0.01, 0.03, 0.1, 0.4, 1.0)
UNIT_BYTES = (2, 1, 4)  # BF16 first, should the time end
NUM_RUNS = len(UNIT_BYTES) * 2 * (len(DENSITIES) + 1) * len(PROFILES)
_SAMPLE = 1 << 16
_SMALL_VALUE = 0.008  # about a third of the values are smaller


@dataclass(frozen=True)
class Case:
    """A base and a new tensor as bytes, how they are cut, and where they begin in memory."""

    label: str
    base: U8
    new: U8
    geometry: Geometry
    has_base: bool = True
    shift: int = 0  # bytes behind an aligned address

    def params(self, profile: int) -> BlockParams:
        """What the canonical encoder uses for this base (docs/wire-format.md section 10)."""
        found = (0, 0)
        if self.has_base and PROFILES[profile] != "fast":
            found = select("cpu").class_params(self.base, self.geometry.unit_bytes)
        return BlockParams(profile, *found, self.has_base)


def cases(num_units: int, seed: int) -> Iterator[Case]:
    """One case for each width, geometry and density, and one without a base for each of the first
    two; every second one is not aligned to 16 bytes.
    """
    rng = np.random.default_rng(seed)
    for unit_bytes in UNIT_BYTES:
        for geometry in (_flat(num_units, unit_bytes), _tiled(num_units, unit_bytes)):
            shape = "flat" if geometry.tile_rows == 1 else "tiled"
            label = f"{unit_bytes}-byte units, {shape}"
            for number, density in enumerate(DENSITIES):
                kind = "bits" if (number + unit_bytes) % 3 == 0 else "steps"
                base, new = _pair(geometry, density, kind, rng)
                text = f"{label}, {100 * density:g} % {kind}"
                yield Case(text, base, new, geometry, shift=unit_bytes * (number % 2))
            new = _weights(geometry, rng)[1].view(np.uint8)
            yield Case(f"{label}, no base", np.zeros_like(new), new, geometry, has_base=False)


def _flat(num_units: int, unit_bytes: int) -> Geometry:
    return Geometry(num_units, unit_bytes, num_units, 1, min(num_units, DEFAULT_BLOCK_UNITS))


def _tiled(num_units: int, unit_bytes: int) -> Geometry:
    """About square, with tiles that divide neither rows nor columns."""
    cols = math.isqrt(num_units)
    rows = num_units // cols
    tile_cols = cols // 2 + 1
    tile_rows = max(2, min(rows // 3 + 1, DEFAULT_BLOCK_UNITS // tile_cols))
    return Geometry(rows * cols, unit_bytes, cols, tile_rows, tile_cols)


def _weights(
    geometry: Geometry, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.unsignedinteger]]:
    """Normal values, and their highest bytes as units."""
    values = rng.standard_normal(geometry.num_units, np.float32)
    values *= np.float32(0.02)
    bits = values.view(np.uint32) >> np.uint32(32 - 8 * geometry.unit_bytes)
    return values, bits.astype(f"<u{geometry.unit_bytes}")


def _pair(geometry: Geometry, density: float, kind: str, rng: np.random.Generator) -> tuple[U8, U8]:
    """Weights, and the same with a share changed: small values more often, as in training."""
    values, base = _weights(geometry, rng)
    score = rng.random(base.size, np.float32)
    score *= np.abs(values)
    limit = np.quantile(score[:_SAMPLE], density) if density < 1 else np.inf
    where = np.flatnonzero(score <= limit) if density else np.empty(0, np.int64)
    new = base.copy()
    if kind == "bits":
        new[where] = rng.integers(0, 256**geometry.unit_bytes, where.size).astype(base.dtype)
    else:
        # Longer steps of small values, as in training: where classes pay (mode balanced).
        size = rng.geometric(np.where(np.abs(values[where]) < _SMALL_VALUE, 0.1, 0.9))
        step = np.where(rng.random(where.size) < 0.5, size, -size)
        new[where] = (base[where].astype(np.int64) + step).astype(base.dtype)
    return base.view(np.uint8), new.view(np.uint8)
