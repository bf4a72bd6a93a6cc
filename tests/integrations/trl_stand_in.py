"""What the adapter uses of TRL, with the same signatures and order of calls as TRL 1.16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

Step = Callable[[torch.nn.Module, int], None]


class WeightTransferProtocol(Protocol):
    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class AsyncGRPOTrainer:
    def __init__(self, model: torch.nn.Module, transfer: Any, step: Step, num_steps: int) -> None:
        self.model, self.weight_transfer, self.on_step = model, transfer, step
        self.num_steps, self.model_version = num_steps, 0
        self.rollout_worker = SimpleNamespace()

    def train(self) -> None:
        try:
            self.weight_transfer.init_weight_transfer()
            self._sync_weight()
            for count in range(1, self.num_steps + 1):
                with torch.no_grad():
                    self.on_step(self.model, count)
                self._sync_weight()
        finally:
            self.weight_transfer.destroy()

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def _sync_weight(self) -> None:
        self.weight_transfer.pause()
        self.weight_transfer.send_weights(self._streaming_iter())
        self.weight_transfer.resume()
        self.model_version += 1
        self.rollout_worker.update_model_version(self.model_version)


class VLLMClient:
    """That of trl.generation, which reaches the server for everything but weights."""

    def __init__(self, base_url=None, host="0.0.0.0", server_port=8000, group_port=51216) -> None:
        self.base_url = base_url or f"http://{host}:{server_port}"
        self.communicator = None

    def init_communicator(self, device=0): ...

    def update_named_param(self, name, weights): ...

    def update_named_params(self, metadata, named_params): ...

    def reset_prefix_cache(self) -> None: ...

    def close_communicator(self): ...


def make_model(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16, bias=i > 0) for i in range(3)]
    return torch.nn.Sequential(torch.nn.Embedding(32, 16), *layers).to(dtype)


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def async_grpo(
    model: torch.nn.Module,
    transfer: Any,
    step: Step,
    num_steps: int,
    observe: Callable[[int], None],
) -> AsyncGRPOTrainer:
    trainer = AsyncGRPOTrainer(model, transfer, step, num_steps)
    trainer.rollout_worker.update_model_version = observe
    return trainer


def generation(model: torch.nn.Module, url: str) -> Any:
    """VLLMGeneration in server mode, whose module is this one."""
    client = VLLMClient(base_url=url)
    client.init_communicator(device=torch.device("cpu"))

    def sync_weights() -> None:
        metadata = [(n, str(p.dtype), list(p.shape)) for n, p in model.named_parameters()]
        client.update_named_params(metadata, ((n, p.data) for n, p in model.named_parameters()))
        client.reset_prefix_cache()

    return SimpleNamespace(vllm_client=client, sync_weights=sync_weights)
