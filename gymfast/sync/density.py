"""How much of some weights differs from a state, by a sample."""

from __future__ import annotations

import numpy as np

from gymfast.delta import State, as_tensor
from gymfast.delta.memory import CPU
from gymfast.delta.tensors import Weights

_PIECES = 256
_PIECE_UNITS = 4096


def sampled_density(state: State, weights: Weights) -> float:
    """The ratio of units that differ, in pieces spread over all tensors in CPU memory; 0 to 1.

    Tensors elsewhere, and names that only one side has, are left out.
    """
    pairs = []
    for name, slot in state.slots.items():
        if name in weights and slot.tensor.place == CPU:
            tensor = as_tensor(weights[name], name)
            if tensor.place == CPU and tensor.num_bytes == slot.tensor.num_bytes:
                pairs.append((slot.tensor.data, tensor.data, slot.geometry.unit_bytes))
    total = sum(len(old) for old, _, _ in pairs)
    num_units = num_changed = 0
    for old, new, unit_bytes in pairs:
        count = -(-_PIECES * len(old) // total) if total else 0
        size = _PIECE_UNITS * unit_bytes
        for i in range(count):
            begin = (len(old) * i // count) // unit_bytes * unit_bytes
            one, other = old[begin : begin + size], new[begin : begin + size]
            num_units += len(one) // unit_bytes
            # As one number each: compared at once, wherever the bytes lie.
            unit = np.dtype(f"u{unit_bytes}")
            num_changed += int(np.count_nonzero(one.view(unit) != other.view(unit)))
    return num_changed / num_units if num_units else 0.0
