"""What differs between two windows of bytes: by the native code, by NumPy where there is none."""

from __future__ import annotations

import numpy as np

from gymfast.delta.memory import U8


def list_changes(before: U8, after: U8, unit_bytes: int) -> tuple[bytes, bytes]:
    """Numbers of the units that differ (u32, ascending) and their new values; little-endian."""
    try:
        from gymfast import _core
    except ImportError:
        units = np.dtype(f"<u{unit_bytes}")
        new = after.view(units)
        changed = np.flatnonzero(before.view(units) != new)
        return changed.astype("<u4").tobytes(), new[changed].tobytes()
    return _core.list_changes(before, after, unit_bytes)
