"""Bitwise comparison of states with a report that names the first difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gymfast.delta.tensors import Tensor, as_tensor

__all__ = ["assert_bits_equal"]


def assert_bits_equal(actual: Any, expected: Any) -> None:
    """Nothing, if both hold the same names, dtypes, shapes and bits.

    Each side is a mapping of names to tensors or one tensor: anything `as_tensor` takes.
    Raises AssertionError with the number of differing elements and, for the first one, the tensor,
    the element index (row-major) and both bit patterns.
    """
    left, right = _named(actual), _named(expected)
    if left.keys() != right.keys():
        missing, surplus = sorted(right.keys() - left.keys()), sorted(left.keys() - right.keys())
        raise AssertionError(f"tensor names differ: missing {missing}, surplus {surplus}")
    num_differing = num_elements = 0
    first = ""
    for name in sorted(left):
        found, wanted = left[name], right[name]
        if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            raise AssertionError(
                f"tensor '{name}': found {found.dtype} {found.shape}, "
                f"expected {wanted.dtype} {wanted.shape}"
            )
        elements, count, text = _compare(name, found, wanted)
        num_elements += elements
        num_differing += count
        first = first or text
    if num_differing:
        raise AssertionError(f"{num_differing} of {num_elements} elements differ; first: {first}")


def _compare(name: str, found: Tensor, wanted: Tensor) -> tuple[int, int, str]:
    """Number of elements, number of differing ones, and a text about the first of those."""
    count = max(1, math.prod(found.shape))
    width = found.num_bytes // count if found.num_bytes % count == 0 else 1  # packed: bytes
    width = max(1, width)
    left, right = found.data.reshape(-1, width), wanted.data.reshape(-1, width)
    differing = np.flatnonzero((left != right).any(axis=1))
    if not differing.size:
        return len(left), 0, ""
    index = int(differing[0])
    bits = [f"0x{bytes(side[index])[::-1].hex()}" for side in (left, right)]
    place = f"tensor '{name}', element {index}" if name else f"element {index}"
    return len(left), int(differing.size), f"{place}: found {bits[0]}, expected {bits[1]}"


def _named(value: Any) -> dict[str, Tensor]:
    items = value.items() if isinstance(value, Mapping) else [("", value)]
    return {str(name): as_tensor(tensor) for name, tensor in items}
