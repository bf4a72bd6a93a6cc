"""Weights of every dtype, shape and layout, and pairs of them, for tests of the Python layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from gymfast.delta import Tensor, as_tensor
from gymfast.delta.geometry import DTYPE_BITS, num_bytes_of, unit_bytes_of

each_backend = pytest.mark.parametrize("backend", ["reference", "cpu"])
SHAPES = ((), (1,), (0,), (3, 0, 2), (7,), (33,), (16, 32), (3, 5, 4), (300,), (48, 64))
DENSITIES = (0.0, 0.001, 0.01, 0.1, 0.5, 1.0)
NUMPY_DTYPES = ("u1", "i1", "?", "u2", "f2", "u4", "f4", "i8", "f8", "c8")


def random_tensor(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """A tensor of any bits, NaNs and signed zeros included."""
    return Tensor(dtype, shape, rng.integers(0, 256, num_bytes_of(dtype, shape), np.uint8))


def changed(tensor: Tensor, density: float, rng: np.random.Generator) -> Tensor:
    """A copy in which about this share of the units has other bits."""
    units = tensor.data.copy().view(f"<u{unit_bytes_of(tensor.dtype)}")
    where = rng.random(units.size) < density
    units[where] ^= rng.integers(1, 256, where.sum()).astype(units.dtype)
    return Tensor(tensor.dtype, tensor.shape, units.view(np.uint8))


def copies(weights: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors in memory of their own; ties are gone."""
    return {name: as_tensor(value).copy() for name, value in weights.items()}


def strided(tensor: Tensor, rng: np.random.Generator) -> Any:
    """The same bits as a NumPy array that is not contiguous, or the tensor where that is vain."""
    bits = DTYPE_BITS[tensor.dtype]
    if bits < 8 or not tensor.shape or tensor.num_bytes == 0:
        return tensor
    plain = tensor.data.view(f"<u{bits // 8}").reshape(tensor.shape)
    if rng.random() < 0.5:
        return np.asfortranarray(plain)
    spread = np.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), plain.dtype)
    spread[..., ::2] = plain
    return spread[..., ::2]


@st.composite
def weights(draw: Any, max_tensors: int = 4) -> dict[str, Tensor]:
    """A few tensors of any dtype, shape and bits."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = draw(
        st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=max_tensors, unique=True)
    )
    return {
        name: random_tensor(
            draw(st.sampled_from(list(DTYPE_BITS))), draw(st.sampled_from(SHAPES)), rng
        )
        for name in names
    }


@st.composite
def versions(draw: Any, old: dict[str, Any]) -> dict[str, Any]:
    """A next version of weights: some changed, replaced, removed, added, tied or in other order."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    new: dict[str, Any] = {}
    for name in draw(st.permutations(list(old))):
        fate = draw(st.sampled_from(("change", "change", "keep", "replace", "remove", "tie")))
        tensor = as_tensor(old[name])
        if fate == "change":
            new[name] = changed(tensor, draw(st.sampled_from(DENSITIES)), rng)
        elif fate == "keep":
            new[name] = tensor.copy()
        elif fate == "replace":
            new[name] = random_tensor(draw(st.sampled_from(list(DTYPE_BITS))), (5, 4), rng)
        elif fate == "tie" and new:
            new[name] = new[draw(st.sampled_from(list(new)))]
    if draw(st.booleans()) or not new:
        new["z"] = random_tensor("BF16", draw(st.sampled_from(SHAPES)), rng)
    return new


@st.composite
def pairs(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A version and the next one."""
    old = draw(weights())
    return old, draw(versions(old))


def small_pair(seed: int = 0, density: float = 0.05) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two versions of three tensors that share names, dtypes and shapes; every tensor changes."""
    rng = np.random.default_rng(seed)
    specs = {"embed": ("BF16", (40, 32)), "bias": ("F32", (32,)), "index": ("I64", (5,))}
    old = {name: random_tensor(*spec, rng) for name, spec in specs.items()}
    new = {name: changed(tensor, density, rng) for name, tensor in old.items()}
    for tensor in new.values():
        tensor.data[-1] ^= 1
    return old, new
