"""What a GPU costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Price:
    """Dollars for one GPU and hour on demand, and where that was listed."""

    dollars_per_hour: float
    source: str

    @property
    def dollars_per_s(self) -> float:
        """Dollars for one GPU and second."""
        return self.dollars_per_hour / 3600


PRICES = {
    "H100": Price(3.9492, "modal.com/pricing, $0.001097 a second, May 2026"),
    "H200": Price(4.54, "modal.com/pricing, 2026, not checked again"),
    "B200": Price(6.25, "modal.com/pricing, 2026, second hand"),
}
