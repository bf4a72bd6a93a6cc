"""INT4 and FP8 parts beside those of the real compressed-tensors: the same bits.

Needs `pip install torch compressed-tensors`. `python tests/engines/compressed_tensors_real.py`
writes tests/golden/quantised.safetensors, which the default tests compare with; it overwrites
nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

from gymfast.delta import as_tensor
from gymfast.delta.tensors import like
from gymfast.quantised import Fp8Scheme, Int4Scheme

GOLDEN = Path(__file__).parents[1] / "golden" / "quantised.safetensors"
SCHEMES = {
    f"int4-g{group}-{'symmetric' if symmetric else 'asymmetric'}": Int4Scheme(group, symmetric)
    for group in (32, 128)
    for symmetric in (True, False)
}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
Parts = dict[str, torch.Tensor]


def make_weight(dtype: torch.dtype, rows: int = 9, columns: int = 256) -> torch.Tensor:
    """Rows of ordinary size, of zeros, of one sign, of ties, with an outlier, and tiny ones."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    weight[1] = 0
    weight[2] = weight[2].abs()
    weight[3] = -weight[3].abs()
    weight[4] = torch.arange(columns).remainder(31) / 2 - 7.5
    weight[5, 3] = 60.0
    weight[6] *= 1e-4
    weight[7, ::2] = -0.0
    return weight.to(dtype)


def real_int4(weight: torch.Tensor, scheme: Int4Scheme, scale: Parts | None = None) -> Parts:
    """What the library's compressor makes of a weight, with its own scales if none are given."""
    args = QuantizationArgs(
        num_bits=4,
        type="int",
        strategy="group",
        group_size=scheme.group_size,
        symmetric=scheme.is_symmetric,
    )
    groups = weight.unflatten(-1, (-1, scheme.group_size))
    if scale is None:
        found, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        scale = {"weight_scale": found, "weight_zero_point": zero}
    state = {"weight": weight, **scale}
    return PackedQuantizationCompressor.compress(
        state, QuantizationScheme(targets=["Linear"], weights=args)
    )


def real_fp8(weight: torch.Tensor, block: tuple[int, int]) -> Parts:
    """What the library makes of a weight with blocks; the scale of zeros is that of slime."""
    args = QuantizationArgs(
        num_bits=8, type="float", strategy="block", block_structure=list(block), symmetric=True
    )
    scale = (
        torch.stack(
            [
                torch.stack([part.abs().max().float() for part in rows.split(block[1], 1)])
                for rows in weight.split(block[0], 0)
            ]
        ).clamp(min=1e-12)
        / torch.finfo(torch.float8_e4m3fn).max
    )
    codes = quantize(weight, scale, None, args, dtype=torch.float8_e4m3fn)
    return {"weight": codes.contiguous(), "weight_scale_inv": scale}


def ours(weight: torch.Tensor, scheme: Int4Scheme | Fp8Scheme) -> Parts:
    parts = scheme.quantise(as_tensor(weight), "weight", None)
    return {f"weight{suffix}": like(part, weight) for suffix, part in parts.items()}


def assert_same_bits(found: Parts, expected: Parts) -> None:
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert (found[name].dtype, found[name].shape) == (part.dtype, part.shape), name
        assert torch.equal(bytes_of(found[name]), bytes_of(part)), name


def bytes_of(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(-1).clone().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_int4_parts_have_the_bits_of_the_library(name: str, dtype: str) -> None:
    for rows, columns in ((9, 256), (16, 128), (33, 1024)):
        weight = make_weight(DTYPES[dtype], rows, columns)
        assert_same_bits(ours(weight, SCHEMES[name]), real_int4(weight, SCHEMES[name]))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_million_random_weights_have_the_bits_of_the_library(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = (torch.randn(1024, 1024, generator=generator) * 0.03).bfloat16()
    assert_same_bits(ours(weight, SCHEMES[name]), real_int4(weight, SCHEMES[name]))


@pytest.mark.parametrize("name", SCHEMES)
def test_frozen_scales_give_the_bits_of_the_library(name: str) -> None:
    scheme, weight = SCHEMES[name], make_weight(torch.bfloat16)
    first = scheme.quantise(as_tensor(weight), "weight", None)
    moved = (weight.float() * 1.3 + 0.003).bfloat16()
    frozen = {s: first[s] for s in scheme.scale_suffixes}
    found = scheme.quantise(as_tensor(moved), "weight", frozen)
    groups = weight.unflatten(-1, (-1, scheme.group_size))
    args = QuantizationArgs(
        num_bits=4, strategy="group", group_size=scheme.group_size, symmetric=scheme.is_symmetric
    )
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    expected = real_int4(moved, scheme, {"weight_scale": scale, "weight_zero_point": zero})
    assert_same_bits({f"weight{s}": like(p, weight) for s, p in found.items()}, expected)


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_come_back_as_the_library_reads_them(name: str) -> None:
    scheme, weight = SCHEMES[name], make_weight(torch.bfloat16)
    args = QuantizationArgs(
        num_bits=4, strategy="group", group_size=scheme.group_size, symmetric=scheme.is_symmetric
    )
    library = QuantizationScheme(targets=["Linear"], weights=args)
    expected = PackedQuantizationCompressor.decompress(ours(weight, scheme), library)["weight"]
    found = scheme.dequantise(scheme.quantise(as_tensor(weight), "weight", None), "weight")
    assert torch.equal(torch.from_numpy(found), expected.float())


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("block", [(128, 128), (4, 32)])
def test_fp8_parts_have_the_bits_of_the_library(block: tuple[int, int], dtype: str) -> None:
    for rows, columns in ((9, 256), (200, 300)):
        weight = make_weight(DTYPES[dtype], rows, columns)
        assert_same_bits(ours(weight, Fp8Scheme(block)), real_fp8(weight, block))


@pytest.mark.parametrize("name", SCHEMES)
def test_the_library_reads_our_quantization_config(name: str) -> None:
    config = QuantizationConfig(**SCHEMES[name].config(["lm_head"]))
    weights = config.config_groups["group_0"].weights
    assert config.format == "pack-quantized" and config.ignore == ["lm_head"]
    assert (weights.num_bits, weights.group_size) == (4, SCHEMES[name].group_size)
    assert weights.symmetric == SCHEMES[name].is_symmetric


def golden() -> Parts:
    """Weights and, for each scheme, the parts that the library makes of them."""
    tensors: Parts = {}
    for label, dtype in DTYPES.items():
        weight = make_weight(dtype)
        tensors[f"{label}.weight"] = weight
        for name, scheme in SCHEMES.items():
            parts = real_int4(weight, scheme)
            tensors |= {f"{label}.{name}.{part}": t.contiguous() for part, t in parts.items()}
        if label != "f16":
            parts = real_fp8(weight, (4, 128))
            tensors |= {f"{label}.fp8.{part}": t for part, t in parts.items()}
    return tensors


def test_the_golden_file_is_what_the_library_makes() -> None:
    from safetensors.torch import load_file

    assert_same_bits(load_file(GOLDEN), golden())


if __name__ == "__main__":
    if GOLDEN.exists():
        sys.exit(f"{GOLDEN} is there already: a golden file is not overwritten")
    save_file(golden(), GOLDEN)
