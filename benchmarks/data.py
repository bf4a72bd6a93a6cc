"""The states that are measured: generated, trained on the spot, or stored pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gymfast.testing.weights import Masters, rl_like_update, rl_like_weights

Bits = NDArray[np.uint16]
Tensors = dict[str, Bits]

PAIRS = Path(__file__).parents[2] / "shared" / "data" / "rl-pairs"
_ALIGN = 2 << 20  # of a huge page
_TENSOR_ALIGN = 64


class Arena:
    """One buffer on huge pages that tensors are cut from, so that every row sees the same memory.

    NumPy asks for huge pages (madvise) for all large arrays, hence for those of the codecs too.
    """

    def __init__(self, num_bytes: int) -> None:
        raw = np.empty(num_bytes + _ALIGN, np.uint8)
        start = -raw.ctypes.data % _ALIGN
        self.bytes: NDArray[np.uint8] = raw[start : start + num_bytes]
        self.bytes[:] = 0  # touch every page
        self._used = 0

    def allocate(self, shape: tuple[int, ...]) -> Bits:
        num_bytes = 2 * int(np.prod(shape))
        start = self._used
        self._used = -(-(start + num_bytes) // _TENSOR_ALIGN) * _TENSOR_ALIGN
        return self.bytes[start : start + num_bytes].view(np.uint16).reshape(shape)

    def like(self, tensors: Tensors) -> Tensors:
        return {name: self.allocate(array.shape) for name, array in tensors.items()}

    @property
    def used(self) -> Bits:
        return self.bytes[: self._used].view(np.uint16)


def room_for(tensors: Tensors) -> int:
    """Bytes of an arena that holds such tensors."""
    return sum(-(-array.nbytes // _TENSOR_ALIGN) * _TENSOR_ALIGN for array in tensors.values())


@dataclass(frozen=True)
class Pair:
    """Two consecutive states with the same names and shapes, each contiguous in one arena."""

    label: str
    target: float | None  # the density asked for; None: it came with the data
    old: Tensors
    new: Tensors
    old_flat: Bits
    new_flat: Bits
    is_for_speed: bool = True

    @cached_property
    def num_units(self) -> int:
        return sum(array.size for array in self.old.values())

    @cached_property
    def num_bytes(self) -> int:
        return 2 * self.num_units

    @cached_property
    def num_changed(self) -> int:
        return sum(int(np.count_nonzero(self.old[name] != self.new[name])) for name in self.old)

    @property
    def density(self) -> float:
        return self.num_changed / max(1, self.num_units)

    def head(self, max_bytes: int) -> Pair:
        """The pair cut to its last tensors of together at most max_bytes (at least one)."""
        names = list(self.old)
        keep: list[str] = []
        for name in reversed(names):  # the layers; the embedding comes first
            if (
                keep
                and sum(self.old[kept].nbytes for kept in keep) + self.old[name].nbytes > max_bytes
            ):
                break
            keep.insert(0, name)
        start = (self.old[keep[0]].ctypes.data - self.old_flat.ctypes.data) // 2
        return Pair(
            self.label,
            self.target,
            {name: self.old[name] for name in keep},
            {name: self.new[name] for name in keep},
            self.old_flat[start:],
            self.new_flat[start:],
            self.is_for_speed,
        )


@cache
def _old_weights(size_bytes: int, seed: int) -> tuple[Arena, Tensors]:
    arena = Arena(size_bytes + (1 << 20))
    return arena, rl_like_weights(size_bytes, seed, allocate=arena.allocate)


def generated(size_bytes: int, seed: int, masters: Masters, density: float) -> Pair:
    """A pair of the given density; all pairs of a size and seed share the old weights."""
    old_arena, old = _old_weights(size_bytes, seed)
    arena = Arena(room_for(old))
    new = rl_like_update(old, density, seed + 1, masters=masters, allocate=arena.allocate)
    label = "generator" if masters == "dithered" else "generator, masters on grid"
    return Pair(label, density, old, new, old_arena.used, arena.used)


def stored_names(folder: Path = PAIRS) -> list[str]:
    """Names of the stored pairs; none where the folder is absent, as in a bare clone."""
    return sorted(path.stem for path in folder.glob("*.safetensors"))


def stored(name: str, folder: Path = PAIRS) -> Pair:
    """A real optimizer step of ../shared/data/rl-pairs: for sizes, too small for speed."""
    from safetensors.numpy import load_file

    loaded = load_file(folder / f"{name}.safetensors")
    return arrange(name, {"weights": loaded["old"]}, {"weights": loaded["new"]}, speed=False)


def arrange(label: str, old: Tensors, new: Tensors, *, speed: bool) -> Pair:
    """A pair copied into arenas."""
    arenas = [Arena(room_for(old)), Arena(room_for(old))]
    copies = [arena.like(old) for arena in arenas]
    for name in old:
        copies[0][name][...] = old[name]
        copies[1][name][...] = new[name]
    return Pair(label, None, copies[0], copies[1], arenas[0].used, arenas[1].used, speed)
