"""The actor that the adapter replaces, with the methods and parameters of OpenRLHF 0.11.2."""

from __future__ import annotations

import ray
import vllm


@ray.remote
class RolloutRayActor:
    async def __init__(self, *args, bundle_indices=None, agent_func_path=None, **kwargs):
        kwargs.pop("num_gpus")
        self.llm = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(*args, **kwargs))

    async def update_weight(self, name, dtype, shape, empty_cache=False):
        raise NotImplementedError

    async def reset_prefix_cache(self):
        await self.llm.reset_prefix_cache()
