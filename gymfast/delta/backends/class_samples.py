"""Class parameters from the samples that a GPU kernel took of a base tensor."""

from __future__ import annotations

import numpy as np

from gymfast.delta.memory import U8


def class_params_of(samples: U8) -> tuple[int, int]:
    """class_shift and class_base from up to 1,024 exponent fields, in any order.

    Source: docs/wire-format.md section 10.
    """
    if not samples.size:
        return 0, 0
    fields = np.sort(samples)
    top = int(fields[samples.size - 1 - samples.size // 512])
    low = int(fields[samples.size // 64])
    class_shift = next(s for s in range(8) if (top >> s) - (low >> s) <= 12)
    return class_shift, max(0, (top >> class_shift) - 15)
