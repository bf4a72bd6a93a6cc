"""A plot of measured times and fitted laws, as SVG text of its own: no font, script or network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from gymfast_sim.fit import Fit, Times, survival

_WIDTH, _HEIGHT, _LEFT, _TOP = 360, 260, 56, 34
_GAP, _BOTTOM = 72, 74
_COLOURS = ("#0b6e99", "#c4550d", "#3b7d23", "#8a3fa0")
_NUM_POINTS = 160

_Point = tuple[float, float]


def plot(times: Times, fits: Sequence[Fit], title: str) -> str:
    """Two panels: the probability of at most a time, and of more than it on a logarithmic scale."""
    x, above = survival(times)
    shown = fits[: len(_COLOURS)]
    low, high = math.log10(float(x[0])) - 0.03, math.log10(float(x[-1])) + 0.1
    grid = np.logspace(low, high, _NUM_POINTS)
    floor = math.log10(0.3 / max(times.seen.size, 1))
    body: list[str] = []
    for panel in (0, 1):
        left = _LEFT + panel * (_WIDTH + _GAP)

        def at(seconds: float, over: float, panel: int = panel, left: int = left) -> _Point:
            part = 1 - over if panel == 0 else 1 - max(math.log10(max(over, 1e-300)), floor) / floor
            across = (math.log10(seconds) - low) / (high - low)
            return left + _WIDTH * across, _TOP + _HEIGHT * (1 - part)

        body += _axes(panel, left, (low, high), floor)
        kept = _thinned(x, above)
        body.append(_line([at(a, b) for a, b in kept], "currentColor", 'stroke-width="3"'))
        for fit, colour in zip(shown, _COLOURS, strict=False):
            places = [(float(s), max(1 - fit.law.cdf(float(s)), 0.0)) for s in grid]
            points = [at(s, over) for s, over in places if panel == 0 or over > 10**floor]
            body.append(_line(points, colour, 'stroke-width="1.5"'))
    legend = [(f"measured, n = {times.seen.size}", "currentColor")]
    legend += [(f"{f.name}, KS {f.ks:.3f}", c) for f, c in zip(shown, _COLOURS, strict=False)]
    for i, (text, colour) in enumerate(legend):
        place, row = _LEFT + (i % 3) * 270, _TOP + _HEIGHT + 48 + 16 * (i // 3)
        body.append(
            f'<rect x="{place}" y="{row - 5}" width="18" height="3" fill="{colour}"/>'
            f'<text x="{place + 24}" y="{row}">{escape(text)}</text>'
        )
    width, height = _LEFT + 2 * _WIDTH + _GAP + 20, _TOP + _HEIGHT + _BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="11">\n'
        "<style>svg{color:#222;background:#fff;fill:currentColor}"
        "@media(prefers-color-scheme:dark){svg{color:#ddd;background:#181818}}</style>\n"
        f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _thinned(x: np.ndarray, above: np.ndarray) -> list[_Point]:
    """Enough of the measured points: all of the longest, evenly many of the others."""
    chosen = {*np.linspace(0, x.size - 1, 300).astype(int).tolist()}
    chosen |= {*range(max(x.size - 60, 0), x.size)}
    return [(float(x[i]), float(above[i])) for i in sorted(chosen)]


def _axes(panel: int, left: int, ends: tuple[float, float], floor: float) -> list[str]:
    low, high = ends
    bottom = _TOP + _HEIGHT
    title = ("probability of at most", "probability of more than")[panel]
    frame = f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
    parts = [
        frame + 'stroke="currentColor" stroke-opacity="0.4"/>',
        f'<text x="{left + _WIDTH / 2}" y="{bottom + 30}" text-anchor="middle">seconds</text>',
        f'<text x="{left}" y="{_TOP - 4}">{title}</text>',
    ]
    for decade in range(math.floor(low), math.ceil(high) + 1):
        for digit in (1, 2, 5):
            place = decade + math.log10(digit)
            if low <= place <= high:
                x = left + _WIDTH * (place - low) / (high - low)
                parts.append(_tick(x, bottom + 14, f"{digit * 10.0**decade:g}", "middle"))
                parts.append(_rule(x, _TOP, x, bottom))
    if panel == 0:
        rows = [(f"{i / 4:g}", i / 4) for i in range(5)]
    else:
        rows = [(f"1e{-i}" if i else "1", 1 + i / floor) for i in range(math.floor(-floor) + 1)]
    for text, part in rows:
        y = _TOP + _HEIGHT * (1 - part)
        parts.append(_tick(left - 6, y + 4, text, "end"))
        parts.append(_rule(left, y, left + _WIDTH, y))
    return parts


def _tick(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _rule(x0: float, y0: float, x1: float, y1: float) -> str:
    return (
        f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="currentColor" '
        'stroke-opacity="0.12"/>'
    )


def _line(points: Sequence[_Point], colour: str, style: str) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{text}" fill="none" stroke="{colour}" {style}/>'
