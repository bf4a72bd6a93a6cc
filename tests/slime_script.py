"""Steps of scripted runs, and what they have to come to."""

from __future__ import annotations

from typing import Any

import torch
from slime_engine import apply_version, read_tensors
from slime_run import Script, weights_at


def truth(step: int) -> dict[str, bytes]:
    return {
        name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in weights_at(step).items()
    }


def decoded(script: Script) -> list[dict[str, bytes]]:
    """The state after each version, by the reader of the tests."""
    states = [read_tensors(script.base)]
    for number, path in enumerate(sorted(script.versions.glob("weight_v*")), 1):
        states.append(states[-1] | apply_version(path, number, states[-1]))
    return states


def sync_of(step: int) -> list[tuple[Any, ...]]:
    return [("train", step), ("sync",)]


START = [("connect", "a", "b"), ("sync",)]
