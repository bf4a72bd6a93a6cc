"""What the measured density would mean for models whose size is published; pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

LINK_GBPS = 10.0
"""The link of the published table, in 10^9 bits per second."""


@dataclass(frozen=True)
class PublishedFigure:
    """A model of the article behind the project: its BF16 size, and the figure it was given.

    Source: shared/article.md, tables 1 and 2 (98 % saving, 10 Gb/s).
    """

    model: str
    bf16_bytes: float
    published_bytes: float
    published_dtype: str
    published_s: float


FIGURES = (
    PublishedFigure("Qwen3-8B", 16.4e9, 16.0e9, "BF16", 0.26),
    PublishedFigure("GLM 4.7", 716.7e9, 357.0e9, "FP8", 5.73),
)

UNMEASURED = (
    "FP8 and INT4 weights change far less often than BF16 ones and are not measured here: "
    "no projection is given for them."
)


@dataclass(frozen=True)
class Projection:
    """Seconds on the wire for one version of a model; bytes of each codec scale with its size."""

    model: str
    bf16_bytes: float
    full_s: float
    saving_98_s: float
    fast_s: float
    small_s: float
    xor_zstd1_s: float | None
    published_s: float
    published_dtype: str
    published_note: str


def wire_s(size_bytes: float) -> float:
    """Seconds that so many bytes take on the link, at line rate."""
    return size_bytes * 8 / (LINK_GBPS * 1e9)


def project(
    figure: PublishedFigure, fast_ratio: float, small_ratio: float, xor_zstd1_ratio: float | None
) -> Projection:
    """The projection for one model; a ratio is bytes sent over bytes of the whole state, 0..1."""
    full_s = wire_s(figure.bf16_bytes)
    return Projection(
        model=figure.model,
        bf16_bytes=figure.bf16_bytes,
        full_s=full_s,
        saving_98_s=full_s * 0.02,
        fast_s=full_s * fast_ratio,
        small_s=full_s * small_ratio,
        xor_zstd1_s=None if xor_zstd1_ratio is None else full_s * xor_zstd1_ratio,
        published_s=figure.published_s,
        published_dtype=figure.published_dtype,
        published_note=f"98 % of {figure.published_bytes / 1e9:.0f} GB {figure.published_dtype}",
    )
