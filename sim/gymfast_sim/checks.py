"""Numbers that settings may have; a bad one is refused with its name and what is expected."""

from __future__ import annotations

import math


def check_positive(name: str, number: float) -> None:
    """Raises ValueError unless the number is finite and above 0."""
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} is {number}, expected a number above 0")


def check_not_negative(name: str, number: float) -> None:
    """Raises ValueError unless the number is finite and 0 or more."""
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} is {number}, expected 0 or more")


def check_count(name: str, number: int, most: int = 2**31) -> None:
    """Raises ValueError unless the number is 1 to most."""
    if not 1 <= number <= most:
        raise ValueError(f"{name} is {number}, expected 1 to {most}")


def check_range(name: str, number: float, low: float, high: float = 1e9) -> None:
    """Raises ValueError unless the number is low to high."""
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}, expected {low:g} to {high:g}")
