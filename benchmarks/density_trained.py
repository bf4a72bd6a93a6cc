"""A small model, and an adapter on it, trained by policy gradients; states one step apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from benchmarks.density import Weights, tensors
from gymfast.demo.learning import Learner
from gymfast.demo.options import ModelShape, Schedule
from gymfast.demo.text import load_text

RANK, ALPHA = 32, 32
RATES = (1e-6, 1e-5, 1e-4)
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Pairs = Iterator[tuple[str, Weights, Weights]]


def model_pairs(*, quick: bool) -> Pairs:
    """FP32 masters before and after a step at 1e-6, early and later."""
    learner = _learner(quick=quick)
    learner.start_policy_phase()
    steps = (2,) if quick else (4, 12)
    for step in range(1, max(steps) + 1):
        before = _matrices(learner.masters) if step in steps else {}
        learner.policy_step()
        if step in steps:
            yield f"trained model, step {step}", before, _matrices(learner.masters)


def adapter_pairs(*, quick: bool) -> Pairs:
    """FP32 factors of rank 32 before and after some steps, for each learning rate."""
    steps = (1, 2) if quick else (1, 2, 8, 32)
    for rate in RATES[-1:] if quick else RATES:
        learner = _AdapterLearner(_learner(quick=quick), rate)
        for step in range(1, max(steps) + 1):
            before = tensors(learner.factors) if step in steps else {}
            learner.step()
            if step in steps:
                yield f"adapter, rate {rate:g}, step {step}", before, tensors(learner.factors)


def _learner(*, quick: bool) -> Learner:
    schedule = Schedule(
        warmup_steps=4 if quick else 60,
        warmup_batch=4,
        warmup_length=64,
        warmup_learning_rate=1e-3,
        warmup_limit_s=math.inf,
        num_prompts=2,
        group_size=4,
        prompt_length=24,
        completion_length=12,
        training_limit_s=math.inf,
    )
    shape = ModelShape(2, 128, 2, 384) if quick else ModelShape(4, 512, 8, 1408)
    learner = Learner(shape, schedule, load_text(), seed=1)
    for step in range(schedule.warmup_steps):
        learner.warmup_step(step)
    return learner


def _matrices(masters: dict[str, Any]) -> Weights:
    return tensors({n: m for n, m in masters.items() if m.dim() == 2 and m.shape[1] % 128 == 0})


class _AdapterLearner:
    """Steps of AdamW on factors A (uniform, as PEFT starts them) and B (zeros) alone."""

    def __init__(self, learner: Learner, rate: float) -> None:
        torch = learner.torch
        self._learner, self._torch = learner, torch
        self._base = {name: m.detach().clone() for name, m in learner.masters.items()}
        self.factors: dict[str, Any] = {}
        for name, weight in self._base.items():
            if name.split(".")[-2] in _MODULES:
                a = torch.empty(RANK, weight.shape[1])
                torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5))
                module = f"base_model.model.{name.removesuffix('.weight')}"
                self.factors[f"{module}.lora_A.weight"] = a.requires_grad_()
                b = torch.zeros(weight.shape[0], RANK)
                self.factors[f"{module}.lora_B.weight"] = b.requires_grad_()
        if not self.factors:
            raise ValueError(f"none of {sorted(self._base)[:3]} is a matrix of {_MODULES}")
        self._optimizer = torch.optim.AdamW(
            self.factors.values(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        learner._update = self._update  # type: ignore[method-assign]

    def step(self) -> None:
        learner = self._learner
        learner.masters = self._merged()
        learner.publishable()
        learner.policy_step()

    def _merged(self) -> dict[str, Any]:
        merged = {}
        for name, weight in self._base.items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            a = self.factors.get(f"{module}.lora_A.weight")
            b = self.factors.get(f"{module}.lora_B.weight")
            merged[name] = weight if a is None else weight + ALPHA / RANK * b @ a
        return merged

    def _update(self, loss: Any) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = self._torch.nn.utils.clip_grad_norm_(self.factors.values(), 1.0)
        self._optimizer.step()
        return float(norm)
