"""What an adapter does to the live model of an engine, a torch module, but for loading it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SAMPLE_ELEMENTS = 16

Sample = dict[str, tuple[int, bytes]]


def sample_of(model: Any) -> Sample:
    """Where each parameter lies and how it begins: a reload or sleep behind our back changes it."""
    import torch

    sample = {}
    for name, parameter in model.named_parameters():
        if parameter.numel():
            first_row = parameter.detach()[(0,) * max(parameter.dim() - 1, 0)]
            begin = first_row.reshape(-1)[:_SAMPLE_ELEMENTS].contiguous().view(torch.uint8)
            sample[name] = (parameter.data_ptr(), begin.cpu().numpy().tobytes())
    return sample


def moved(before: Sample, after: Sample) -> list[str]:
    """Names of parameters that do not lie where they lay: a CUDA graph reads the old place."""
    places = {name: place for name, (place, _) in after.items()}
    return [name for name, (place, _) in before.items() if places.get(name) != place]


def guard(model: Any, refuse: Callable[[], None]) -> None:
    """Calls `refuse`, which may raise, before each run of the model and each use of its result.

    A CUDA graph of the whole model bypasses the hook of the module, not its `compute_logits`.
    """
    model.register_forward_pre_hook(lambda *_: refuse())
    compute_logits = getattr(model, "compute_logits", None)
    if compute_logits is None:
        return

    def guarded(*arguments: Any, **options: Any) -> Any:
        refuse()
        return compute_logits(*arguments, **options)

    model.compute_logits = guarded
