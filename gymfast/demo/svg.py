"""Just enough SVG for the report: scales, axes, lines, bars, marks; CSS gives the colours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Scale:
    """Maps values low..high to pixels start..end, evenly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        low, high = self._warp(self.low), self._warp(self.high)
        share = (self._warp(value) - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, num_ticks: int = 5) -> list[float]:
        """Round values inside the range; 1, 2 and 5 times powers of ten on a logarithmic scale."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)))
            values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            return [value for value in values if self.low <= value <= self.high]
        step = nice_step((self.high - self.low) / num_ticks)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _warp(self, value: float) -> float:
        return math.log10(value) if self.is_log else value


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)


class Drawing:
    """SVG elements in drawing order; `text` and `title` are escaped."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width = width
        self.height = height
        self._label = label
        self._parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'
        )

    def polyline(self, points: Iterable[tuple[float, float]], css: str) -> None:
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="line {css}"/>')

    def rect(
        self, x: float, y: float, size: tuple[float, float], css: str, title: str = ""
    ) -> None:
        """A rectangle of size (width, height)."""
        width, height = size
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" '
            f'height="{max(height, 0.5):.1f}" class="{css}">{_title(title)}</rect>'
        )

    def circle(self, x: float, y: float, radius: float, css: str, title: str = "") -> None:
        """A disc."""
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{css}">'
            f"{_title(title)}</circle>"
        )

    def path(self, data: str, css: str, title: str = "") -> None:
        """A path of SVG path data."""
        self._parts.append(f'<path d="{data}" class="{css}">{_title(title)}</path>')

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        """A line of text; `anchor` is start, middle or end."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">'
            f"{escape(text)}</text>"
        )

    def render(self) -> str:
        """The element, to be placed in a page."""
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'aria-label="{escape(self._label, quote=True)}">' + "".join(self._parts) + "</svg>"
        )


def horizontal_grid(
    drawing: Drawing, scale: Scale, ticks: Sequence[tuple[float, str]], left: float, right: float
) -> None:
    """Grid lines with labels at the left, for a vertical scale."""
    for value, label in ticks:
        y = scale(value)
        drawing.line(left, y, right, y, "grid")
        drawing.text(left - 8, y + 4, label, "tick", "end")


def vertical_ticks(
    drawing: Drawing, scale: Scale, ticks: Sequence[tuple[float, str]], y: float
) -> None:
    """Labels below a horizontal scale."""
    for value, label in ticks:
        drawing.text(scale(value), y + 18, label, "tick", "middle")


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions moved apart so that neighbours keep `gap`, within low..high, order kept."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    placed = [0.0] * len(positions)
    last = low - gap
    for i in order:
        last = placed[i] = max(positions[i], last + gap)
    ceiling = high
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
