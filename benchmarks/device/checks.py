"""What was compared with the CPU, how much of it, and every difference."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MODES = ("unchanged", "fast", "balanced", "small", "dense", "raw")
_MAX_SHOWN = 20
_MAX_PROBLEMS = 100  # more of them say nothing new and cost time
_PIECE = 1 << 20  # bytes: the result of a comparison stays in the cache


@dataclass
class Tally:
    """Counts of a phase and the sentences of what was wrong; the first few of them."""

    num_runs: int = 0
    num_elements: int = 0
    num_damaged: int = 0
    num_other_numbers: int = 0  # refused by both, for another rule of two that are broken
    num_problems: int = 0
    blocks_by_mode: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        self.num_problems += 1
        if len(self.problems) < _MAX_SHOWN:
            self.problems.append(text)
            print(f"DIFFERENT: {text}", flush=True)

    def equal(self, what: str, got: NDArray[np.generic], expected: NDArray[np.generic]) -> None:
        """Compares bytes; `what` says of which case and which part."""
        got, expected = (part.reshape(-1).view(np.uint8) for part in (got, expected))
        if got.size != expected.size:
            self.problem(f"{what}: {got.size} bytes, expected {expected.size}")
            return
        for start in range(0, got.size, _PIECE):
            piece = slice(start, start + _PIECE)
            if not np.array_equal(got[piece], expected[piece]):
                at = start + int(np.flatnonzero(got[piece] != expected[piece])[0])
                found = f"{got[at]:#04x}, expected {expected[at]:#04x}"
                self.problem(f"{what}: byte {at} of {got.size} is {found}")
                return

    def count_modes(self, body: bytes, num_blocks: int) -> None:
        """Adds the modes of a section's block table (docs/wire-format.md section 3.3)."""
        at = 0
        for _ in range(num_blocks):
            mode = body[at] if body else 0
            self.blocks_by_mode[MODES[mode]] += 1
            at += 1
            if mode:
                while body[at] & 0x80:  # payload_bytes, a varint
                    at += 1
                at += 1 + 4

    @property
    def is_hopeless(self) -> bool:
        return self.num_problems >= _MAX_PROBLEMS

    def missing_modes(self) -> list[str]:
        return [mode for mode in MODES if not self.blocks_by_mode[mode]]
