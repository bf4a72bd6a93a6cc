"""RL-like BF16 weights and updates from a seed: for tests, benchmarks and writers of new back ends.

An optimizer step of Adam has about the same absolute size everywhere, while one unit in the last
place of BF16 doubles with every octave. So a step of RL training changes an element with a
probability that halves with every octave of its magnitude, mostly by one unit. The generator takes
just such steps on fp32 masters and rounds.

Source: codec.md sections 2.1 and 2.2 (measured on real optimizer steps); docs/benchmarks.md.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Masters", "TensorPlan", "plan_decoder", "rl_like_update", "rl_like_weights"]

Bits = NDArray[np.uint16]
_Job = TypeVar("_Job")
Masters = Literal["dithered", "grid"]
Allocate = Callable[[tuple[int, ...]], Bits]

_CHUNK = 1 << 17  # elements: the scratch of one thread stays in its L2 cache
_SAMPLE = 1 << 22  # elements that the step size is calibrated on
_WEIGHTS, _UPDATE = 1, 2  # random streams
_HIGH_HALF = 1 if np.little_endian else 0  # of an fp32 seen as two uint16
_FORCED = 0.97  # at density 1 the step is that of this density, the rest moves by one unit


@dataclass(frozen=True)
class TensorPlan:
    """Name, shape and distribution (normal: mean, std) of one tensor."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def plan_decoder(size_bytes: int) -> tuple[TensorPlan, ...]:
    """Tensors of a decoder (grouped-query attention, gated MLP, tied embedding) of about this size.

    Never larger than size_bytes (at least one row of 64), short by less than one embedding row.
    """
    num_elements = size_bytes // 2
    hidden = 64
    while hidden < 4096 and 0.85 * num_elements / _layer_elements(2 * hidden) >= 12:
        hidden *= 2
    num_layers = int(0.85 * num_elements) // _layer_elements(hidden)
    rest = num_elements - num_layers * _layer_elements(hidden) - hidden
    plans = [TensorPlan("model.embed_tokens.weight", (max(1, rest // hidden), hidden), 0.045)]
    for layer in range(num_layers):
        plans += _plan_layer(f"model.layers.{layer}", hidden)
    if rest >= hidden:
        plans.append(TensorPlan("model.norm.weight", (hidden,), 0.1, mean=1.0))
    return tuple(plans)


def rl_like_weights(
    size_bytes: int,
    seed: int = 0,
    *,
    allocate: Allocate | None = None,
    threads: int | None = None,
) -> dict[str, Bits]:
    """BF16 bits (uint16) of a decoder of about size_bytes; the same for every thread count.

    `allocate(shape)` supplies the arrays (default `numpy.empty`); each thread needs 2 MiB more.
    """
    plans = plan_decoder(size_bytes)
    weights = {plan.name: (allocate or _empty)(plan.shape) for plan in plans}
    jobs = [
        (plan, weights[plan.name].reshape(-1)[start : start + _CHUNK], index, start)
        for index, plan in enumerate(plans)
        for start in range(0, math.prod(plan.shape), _CHUNK)
    ]

    def fill(job: tuple[TensorPlan, Bits, int, int]) -> None:
        plan, out, index, start = job
        values = _generator(seed, _WEIGHTS, index, start).standard_normal(out.size, np.float32)
        values *= np.float32(plan.std)
        values += np.float32(plan.mean)
        out[:] = _round_to_bf16(values)

    _for_each(fill, jobs, threads)
    return weights


def rl_like_update(
    weights: Mapping[str, Bits],
    density: float,
    seed: int = 0,
    *,
    masters: Masters = "dithered",
    allocate: Allocate | None = None,
    threads: int | None = None,
) -> dict[str, Bits]:
    """The weights after an Adam-like step that changes about the share `density` of the elements.

    masters "dithered": fp32 masters lie anywhere in the rounding cell of their BF16 value, as in
    the steady state of a long run: P(change) = E min(1, |step| / ulp). "grid": masters lie on the
    BF16 values, as in the first steps after a release: an element changes if |step| > ulp / 2, a
    hard threshold of the magnitude. Density 1 changes every element. Infinities and NaN stay.

    Raises ValueError if density is not in 0..1.
    """
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"density must lie in 0..1, got {density}")
    step = _step_for_density(weights, min(density, _FORCED), masters) if density else 0.0
    updated = {name: (allocate or _empty)(old.shape) for name, old in weights.items()}
    jobs = [
        (old.reshape(-1)[start : start + _CHUNK], updated[name].reshape(-1), index, start)
        for index, (name, old) in enumerate(weights.items())
        for start in range(0, old.size, _CHUNK)
    ]

    def move(job: tuple[Bits, Bits, int, int]) -> None:
        old, flat, index, start = job
        bits = _generator(seed, _UPDATE, index, start).bit_generator.random_raw((old.size + 1) // 2)
        random = np.asarray(bits).view(np.uint32)[: old.size]
        new = _take_step(old, random, np.float32(step), masters)
        if density == 1.0:
            new ^= (new == old) & ~_is_special(old)
        flat[start : start + old.size] = new

    _for_each(move, jobs, threads)
    return updated


def _layer_elements(hidden: int) -> int:
    return 23 * hidden * hidden // 2 + 2 * hidden


def _plan_layer(prefix: str, hidden: int) -> Iterator[TensorPlan]:
    # Shapes as in Qwen3-8B: 1/4 as many key-value heads, MLP three times as wide.
    # Deviations chosen so that the densities of the tensor kinds differ as in codec.md 2.1.
    heads, wide = hidden // 4, 3 * hidden
    yield TensorPlan(f"{prefix}.input_layernorm.weight", (hidden,), 0.1, mean=1.0)
    yield TensorPlan(f"{prefix}.self_attn.q_proj.weight", (hidden, hidden), 0.065)
    yield TensorPlan(f"{prefix}.self_attn.k_proj.weight", (heads, hidden), 0.06)
    yield TensorPlan(f"{prefix}.self_attn.v_proj.weight", (heads, hidden), 0.045)
    yield TensorPlan(f"{prefix}.self_attn.o_proj.weight", (hidden, hidden), 0.04)
    yield TensorPlan(f"{prefix}.post_attention_layernorm.weight", (hidden,), 0.1, mean=1.0)
    yield TensorPlan(f"{prefix}.mlp.gate_proj.weight", (wide, hidden), 0.05)
    yield TensorPlan(f"{prefix}.mlp.up_proj.weight", (wide, hidden), 0.05)
    yield TensorPlan(f"{prefix}.mlp.down_proj.weight", (hidden, wide), 0.035)


def _take_step(old: Bits, random: NDArray[np.uint32], step: np.float32, masters: Masters) -> Bits:
    """BF16 bits of master - step * u; 16 random bits choose u, the other 16 the master."""
    magnitude = (old & np.uint16(0x7FFF)).astype(np.int32)
    magnitude <<= 16
    if masters == "dithered":
        # Odd offsets: never the middle between two values, where rounding depends on parity.
        magnitude += ((random & np.uint32(0xFFFF)) | np.uint32(1)).view(np.int32)
        magnitude -= 0x8000
        np.maximum(magnitude, 0, out=magnitude)
    master = magnitude.view(np.uint32)
    master |= (old & np.uint16(0x8000)).astype(np.uint32) << np.uint32(16)
    value = master.view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaN; the result is not used
        value -= step * _adam_quantiles()[random >> np.uint32(16)]
    return np.where(_is_special(old), old, _round_to_bf16(value))


def _round_to_bf16(values: NDArray[np.float32]) -> Bits:
    """Round to nearest, ties to even; overwrites `values`, which must be finite."""
    bits = values.view(np.uint32)
    bits += ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    return np.ascontiguousarray(bits.view(np.uint16)[_HIGH_HALF::2])


def _is_special(bits: Bits) -> NDArray[np.bool_]:
    special: NDArray[np.bool_] = (bits & np.uint16(0x7F80)) == np.uint16(0x7F80)
    return special


@cache
def _adam_quantiles() -> NDArray[np.float32]:
    """65536 quantiles of an Adam step of mean size 1: between a normal and a Laplace distribution.

    The shape fits both columns of codec.md table 2.2 (a normal one saturates too early).
    """
    p = (np.arange(1, 65537, 2) / 65536.0).tolist()  # of |u|
    normal = np.array([NormalDist().inv_cdf(0.5 + q / 2) for q in p]) * math.sqrt(math.pi / 2)
    laplace = -np.log1p(-np.array(p))
    half = (0.5 * normal + 0.5 * laplace).astype(np.float32)
    return np.concatenate([half, -half])


def _step_for_density(weights: Mapping[str, Bits], density: float, masters: Masters) -> float:
    """Mean step size whose expected density is the one asked for, by bisection."""
    shares = _exponent_shares(weights)
    exponents = np.flatnonzero(shares[:255])  # 255: infinities and NaN, which do not move
    ulps = np.exp2(np.maximum(exponents, 1) - 134.0)
    sizes = np.abs(_adam_quantiles()[: 1 << 15 : 16]).astype(np.float64)

    def expected(step: float) -> float:
        ratio = step * sizes[None, :] / ulps[:, None]
        moved = np.minimum(1.0, ratio) if masters == "dithered" else ratio > 0.5
        return float(moved.mean(axis=1) @ shares[exponents])

    low, high = -140.0, 20.0  # log2 of the step
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(2.0**middle) < density else (low, middle)
    return float(2.0**high)


def _exponent_shares(weights: Mapping[str, Bits]) -> NDArray[np.float64]:
    """Share of each of the 256 exponents, from an even sample of the elements."""
    stride = max(1, sum(array.size for array in weights.values()) // _SAMPLE)
    counts = np.zeros(256, np.int64)
    for array in weights.values():
        exponents = (array.reshape(-1)[::stride] >> np.uint16(7)) & np.uint16(0xFF)
        counts += np.bincount(exponents, minlength=256)
    return counts / max(1, int(counts.sum()))


def _generator(seed: int, stream: int, index: int, start: int) -> np.random.Generator:
    key = np.random.SeedSequence([seed, stream, index, start // _CHUNK])
    return np.random.Generator(np.random.SFC64(key))


def _empty(shape: tuple[int, ...]) -> Bits:
    return np.empty(shape, np.uint16)


def _for_each(work: Callable[[_Job], None], jobs: list[_Job], threads: int | None) -> None:
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        for _ in pool.map(work, jobs):
            pass
