"""Numbers as people read them."""

from __future__ import annotations


def size_text(size_bytes: float) -> str:
    """A size in powers of 1000: `412 kB`, `51.7 MB`."""
    value, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def percent_text(ratio: float) -> str:
    """A share of one as percent, with more digits near 100 %."""
    digits = 2 if ratio >= 0.99 else 1
    return f"{100 * ratio:.{digits}f} %"


def seconds_text(seconds: float) -> str:
    """Seconds with three digits; milliseconds below 0.1 s."""
    if seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


def count_text(count: float) -> str:
    """A count in thousands or millions: `25.8 M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f}"
