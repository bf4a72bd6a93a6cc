"""The catalogue counts what the files of the models hold."""

from __future__ import annotations

import pytest

from gymfast.models import (
    CATALOGUE,
    Lora,
    lora_bytes,
    model,
    model_bytes,
    num_params,
    tensor_bytes,
    tensors_of,
)

# Parameters as the hub counts them in the published files.
PUBLISHED = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "GLM-4.5-Air": 110_468_824_832,
    "GLM-4.5": 358_337_791_296,
    "GLM-4.7": 358_337_791_296,
    "Kimi-K2": 1_026_408_232_448,
    "DeepSeek-V3": 684_489_845_504,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_files(name: str) -> None:
    assert num_params(model(name)) == PUBLISHED[name]


def test_every_model_has_a_source_and_is_counted() -> None:
    names = {config.name for config in CATALOGUE}
    assert names - {"Kimi-K2.6"} == set(PUBLISHED)  # its vision tower is an estimate
    assert all(config.source.startswith("https://huggingface.co/") for config in CATALOGUE)


def test_the_matrices_of_deepseek_in_fp8_are_those_of_its_files() -> None:
    """The files hold 680,571,043,840 FP8 numbers, and 41,555,600 in F32: scales and biases."""
    tensors = list(tensors_of(model("DeepSeek-V3")))
    in_fp8 = [t for t in tensors if tensor_bytes(t, "fp8") not in (2 * t.num_params, 1024)]
    assert sum(t.num_params for t in in_fp8) == 680_571_043_840
    scale_bytes = sum(tensor_bytes(t, "fp8") - t.num_params for t in in_fp8)
    bias_bytes = sum(tensor_bytes(t, "fp8") for t in tensors if t.name.endswith("_bias"))
    assert (scale_bytes + bias_bytes) // 4 == 41_555_600


@pytest.mark.parametrize(
    ("name", "fmt", "gigabytes"),
    [
        ("Qwen3-8B", "bf16", 16.381),
        ("Qwen3-30B-A3B", "bf16", 61.064),
        ("GLM-4.7", "bf16", 716.676),
        ("Kimi-K2.6", "int4", 595.136),
    ],
)
def test_bytes_of_a_format(name: str, fmt, gigabytes: float) -> None:
    assert model_bytes(model(name), fmt) / 1e9 == pytest.approx(gigabytes, abs=5e-4)


def test_without_the_layers_for_multi_token_prediction() -> None:
    assert num_params(model("GLM-4.7"), with_mtp=False) == 352_797_829_024
    assert num_params(model("DeepSeek-V3"), with_mtp=False) == 671_026_419_200


@pytest.mark.parametrize(
    ("name", "lora", "gigabytes"),
    [
        ("Qwen3-30B-A3B", Lora(), 0.978),
        ("Qwen3-30B-A3B", Lora(is_shared_outer=False), 3.375),
        ("Qwen3-30B-A3B", Lora(targets=("routed",)), 0.925),
        ("GLM-4.7", Lora(), 4.741),
        ("GLM-4.7", Lora(with_mtp=False), 4.688),
        ("GLM-4.7", Lora(is_shared_outer=False), 18.808),
        ("GLM-4.7", Lora(is_shared_outer=False, with_mtp=False), 18.599),
        ("Kimi-K2.6", Lora(targets=("attention", "routed")), 9.386),
        ("Kimi-K2.6", Lora(is_shared_outer=False, targets=("attention", "routed")), 41.013),
    ],
)
def test_bytes_of_an_adapter(name: str, lora: Lora, gigabytes: float) -> None:
    assert lora_bytes(model(name), lora) / 1e9 == pytest.approx(gigabytes, abs=5e-4)


def test_a_small_adapter_counted_by_hand() -> None:
    """Llama 3.2 1B, k and v only: two matrices of 512 x 2048 in each of 16 layers."""
    lora = Lora(rank=4, targets=("attention",), leaves_out=("q_proj", "o_proj"))
    assert lora_bytes(model("Llama-3.2-1B"), lora) == 2 * 16 * 2 * 4 * (512 + 2048)


def test_names_are_unique_and_in_any_case() -> None:
    assert model("qwen3-0.6b") is model("Qwen3-0.6B")
    names = [tensor.name for tensor in tensors_of(model("GLM-4.7"))]
    assert len(names) == len(set(names))


def test_an_unknown_model_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'GPT-5' is not in the catalogue.*Qwen3-0\.6B"):
        model("GPT-5")
    with pytest.raises(ValueError, match="rank is 0"):
        Lora(rank=0)
    with pytest.raises(ValueError, match=r"\['norm'\] cannot be adapted"):
        Lora(targets=("norm",))
