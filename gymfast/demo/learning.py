"""Warm-up on text, then policy-gradient steps: BF16 rollouts, AdamW on FP32 masters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gymfast.demo.options import EMBEDDING, HEAD, LEARNING_RATE, ModelShape, Schedule
from gymfast.demo.text import known_words, split_words
from gymfast.demo.transformer import (
    KeyValueCache,
    Parameters,
    TorchTensor,
    forward,
    init_parameters,
    load_torch,
)


def has_fast_bf16() -> bool:
    """True if the CPU multiplies BF16 in hardware; elsewhere torch emulates that, slowly."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


@dataclass(frozen=True)
class StepReport:
    """What one policy step did: mean reward 0..1, gradient norm before clipping."""

    reward: float
    gradient_norm: float


class Learner:
    """The model in training: FP32 masters, optimiser, BF16 copy that is published."""

    def __init__(
        self, shape: ModelShape, schedule: Schedule, text: NDArray[np.uint8], seed: int
    ) -> None:
        self.torch = load_torch()
        if schedule.num_threads:
            self.torch.set_num_threads(schedule.num_threads)
        self.torch.manual_seed(seed)
        self.shape = shape
        self.schedule = schedule
        self.masters = init_parameters(shape, seed)
        self.text = self.torch.from_numpy(text.copy())
        self.words = known_words(text)
        self.generator = self.torch.Generator().manual_seed(seed + 1)
        self.fast_bf16 = has_fast_bf16()
        self.weights = self._bf16_copy()
        self.optimizer = self._optimizer(schedule.warmup_learning_rate, (0.9, 0.95))

    @property
    def num_parameters(self) -> int:
        """Number of trained values; the tied head is counted once."""
        return sum(master.numel() for master in self.masters.values())

    def warmup_step(self, step: int) -> float:
        """Loss in nats per byte of one step of ordinary training."""
        functional = self.torch.nn.functional
        tokens = self._windows(self.schedule.warmup_batch, self.schedule.warmup_length + 1)
        self._set_rate(_warmup_rate(self.schedule, step))
        with self._autocast():
            logits = forward(self.masters, self.shape, tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        self._update(loss)
        return float(loss.detach())

    def start_policy_phase(self) -> None:
        """Switch to a fresh AdamW at the learning rate of RL and publishable weights."""
        self.optimizer = self._optimizer(LEARNING_RATE, (0.9, 0.98))
        self.publishable()

    def publishable(self) -> Parameters:
        """The BF16 weights under their published names, refreshed in place; the head is tied."""
        with self.torch.no_grad():
            for name, master in self.masters.items():
                self.weights[name].copy_(master)
        return {**self.weights, HEAD: self.weights[EMBEDDING]}

    def policy_step(self) -> StepReport:
        """Sample groups of completions, score them, and take one policy-gradient step (GRPO)."""
        plan = self.schedule
        prompts = self._windows(plan.num_prompts, plan.prompt_length)
        prompts = prompts.repeat_interleave(plan.group_size, 0)
        tokens = self._sample(prompts, plan.completion_length)
        rewards = self._rewards(tokens[:, plan.prompt_length :])
        groups = rewards.view(plan.num_prompts, plan.group_size)
        advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        with self._autocast():
            logits = forward(self.masters, self.shape, tokens[:, :-1])
        logp = self.torch.log_softmax(logits[:, plan.prompt_length - 1 :].float(), -1)
        taken = logp.gather(-1, tokens[:, plan.prompt_length :, None]).squeeze(-1)
        norm = self._update(-(advantage.view(-1, 1) * taken).mean())
        return StepReport(reward=float(rewards.mean()), gradient_norm=norm)

    def _sample(self, prompts: TorchTensor, length: int) -> TorchTensor:
        """Prompts and `length` sampled bytes each, from the published copy, as an engine would."""
        weights = self.weights if self.fast_bf16 else self.masters
        cache, tokens, step = KeyValueCache(), prompts, prompts
        with self.torch.no_grad():
            for _ in range(length):
                logits = forward(weights, self.shape, step, cache)[:, -1].float()
                probabilities = self.torch.softmax(logits, -1)
                step = self.torch.multinomial(probabilities, 1, generator=self.generator)
                tokens = self.torch.cat((tokens, step), 1)
        return tokens

    def _rewards(self, completions: TorchTensor) -> TorchTensor:
        """Share of each completion's bytes that lie in words of the text."""
        shares = []
        for row in completions.tolist():
            words = [word for word in split_words(bytes(row)) if word in self.words]
            shares.append(sum(map(len, words)) / len(row))
        return self.torch.tensor(shares)

    def _update(self, loss: TorchTensor) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = self.torch.nn.utils.clip_grad_norm_(self.masters.values(), 1.0)
        self.optimizer.step()
        return float(norm)

    def _windows(self, count: int, length: int) -> TorchTensor:
        """`[count, length]` random windows of the text."""
        starts = self.torch.randint(
            0, self.text.numel() - length, (count, 1), generator=self.generator
        )
        return self.text[starts + self.torch.arange(length)].long()

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.fast_bf16:
            return nullcontext()
        context: AbstractContextManager[Any] = self.torch.autocast("cpu", self.torch.bfloat16)
        return context

    def _bf16_copy(self) -> Parameters:
        return {
            name: master.detach().to(self.torch.bfloat16) for name, master in self.masters.items()
        }

    def _optimizer(self, rate: float, betas: tuple[float, float]) -> Any:
        return self.torch.optim.AdamW(
            self.masters.values(), lr=rate, betas=betas, weight_decay=0.01, fused=True
        )

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def _warmup_rate(schedule: Schedule, step: int) -> float:
    """Linear rise over the first tenth, then linear fall to a tenth."""
    rise = max(1, schedule.warmup_steps // 10)
    progress = step / schedule.warmup_steps
    return schedule.warmup_learning_rate * min((step + 1) / rise, 1.0 - 0.9 * progress)
