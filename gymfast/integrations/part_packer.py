"""Chunks of an update as parts of a checkpoint: whole, or as the frame of what changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymfast.delta import Encoder, State, as_tensor
from gymfast.delta.memory import CPU
from gymfast.delta.tensors import Tensor
from gymfast.integrations.sglang_messages import Part, PartFrame, named_tensors
from gymfast.sync.density import sampled_density
from gymfast.sync.live import DEFAULT_MAX_DENSITY

Named = Sequence[tuple[str, Any]]


class PartPacker:
    """What one rank sends, and a copy in host memory of what it sent last. Not thread-safe.

    A part is known by the name of the rank's group and its place among the chunks of an update.
    """

    def __init__(self, name: str) -> None:
        """A packer that has sent nothing."""
        self.num_frames = 0
        self._name = name
        self._states: dict[str, State] = {}
        self._keys: list[str] = []
        self._update_id, self._is_delta = "", False

    def begin(self, update_id: str, *, is_delta: bool) -> None:
        """A new pass over all chunks."""
        if not is_delta:
            self._states.clear()
        self._keys, self.num_frames = [], 0
        self._update_id, self._is_delta = update_id, is_delta

    @property
    def roots(self) -> dict[str, str]:
        """The root of each part of this pass."""
        return {key: self._states[key].root.hex() for key in self._keys}

    def pack(self, chunk: Named) -> tuple[Named, bool]:
        """The tensors to send for a chunk, one of them a record, and whether they are a frame.

        Raises TypeError for a tensor that no frame can carry.
        """
        key = f"{self._name}/{len(self._keys)}"
        self._keys.append(key)
        weights = {name: _on_host(name, value) for name, value in chunk}
        device = chunk[0][1].device
        frame = self._frame(key, weights)
        if frame is not None:
            self.num_frames += 1
            message = named_tensors(self._update_id, PartFrame(key), frame)
            return [(name, tensor.to(device)) for name, tensor in message], True
        ((name, record),) = named_tensors(self._update_id, Part(key, is_staged=self._is_delta))
        return [*chunk, (name, record.to(device))], False

    def _frame(self, key: str, weights: dict[str, Tensor]) -> bytes | None:
        """The frame of what changed in a part; None where whole tensors are the better choice."""
        state = self._states.get(key)
        if (
            state is None
            or state.slots.keys() != weights.keys()
            or sampled_density(state, weights) > DEFAULT_MAX_DENSITY
        ):
            self._states[key] = State.copy_of(weights, backend="cpu")
            return None
        encoder = Encoder(state)
        frame = b"".join(encoder.encode(weights))
        encoder.commit()
        return frame if len(frame) < sum(w.num_bytes for w in weights.values()) else None


def _on_host(name: str, value: Any) -> Tensor:
    tensor = as_tensor(value, name)
    return tensor if tensor.place == CPU else tensor.copy(CPU)
