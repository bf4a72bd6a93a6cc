"""Real trainers of TRL around a tiny Qwen2 on the CPU; what is trained follows a script."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

Step = Callable[[torch.nn.Module, int], None]


class Worker:
    """Stands for TRL's rollout worker; `observe` runs after each sync, with TRL's version."""

    def __init__(self, observe: Callable[[int], None]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.observe = observe

    def start(self) -> None:
        self._fill(1)

    def update_model_version(self, version: int) -> None:
        self.observe(version)
        self._fill(version)

    def stop(self) -> None:
        return

    def check_health(self, stale_after_s: float) -> None:
        return

    def _fill(self, version: int) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        for advantage in (1.0, -1.0):
            sample = RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.array([1, 2, 3, 4]),
                completion_mask=np.array([0, 0, 1, 1]),
                old_log_probs=np.array([0.0, 0.0, -0.5, -0.5], np.float32),
                advantage=advantage,
                model_version=version,
                group_id=version,
                metrics={"reward": 0.0},
            )
            self.rollout_buffer.put(sample)


class ByScript(torch.optim.Optimizer):
    """An optimizer whose steps are those of a script."""

    def __init__(self, model: torch.nn.Module, step: Step) -> None:
        super().__init__(model.parameters(), {"lr": 1.0})
        self.model, self.on_step, self.count = model, step, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.on_step(self.model, self.count)


def make_model(folder: Path, dtype: torch.dtype) -> Path:
    """A folder with a tiny random Qwen2 and a tokenizer of words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).to(dtype).save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 32)}
    tokens = Tokenizer(WordLevel(words, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _load_eager(path: str, **options: Any) -> Any:
    from trl.trainer.utils import create_model_from_path

    kernels = {"attn_implementation": "eager"}  # those of TRL need a GPU
    return create_model_from_path(path, **options | kernels)


def async_grpo(
    folder: Path, transfer: Any, step: Step, num_steps: int, observe: Callable[[int], None]
) -> Any:
    """An AsyncGRPOTrainer that syncs at the start and after each step."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

    class Trainer(AsyncGRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return sum(p.sum() * 0.0 for p in model.parameters())  # attention needs a GPU

        def create_optimizer(self, *args: Any) -> Any:
            self.optimizer = ByScript(self.model, step)
            return self.optimizer

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1.0  # asks for the name of a GPU
    async_grpo_trainer.create_model_from_path = _load_eager
    args = AsyncGRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=num_steps,
        per_device_train_batch_size=2,
        num_generations=2,
        token_budget=0,
        weight_sync_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    )
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": "w2 w3"}]}] * 4)
    return Trainer(
        model=str(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=prompts,
        rollout_worker=Worker(observe),
        weight_transfer=transfer,
    )


def generation(folder: Path, url: str) -> Any:
    """A VLLMGeneration in server mode, as GRPO and RLOO make it, around the same model."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.generation import vllm_client, vllm_generation

    for module in (vllm_client, vllm_generation):
        module.is_vllm_available = lambda *_, **__: True  # it is on the server, here not needed
    return vllm_generation.VLLMGeneration(
        model=AutoModelForCausalLM.from_pretrained(folder),
        accelerator=Accelerator(cpu=True),
        processing_class=AutoTokenizer.from_pretrained(folder),
        mode="server",
        server_base_url=url,
    )
