"""What a demo run is asked to do, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RUN = "demo"
"""Name of the run in the store."""

LEARNING_RATE = 1e-6
"""Learning rate of the published steps. Source: the default of slime, miles and SkyRL recipes."""


@dataclass(frozen=True)
class ModelShape:
    """Size of the transformer; the vocabulary is the 256 bytes."""

    num_layers: int
    width: int
    num_heads: int
    hidden: int
    vocabulary: int = 256

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""Name of the output matrix; it is tied to the embedding."""
FINAL_NORM = "model.norm.weight"


def weight_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Dimensions of all trained tensors by name, as a checkpoint of this model holds them."""
    width, hidden = shape.width, shape.hidden
    square = (width, width)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocabulary, width)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (width,)
        for part in "qkvo":
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = square
        shapes[prefix + "post_attention_layernorm.weight"] = (width,)
        shapes[prefix + "mlp.gate_proj.weight"] = (hidden, width)
        shapes[prefix + "mlp.up_proj.weight"] = (hidden, width)
        shapes[prefix + "mlp.down_proj.weight"] = (width, hidden)
    return {**shapes, FINAL_NORM: (width,)}


@dataclass(frozen=True)
class Schedule:
    """Steps, batch shapes and time limits of the trainer; `num_threads` 0 leaves it to torch."""

    warmup_steps: int
    warmup_batch: int
    warmup_length: int
    warmup_learning_rate: float
    warmup_limit_s: float
    num_prompts: int
    group_size: int
    prompt_length: int
    completion_length: int
    training_limit_s: float
    num_threads: int = 0


FULL_SHAPE = ModelShape(num_layers=8, width=512, num_heads=8, hidden=1408)
QUICK_SHAPE = ModelShape(num_layers=4, width=192, num_heads=4, hidden=512)

FULL_SCHEDULE = Schedule(
    warmup_steps=80,
    warmup_batch=4,
    warmup_length=96,
    warmup_learning_rate=7e-4,
    warmup_limit_s=24.0,
    num_prompts=3,
    group_size=4,
    prompt_length=32,
    completion_length=16,
    training_limit_s=45.0,
)
QUICK_SCHEDULE = Schedule(
    warmup_steps=20,
    warmup_batch=8,
    warmup_length=64,
    warmup_learning_rate=2e-3,
    warmup_limit_s=6.0,
    num_prompts=2,
    group_size=4,
    prompt_length=24,
    completion_length=12,
    training_limit_s=8.0,
    num_threads=1,
)


@dataclass(frozen=True)
class DemoOptions:
    """Everything the caller of the demo can choose.

    `num_versions` counts the published versions after the first full one.
    `keep` is a folder for the store and the checkpoint; None: a temporary one, removed at the end.
    """

    num_versions: int = 20
    seed: int = 0
    quick: bool = False
    keep: Path | None = None

    def __post_init__(self) -> None:
        if not 6 <= self.num_versions <= 200:
            raise ValueError(
                f"--versions is {self.num_versions}: the kill and the damaged object need 6 to 200"
            )

    @property
    def shape(self) -> ModelShape:
        """Size of the model."""
        return QUICK_SHAPE if self.quick else FULL_SHAPE

    @property
    def schedule(self) -> Schedule:
        """Steps and limits of the trainer."""
        return QUICK_SCHEDULE if self.quick else FULL_SCHEDULE

    @property
    def kill_version(self) -> int:
        """Version in whose apply one receiver is killed."""
        return 1 + self.num_versions // 3

    @property
    def damage_version(self) -> int:
        """Version whose stored object is damaged."""
        return 1 + 2 * self.num_versions // 3
