"""Chains that slime's own updater wrote (../shared/data/hf-delta-golden), and small own ones."""

from __future__ import annotations

from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[2] / "shared" / "data" / "hf-delta-golden"
CHAINS = ("xor-xxh3-128", "xor-adler32", "overwrite-blake3")
NUM_VERSIONS = 5


def golden_chain(name: str) -> Path:
    """The folder of a chain: `base`, `versions`, `expected`; skips where there is none."""
    folder = GOLDEN / name
    if not folder.is_dir():
        pytest.skip("needs ../shared/data/hf-delta-golden")
    return folder


def version_of(chain: Path, number: int) -> Path:
    return chain / "versions" / f"weight_v{number:06d}"


def expected_of(chain: Path, number: int) -> Path:
    return chain / "expected" / f"v{number:06d}.safetensors"
