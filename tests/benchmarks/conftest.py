"""The benchmarks lie beside the tests, not in the distribution: make them importable."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if sys.path[0] != ROOT:
    sys.path.insert(0, ROOT)  # before tests/, whose folder benchmarks/ has the same name
