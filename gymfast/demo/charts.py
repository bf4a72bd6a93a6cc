"""The plots of the report: bytes, density and speed."""

from __future__ import annotations

from gymfast.demo.result import DemoResult, Version
from gymfast.demo.svg import Drawing, Scale, horizontal_grid, nice_step, spread, vertical_ticks
from gymfast.demo.words import size_text

WIDTH = 760.0
LEFT, RIGHT = 72.0, 640.0
Series = tuple[str, str, list[tuple[int, float]]]


def bytes_chart(result: DemoResult) -> str:
    """Bytes of each version, every way to send it, on a logarithmic axis."""
    deltas = [version for version in result.versions if version.small_bytes is not None]
    drawing = Drawing(WIDTH, 340, "Bytes of each version, by way of sending")
    series = _byte_series(deltas)
    values = [value for _, _, points in series for _, value in points]
    y = Scale(min(values) * 0.7, max(values) * 1.5, 300, 16, is_log=True)
    x = _version_scale(deltas)
    ticks = [(tick, size_text(tick)) for tick in y.ticks()]
    horizontal_grid(drawing, y, ticks, LEFT, RIGHT)
    _version_axis(drawing, x, deltas, 300)
    ends = spread([y(points[-1][1]) for _, _, points in series], 17, 16, 300)
    for (name, css, points), end in zip(series, ends, strict=True):
        drawing.polyline([(x(version), y(value)) for version, value in points], css)
        for version, value in points:
            title = f"version {version}, {name}: {size_text(value)}"
            drawing.circle(x(version), y(value), 2.6, f"dot {css}", title)
        drawing.text(RIGHT + 10, end + 4, name, f"label {css}")
    return drawing.render()


def density_chart(result: DemoResult) -> str:
    """Share of the values that changed, version by version."""
    deltas = [version for version in result.versions if version.density is not None]
    drawing = Drawing(WIDTH, 230, "Share of weights that changed, by version")
    shares = [100 * (version.density or 0) for version in deltas]
    step = nice_step(max(shares) / 4)
    y = Scale(0, max(max(shares) * 1.1, step), 190, 16)
    x = _version_scale(deltas)
    horizontal_grid(drawing, y, [(tick, f"{tick:g} %") for tick in y.ticks(4)], LEFT, RIGHT)
    _version_axis(drawing, x, deltas, 190)
    width = min(24.0, 0.7 * (RIGHT - LEFT) / len(deltas))
    for version, share in zip(deltas, shares, strict=True):
        top = y(share)
        title = f"version {version.version}: {share:.2f} % of the weights changed"
        drawing.rect(x(version.version) - width / 2, top, (width, 190 - top), "bar small", title)
    mean = 100 * result.mean_density
    drawing.line(LEFT, y(mean), RIGHT, y(mean), "line limit")
    drawing.text(RIGHT + 10, y(mean) + 4, f"mean {mean:.2f} %", "label limit")
    return drawing.render()


def speed_chart(result: DemoResult) -> str:
    """Encode and apply speed of each codec beside a plain copy."""
    rows = [codec for codec in result.codecs if codec.encode and codec.apply]
    height = 44 + 62 * len(rows) + 46
    drawing = Drawing(WIDTH, height, "Speed of encode and apply beside memcpy")
    bottom = height - 42.0
    rates = [s.p90_gbps for row in rows for s in (row.encode, row.apply) if s]
    x = Scale(0, max(*rates, result.memcpy.median_gbps) * 1.08, 150, WIDTH - 60)
    for tick in x.ticks(6):
        drawing.line(x(tick), 24, x(tick), bottom, "grid")
    vertical_ticks(drawing, x, [(tick, f"{tick:g}") for tick in x.ticks(6)], bottom - 4)
    drawing.text((150 + WIDTH - 60) / 2, bottom + 34, "GB/s", "tick", "middle")
    for i, row in enumerate(rows):
        top = 34.0 + 62 * i
        drawing.text(138, top + 28, row.name, "label", "end")
        css = _css_of(row.name)
        for j, (what, speed) in enumerate((("encode", row.encode), ("apply", row.apply))):
            if speed is None:
                continue
            y = top + 24 * j
            end = x(speed.median_gbps)
            spread_text = f"{speed.p10_gbps:.1f} to {speed.p90_gbps:.1f}"
            title = f"{row.name}, {what}: {speed.median_gbps:.2f} GB/s ({spread_text})"
            drawing.rect(150, y, (end - 150, 20), f"bar {css}" + (" soft" if j else ""), title)
            drawing.line(x(speed.p10_gbps), y + 10, x(speed.p90_gbps), y + 10, "whisker")
            shown = max(end, x(speed.p90_gbps))
            drawing.text(shown + 6, y + 14, f"{what} {speed.median_gbps:.1f}", "value")
    copy = x(result.memcpy.median_gbps)
    drawing.line(copy, 20, copy, bottom, "line memcpy")
    drawing.text(copy, 13, f"memcpy {result.memcpy.median_gbps:.1f}", "label memcpy", "middle")
    return drawing.render()


def _byte_series(deltas: list[Version]) -> list[Series]:
    columns: list[tuple[str, str, list[float | int | None]]] = [
        ("full", "full", [v.full_bytes for v in deltas]),
        ("xor + zstd-1", "xor", [v.xor_zstd1_bytes for v in deltas]),
        ("gymfast fast", "fast", [v.fast_bytes for v in deltas]),
        ("gymfast small", "small", [v.small_bytes for v in deltas]),
        ("limit", "limit", [v.limit_bytes for v in deltas]),
    ]
    series: list[Series] = []
    for name, css, values in columns:
        points = [(v.version, float(x)) for v, x in zip(deltas, values, strict=True) if x]
        if points:
            series.append((name, css, points))
    return series


def _version_scale(deltas: list[Version]) -> Scale:
    return Scale(deltas[0].version - 0.5, deltas[-1].version + 0.5, LEFT, RIGHT)


def _version_axis(drawing: Drawing, x: Scale, deltas: list[Version], y: float) -> None:
    every = max(1, round(nice_step(len(deltas) / 12)))
    shown = [v.version for v in deltas if v.version % every == 0 or v is deltas[0]]
    drawing.line(LEFT, y, RIGHT, y, "axis")
    vertical_ticks(drawing, x, [(version, str(version)) for version in shown], y)
    drawing.text((LEFT + RIGHT) / 2, y + 36, "version", "tick", "middle")


def _css_of(name: str) -> str:
    return {"gymfast fast": "fast", "gymfast small": "small"}.get(name, "xor")
