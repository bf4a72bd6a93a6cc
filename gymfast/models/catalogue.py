"""Published models by name: the configurations that tables and plans are computed from."""

from __future__ import annotations

from dataclasses import replace

from gymfast.models.config import Experts, LatentAttention, ModelConfig

_HUB = "https://huggingface.co/{}/blob/main/config.json"


def model(name: str) -> ModelConfig:
    """The model of that name, whatever its case. Raises ValueError with the names that exist."""
    found = _BY_NAME.get(name.lower())
    if found is None:
        names = ", ".join(config.name for config in CATALOGUE)
        raise ValueError(f"model {name!r} is not in the catalogue, expected one of {names}")
    return found


def _qwen3(
    name: str,
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    size: int,
    *,
    is_tied: bool = False,
    experts: Experts | None = None,
) -> ModelConfig:
    return ModelConfig(
        name=name,
        source=_HUB.format(f"Qwen/{name}"),
        vocab_size=151936,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=128,
        intermediate_size=size,
        is_tied=is_tied,
        has_qk_norm=True,
        experts=experts,
    )


def _llama3(
    name: str, hidden: int, layers: int, heads: int, size: int, *, is_tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        name=name,
        source=_HUB.format(f"meta-llama/{name}"),
        vocab_size=128256,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_size=hidden // heads,
        intermediate_size=size,
        is_tied=is_tied,
    )


_MLA = LatentAttention(q_rank=1536, kv_rank=512, nope_size=128, rope_size=64, value_size=128)

_GLM_4_5 = ModelConfig(
    name="GLM-4.5",
    source=_HUB.format("zai-org/GLM-4.5"),
    vocab_size=151552,
    hidden_size=5120,
    num_layers=92,
    num_heads=96,
    num_kv_heads=8,
    head_size=128,
    intermediate_size=12288,
    has_qkv_bias=True,
    has_qk_norm=True,
    experts=Experts(160, 1536, num_shared=1, num_dense_layers=3, has_router_bias=True),
    num_mtp_layers=1,
)

_GLM_4_5_AIR = ModelConfig(
    name="GLM-4.5-Air",
    source=_HUB.format("zai-org/GLM-4.5-Air"),
    vocab_size=151552,
    hidden_size=4096,
    num_layers=46,
    num_heads=96,
    num_kv_heads=8,
    head_size=128,
    intermediate_size=10944,
    has_qkv_bias=True,
    experts=Experts(128, 1408, num_shared=1, num_dense_layers=1, has_router_bias=True),
    num_mtp_layers=1,
)

_DEEPSEEK_V3 = ModelConfig(
    name="DeepSeek-V3",
    source=_HUB.format("deepseek-ai/DeepSeek-V3"),
    vocab_size=129280,
    hidden_size=7168,
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    head_size=128,
    intermediate_size=18432,
    latent=_MLA,
    experts=Experts(256, 2048, num_shared=1, num_dense_layers=3, has_router_bias=True),
    num_mtp_layers=1,
)

_KIMI_K2 = ModelConfig(
    name="Kimi-K2",
    source=_HUB.format("moonshotai/Kimi-K2-Instruct"),
    vocab_size=163840,
    hidden_size=7168,
    num_layers=61,
    num_heads=64,
    num_kv_heads=64,
    head_size=128,
    intermediate_size=18432,
    latent=_MLA,
    experts=Experts(384, 2048, num_shared=1, num_dense_layers=1, has_router_bias=True),
)

# MoonViT: 27 layers of 1152 with an MLP of 4304, and a projector from 4 patches to the text model.
_MOON_VIT = 27 * (4 * 1152**2 + 2 * 1152 * 4304) + (4 * 1152) ** 2 + 4 * 1152 * 7168

CATALOGUE = (
    _qwen3("Qwen3-0.6B", 1024, 28, (16, 8), 3072, is_tied=True),
    _qwen3("Qwen3-1.7B", 2048, 28, (16, 8), 6144, is_tied=True),
    _qwen3("Qwen3-4B", 2560, 36, (32, 8), 9728, is_tied=True),
    _qwen3("Qwen3-8B", 4096, 36, (32, 8), 12288),
    _qwen3("Qwen3-14B", 5120, 40, (40, 8), 17408),
    _qwen3("Qwen3-32B", 5120, 64, (64, 8), 25600),
    _qwen3("Qwen3-30B-A3B", 2048, 48, (32, 4), 6144, experts=Experts(128, 768)),
    _qwen3("Qwen3-235B-A22B", 4096, 94, (64, 4), 12288, experts=Experts(128, 1536)),
    _GLM_4_5_AIR,
    _GLM_4_5,
    replace(_GLM_4_5, name="GLM-4.7", source=_HUB.format("zai-org/GLM-4.7")),
    _DEEPSEEK_V3,
    _KIMI_K2,
    replace(
        _KIMI_K2,
        name="Kimi-K2.6",
        source=_HUB.format("moonshotai/Kimi-K2.6"),
        num_vision_params=_MOON_VIT,
    ),
    _llama3("Llama-3.2-1B", 2048, 16, 32, 8192, is_tied=True),
    _llama3("Llama-3.1-8B", 4096, 32, 32, 14336),
    _llama3("Llama-3.1-70B", 8192, 80, 64, 28672),
    _llama3("Llama-3.1-405B", 16384, 126, 128, 53248),
)

_BY_NAME = {config.name.lower(): config for config in CATALOGUE}
