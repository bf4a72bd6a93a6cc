"""Tables and cards of the report as HTML; every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

Row = Sequence[str]


def html_table(
    header: Row, rows: Iterable[Row], *, strong: Iterable[int] = (), wrap: Iterable[int] = ()
) -> str:
    """A table; `strong` are numbers of rows to stress, `wrap` of columns with running text."""
    stressed, wrapped = set(strong), set(wrap)
    head = "".join(
        f"<th{_css(i in wrapped, 'left')}>{escape(cell)}</th>" for i, cell in enumerate(header)
    )
    body = []
    for number, row in enumerate(rows):
        cells = "".join(
            f"<td{_css(i in wrapped, 'wrap')}>{escape(cell)}</td>" for i, cell in enumerate(row)
        )
        body.append(f"<tr{_css(number in stressed, 'strong')}>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def html_card(value: str, text: str) -> str:
    """A large number with a line below it."""
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(text)}</span></div>'


def _css(is_set: bool, name: str) -> str:
    return f' class="{name}"' if is_set else ""
