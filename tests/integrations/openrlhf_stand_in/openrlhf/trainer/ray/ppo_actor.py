"""The class that the adapter replaces, with the methods and parameters of OpenRLHF 0.11.2."""

from __future__ import annotations

from abc import ABC

import ray
import torch


class ActorPPOTrainer(ABC):  # noqa: B024 - as there
    def __init__(self, strategy, actor, *others, vllm_engines=None, **kwargs):
        self.strategy, self.actor, self.vllm_engines = strategy, actor, vllm_engines
        if self.vllm_engines is not None and torch.distributed.get_rank() == 0:
            self._init_vllm_sync_group("nccl")
        torch.distributed.barrier()

    def _init_vllm_sync_group(self, backend: str):
        raise NotImplementedError

    def broadcast_to_vllm(self):
        raise NotImplementedError


@ray.remote(num_gpus=1)
class PolicyModelActor:
    def init_model_from_pretrained(self, strategy, pretrain, max_steps=None, vllm_engines=None):
        self.trainer = ActorPPOTrainer(strategy, pretrain(), vllm_engines=vllm_engines)

    def broadcast_to_vllm(self):
        self.trainer.broadcast_to_vllm()
