"""Quantises a matrix in strips of rows, which fit the cache of a core and run side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from gymfast.delta.memory import CPU
from gymfast.delta.tensors import Tensor

_STRIP = 1 << 17  # weights: the scratch of one strip is some MiB
Parts = dict[str, Tensor]


class RowScheme(Protocol):
    """A scheme whose parts have rows that belong to rows of the weights."""

    @property
    def rows_of_parts(self) -> Mapping[str, int]:
        """By suffix: how many rows of weights one row of the part belongs to."""

    def check(self, shape: tuple[int, ...], name: str) -> None:
        """Raises ValueError for a shape that cannot be quantised."""

    def quantise(self, weight: Tensor, name: str, scales: Mapping[str, Tensor] | None) -> Parts:
        """The parts of a weight."""


def quantise_in_strips(
    scheme: RowScheme,
    weight: Tensor,
    name: str,
    scales: Mapping[str, Tensor] | None,
    pool: ThreadPoolExecutor,
) -> Parts:
    """What `scheme.quantise` gives, bit for bit. Raises what that raises."""
    scheme.check(weight.shape, name)
    rows, columns = weight.shape
    held = weight if weight.place == CPU else weight.copy(CPU)
    height = max(scheme.rows_of_parts.values())
    height *= max(1, _STRIP // (columns * height))
    if height >= rows:
        return scheme.quantise(held, name, scales)
    work = [_job(scheme, held, name, scales, bounds) for bounds in _bounds(rows, height)]
    strips = list(pool.map(lambda job: job(), work))
    parts: Parts = {}
    for suffix, first in strips[0].items():
        if suffix not in scheme.rows_of_parts:  # the shape of the whole
            whole = np.array(weight.shape, np.int64)
            parts[suffix] = Tensor("I64", whole.shape, whole.view(np.uint8))
        elif scales is not None and suffix in scales:
            parts[suffix] = scales[suffix]
        else:
            data = np.concatenate([strip[suffix].data for strip in strips])
            num_rows = sum(strip[suffix].shape[0] for strip in strips)
            parts[suffix] = Tensor(first.dtype, (num_rows, *first.shape[1:]), data)
    return parts


def _bounds(rows: int, height: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, rows, height):
        yield begin, min(begin + height, rows)


def _job(
    scheme: RowScheme,
    weight: Tensor,
    name: str,
    scales: Mapping[str, Tensor] | None,
    bounds: tuple[int, int],
) -> Callable[[], Parts]:
    begin, end = bounds

    def run() -> Parts:
        cut = None
        if scales is not None:
            rows = scheme.rows_of_parts
            cut = {s: _rows(p, begin // rows[s], -(-end // rows[s])) for s, p in scales.items()}
        return scheme.quantise(_rows(weight, begin, end), name, cut)

    return run


def _rows(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Some rows of a matrix, sharing its memory."""
    size = tensor.num_bytes // tensor.shape[0]
    end = min(end, tensor.shape[0])
    return Tensor(
        tensor.dtype, (end - begin, *tensor.shape[1:]), tensor.data[begin * size : end * size]
    )
