"""The part of miles's parallel state that an updater looks at."""

from __future__ import annotations

from types import SimpleNamespace

from megatron.core import mpu


def get_parallel_state():
    return SimpleNamespace(pp=SimpleNamespace(rank=mpu.get_pipeline_model_parallel_rank()))
