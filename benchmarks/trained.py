"""Weights trained on the spot: the demo's transformer, at the size asked for, two steps apart."""

from __future__ import annotations

import gc
import math
import sys

import numpy as np

from benchmarks.data import Pair, Tensors, arrange
from gymfast.demo.learning import Learner
from gymfast.demo.options import ModelShape, Schedule
from gymfast.demo.text import load_text

WARMUP_STEPS = 12
POLICY_STEPS = 4  # the last one is measured; Adam's first steps are larger than the usual ones


def trained(size_bytes: int, seed: int) -> Pair:
    """States before and after one policy step at a real learning rate, of at least size_bytes.

    Needs about 12 times size_bytes of memory while it trains, and minutes at 1 GiB.
    """
    schedule = Schedule(
        warmup_steps=WARMUP_STEPS,
        warmup_batch=2,
        warmup_length=48,
        warmup_learning_rate=3e-4,
        warmup_limit_s=math.inf,
        num_prompts=2,
        group_size=4,
        prompt_length=24,
        completion_length=8,
        training_limit_s=math.inf,
    )
    learner = Learner(shape_for(size_bytes), schedule, load_text(), seed)
    for step in range(WARMUP_STEPS):
        loss = learner.warmup_step(step)
        print(f"training: step {step + 1}, loss {loss:.2f}", file=sys.stderr, flush=True)
    learner.start_policy_phase()
    for _ in range(POLICY_STEPS - 1):
        learner.policy_step()
    old = _bits(learner)
    learner.policy_step()
    pair = arrange("trained", old, _bits(learner), speed=True)
    del learner
    gc.collect()
    return pair


def shape_for(size_bytes: int) -> ModelShape:
    """The demo's proportions, with at least eight layers, just above the size in BF16."""
    width = 64
    while width < 2048 and _layer_bytes(2 * width) * 8 <= size_bytes:
        width *= 2
    num_layers = math.ceil(size_bytes / _layer_bytes(width))
    return ModelShape(num_layers, width, max(1, width // 64), 11 * width // 4)


def _layer_bytes(width: int) -> int:
    return 2 * (4 * width * width + 3 * width * (11 * width // 4))


def _bits(learner: Learner) -> Tensors:
    """Copies of the BF16 weights; tied ones once."""
    learner.publishable()
    view = learner.torch.int16
    return {
        name: weight.view(view).numpy().view(np.uint16).copy()
        for name, weight in learner.weights.items()
    }
