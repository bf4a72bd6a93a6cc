"""Tensors of an update as one broadcast, in the layout that SGLang reads in place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

FLATTENED = "flattened_bucket"
"""SGLang's load_format of such a broadcast."""


@dataclass(frozen=True)
class Bucket:
    """What an engine is told about some tensors, and the buffers that are broadcast for them."""

    names: list[str]
    dtypes: list[Any]  # torch.dtype
    shapes: list[Any]  # torch.Size
    buffers: list[Any]  # tensors
    load_format: str | None
    ready: Any  # event of the stream that fills the buffers; None on the CPU

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def on_its_stream(self) -> AbstractContextManager[Any]:
        """A context in which this thread's stream comes after the one that fills the buffers."""
        import torch

        if self.ready is None:
            return nullcontext()
        device = self.buffers[0].device
        module = torch.get_device_module(device)
        module.current_stream(device).wait_event(self.ready)
        context: AbstractContextManager[Any] = module.device(device)
        return context


def flat_bucket(named: Sequence[tuple[str, Any]]) -> Bucket:
    """One buffer of bytes with all tensors, those with the widest elements first.

    SGLang packs without padding and views the bytes as they lie: in this order every tensor begins
    at a multiple of its element size, whatever sizes are among them. A tensor alone is not copied.
    """
    import torch

    ordered = sorted(named, key=lambda item: -item[1].element_size())
    parts = [tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in ordered]
    return _bucket(ordered, [parts[0] if len(parts) == 1 else torch.cat(parts)], FLATTENED)


def single_tensors(named: Sequence[tuple[str, Any]]) -> Bucket:
    """A buffer for each tensor, for engines that do not read flattened buckets."""
    return _bucket(named, [tensor.detach().contiguous() for _, tensor in named], None)


def _bucket(
    named: Sequence[tuple[str, Any]], buffers: list[Any], load_format: str | None
) -> Bucket:
    import torch

    device, ready = buffers[0].device, None
    if device.type != "cpu":
        module = torch.get_device_module(device)
        ready = module.Event()
        ready.record(module.current_stream(device))
    return Bucket(
        names=[name for name, _ in named],
        dtypes=[tensor.dtype for _, tensor in named],
        shapes=[tensor.shape for _, tensor in named],
        buffers=buffers,
        load_format=load_format,
        ready=ready,
    )
