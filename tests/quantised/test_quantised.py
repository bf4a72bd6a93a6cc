"""INT4 and FP8 parts: the bits of compressed-tensors, and what becomes of them in a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gymfast.delta import Tensor, as_tensor
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.errors import CoverageError, FormatError
from gymfast.models.config import Experts, ModelConfig
from gymfast.models.formats import tensor_bytes
from gymfast.models.tensors import tensors_of
from gymfast.quantised import Fp8Scheme, Int4Scheme, Quantiser
from gymfast.quantised.floats import e4m3_codes, e4m3_values, rounded, tensor_of, values_of
from gymfast.quantised.int4 import pack_int4, unpack_int4
from gymfast.stores import MemoryStore
from gymfast.sync import LiveTarget, Publisher, Subscriber

GOLDEN = Path(__file__).parents[1] / "golden" / "quantised.safetensors"
INT4 = {
    f"int4-g{group}-{'symmetric' if symmetric else 'asymmetric'}": Int4Scheme(group, symmetric)
    for group in (32, 128)
    for symmetric in (True, False)
}
ALL = [*INT4.values(), Fp8Scheme(), Fp8Scheme((4, 32))]
NAME = "model.layers.0.mlp.up_proj.weight"


def bf16(values: np.ndarray) -> Tensor:
    return tensor_of(np.asarray(values, np.float32), "BF16")


def noise(seed: int, shape: tuple[int, int] = (16, 256)) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert (found[name].dtype, found[name].shape) == (part.dtype, part.shape), name
        assert found[name].data.tobytes() == part.data.tobytes(), name


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", [*INT4, "fp8"])
def test_parts_have_the_bits_that_compressed_tensors_makes(name: str, dtype: str) -> None:
    """tests/engines/compressed_tensors_real.py made the file, and compares far more with it."""
    if (name, dtype) == ("fp8", "f16"):
        return  # the library has none: it divides in the dtype of the weights
    with Checkpoint.open(GOLDEN) as golden:
        weight = golden.read(f"{dtype}.weight")
        start = f"{dtype}.{name}.weight"
        expected = {
            n.removeprefix(start): golden.read(n) for n in golden.names if n.startswith(start)
        }
    scheme = INT4.get(name, Fp8Scheme((4, 128)))
    assert_same(scheme.quantise(weight, NAME, None), expected)


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 31, 64])
def test_every_row_of_codes_comes_back_from_its_words(columns: int) -> None:
    codes = np.random.default_rng(columns).integers(-8, 8, (5, columns)).astype(np.int8)
    words = pack_int4(codes)
    assert words.shape == (5, -(-columns // 8))
    assert np.array_equal(unpack_int4(words, columns), codes)


def test_words_hold_the_first_code_in_their_lowest_bits() -> None:
    codes = np.array([[-8, -7, -6, -5, -4, -3, -2, -1, 7]], np.int8)
    assert pack_int4(codes).tolist() == [[0x76543210, 0xF]]


def test_fp8_and_bf16_round_as_torch_rounds() -> None:
    """All BF16 numbers that E4M3 reaches, the middles between its numbers, and their neighbours."""
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    numbers = e4m3_values(np.arange(256, dtype=np.uint8))
    numbers = np.sort(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(middles, np.float32(side)) for side in (-500, 500)]
    values = np.concatenate([every[np.abs(every) <= 448], numbers, middles, *near])
    values = values.astype(np.float32)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn)
    assert np.array_equal(e4m3_codes(values), expected.view(torch.uint8).numpy())
    assert np.array_equal(e4m3_values(e4m3_codes(values)), expected.float().numpy())
    halves = np.concatenate([values, noise(1).ravel()])
    bits = torch.from_numpy(halves).bfloat16()
    assert np.array_equal(rounded(halves, "BF16"), bits.float().numpy())
    assert tensor_of(halves, "BF16").data.tobytes() == bits.view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_weights_come_back_within_half_a_step(scheme) -> None:
    values = rounded(noise(3), "BF16")
    parts = scheme.quantise(bf16(values), NAME, None)
    found = scheme.dequantise(parts, NAME)
    largest = np.abs(values).max()
    assert np.abs(found - values).max() <= largest * (0.08 if "Int4" in str(scheme) else 0.037)
    again = scheme.quantise(
        bf16(values), NAME, {suffix: parts[suffix] for suffix in scheme.scale_suffixes}
    )
    assert_same(again, parts)


@pytest.mark.parametrize("scheme", ALL, ids=str)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_R09_a_block_of_zeros_has_a_finite_scale_above_zero(scheme, zero: float) -> None:
    values = noise(4, (256, 256))
    values[:128, :128] = zero
    parts = scheme.quantise(bf16(values), NAME, None)
    scale = values_of(parts[scheme.scale_suffixes[0]], NAME)
    assert np.isfinite(scale).all() and (scale > 0).all()
    found = scheme.dequantise(parts, NAME)
    assert (found[:128, :128] == 0).all() and np.isfinite(found).all()


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_what_cannot_be_quantised_is_refused_with_its_name(scheme) -> None:
    values = noise(5)
    values[3, 3] = np.nan
    with pytest.raises(ValueError, match=rf"{NAME}.*NaN"):
        scheme.quantise(bf16_bits_of(values), NAME, None)
    with pytest.raises(ValueError, match=r"has shape \(4096,\)"):
        scheme.quantise(bf16(noise(5).ravel()), NAME, None)
    with pytest.raises(TypeError, match="is I64"):
        scheme.quantise(as_tensor(np.zeros((2, 128), np.int64)), NAME, None)
    parts = scheme.quantise(bf16(noise(5)), NAME, None)
    with pytest.raises(ValueError, match="the scales given for it"):
        scheme.quantise(bf16(noise(5, (300, 256))), NAME, parts)
    cut = parts | {scheme.scale_suffixes[0]: tensor_of(np.ones((3, 1), np.float32), "F32")}
    with pytest.raises(FormatError, match="scales"):
        scheme.dequantise(cut, NAME)


def bf16_bits_of(values: np.ndarray) -> Tensor:
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return Tensor("BF16", values.shape, bits.reshape(-1).view(np.uint8))


def test_rows_without_whole_groups_and_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="whole groups of 128"):
        Int4Scheme(128).quantise(bf16(noise(1, (2, 192))), NAME, None)
    with pytest.raises(ValueError, match="group_size is 0"):
        Int4Scheme(0)
    with pytest.raises(ValueError, match="block is"):
        Fp8Scheme((0, 128))
    with pytest.raises(ValueError, match="scales is 'thawed'"):
        Quantiser(Int4Scheme(), scales="thawed")  # type: ignore[arg-type]


def model_of(step: int) -> dict[str, Tensor]:
    """A small model; with each step 3 % of its weights move by a little."""
    rng = np.random.default_rng(step)
    weights = {
        "model.embed_tokens.weight": noise(1),
        "model.layers.0.mlp.gate.weight": noise(2),
        NAME: noise(3),
        "model.layers.0.mlp.down_proj.weight": noise(4),
        "model.norm.weight": np.ones(256, np.float32),
    }
    for _ in range(step):
        for values in weights.values():
            values += rng.normal(0, 2e-4, values.shape) * (rng.random(values.shape) < 0.03)
    return {name: bf16(values) for name, values in weights.items()}


@pytest.mark.parametrize("scheme", [Int4Scheme(32), Int4Scheme(128, False), Fp8Scheme()], ids=str)
def test_a_run_of_quantised_versions_arrives_exact_and_in_separate_records(scheme) -> None:
    quantiser, store, live = Quantiser(scheme), MemoryStore(), {}
    publisher = Publisher(store, "run")
    for step in range(4):
        quantised = quantiser.quantise(model_of(step))
        report = publisher.publish(quantised)
        with Subscriber(store, "run", LiveTarget(live, allow_new_names=True)) as reader:
            assert reader.pull().root == report.root
    assert_same({name: as_tensor(value) for name, value in live.items()}, quantised)
    kept = {n for n in quantised if n in model_of(0) and quantised[n].dtype == "BF16"}
    assert kept == {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.norm.weight",
    }
    for suffix in scheme.scale_suffixes:
        assert NAME + suffix in quantised
    parts = quantiser.parts_of(quantised, NAME)
    assert np.abs(scheme.dequantise(parts, NAME) - values_of(model_of(3)[NAME], NAME)).max() < 0.01


@pytest.mark.parametrize("scheme", [Int4Scheme(32), Int4Scheme(128, False), Fp8Scheme()], ids=str)
def test_noise_below_half_a_step_changes_nothing(scheme) -> None:
    """With frozen scales an update that moves BF16 bits, but no code, is an empty delta."""
    quantiser = Quantiser(scheme)
    parts = quantiser.parts_of(quantiser.quantise({NAME: bf16(noise(3))}), NAME)
    exact = scheme.dequantise(parts, NAME)
    frozen = {suffix: parts[suffix] for suffix in scheme.scale_suffixes}
    moved = rounded(exact * np.float32(1 + 2**-7), "BF16")
    assert (moved != exact).mean() > 0.8
    publisher = Publisher(MemoryStore(), "run")
    publisher.publish(quantiser.quantise({NAME: bf16(exact)}))
    report = publisher.publish(quantiser.quantise({NAME: bf16(moved)}))
    assert report.num_changed == 0
    assert_same(scheme.quantise(bf16(exact), NAME, frozen), parts)


@pytest.mark.parametrize("scheme", [Int4Scheme(32), Int4Scheme(32, False)], ids=str)
def test_a_recomputed_scale_changes_its_group_and_a_frozen_one_does_not(scheme) -> None:
    first = rounded(noise(3), "BF16")
    second = first.copy()
    second[0, np.abs(first[0, :32]).argmax()] *= 1.5  # the largest of the first group
    found = {}
    for scales in ("frozen", "recomputed"):
        quantiser = Quantiser(scheme, scales=scales)
        pair = [quantiser.quantise({NAME: bf16(values)}) for values in (first, second)]
        codes = [scheme.codes(quantiser.parts_of(parts, NAME), NAME) for parts in pair]
        changed = codes[0] != codes[1]
        assert not changed[:, 32:].any() and not changed[1:].any()
        found[scales] = int(changed.sum())
    assert found["frozen"] <= 1 < found["recomputed"]


def test_weights_out_of_the_range_of_frozen_scales_are_cut_and_counted() -> None:
    for scheme in (Int4Scheme(32), Int4Scheme(32, False), Fp8Scheme()):
        quantiser = Quantiser(scheme)
        weights = {NAME: bf16(noise(3))}
        quantiser.quantise(weights)
        assert quantiser.num_saturated(weights) == 0
        grown = {NAME: bf16(noise(3) * 4)}
        assert quantiser.num_saturated(grown) > 0
        parts = quantiser.parts_of(quantiser.quantise(grown), NAME)
        assert np.isfinite(scheme.dequantise(parts, NAME)).all()


@pytest.mark.parametrize("scheme", [Int4Scheme(32, False), Fp8Scheme()], ids=str)
def test_a_trainer_that_starts_again_goes_on_with_the_scales_of_the_run(scheme) -> None:
    first = Quantiser(scheme)
    published = first.quantise(model_of(0))
    expected = first.quantise(model_of(2))
    second = Quantiser(scheme)
    assert second.adopt(published) == 2
    assert_same(second.quantise(model_of(2)), expected)
    with pytest.raises(CoverageError, match="adopt the quantised version"):
        Quantiser(scheme).adopt(model_of(0))
    with pytest.raises(ValueError, match="nothing to adopt"):
        Quantiser(scheme, scales="recomputed").adopt(published)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_strips_of_rows_give_the_bits_of_the_whole(scheme, threads: int) -> None:
    shape = (1300, 512)  # several strips, the last of another height
    first, second = bf16(noise(6, shape)), bf16(noise(7, shape))
    quantiser = Quantiser(scheme, threads=threads)
    expected = scheme.quantise(first, NAME, None)
    found = quantiser.quantise({NAME: first})
    assert_same({n.removeprefix(NAME): part for n, part in found.items()}, expected)
    frozen = {suffix: expected[suffix] for suffix in scheme.scale_suffixes}
    found = quantiser.quantise({NAME: second})
    expected = scheme.quantise(second, NAME, frozen)
    assert_same({n.removeprefix(NAME): part for n, part in found.items()}, expected)


@pytest.mark.parametrize("fmt", ["int4", "fp8"])
def test_bytes_are_those_that_the_planner_counts(fmt) -> None:
    experts = Experts(4, 64, num_shared=1, num_dense_layers=1)
    config = ModelConfig("tiny", "none", 64, 160, 2, 4, 2, 32, 320, experts=experts)
    if fmt == "int4":
        quantiser = Quantiser(Int4Scheme(32), targets=r"\.mlp\.experts\.")
    else:
        quantiser = Quantiser(Fp8Scheme())
    weights, expected = {}, 0
    for tensor in tensors_of(config):
        weights[tensor.name] = bf16(np.zeros(tensor.shape, np.float32))
        expected += tensor_bytes(tensor, fmt)
    quantised = quantiser.quantise(weights)
    shapes = sum(part.num_bytes for name, part in quantised.items() if name.endswith("_shape"))
    assert sum(part.num_bytes for part in quantised.values()) - shapes == expected
    assert shapes == (16 * 3 * 4 if fmt == "int4" else 0)  # of the routed experts
