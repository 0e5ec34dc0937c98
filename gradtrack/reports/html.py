"""Small pieces of HTML for notebooks, in which every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest


def card(title: str, rows: Iterable[Sequence[object]] = (), *, items: Sequence[object] = (), table: str = "") -> str:
    """Return a title with a table of names and values, a list of texts, and another table."""
    values = grid((), rows)
    listed = "".join(f"<li>{escape(str(item))}</li>" for item in items)
    return f"<div><strong>{escape(title)}</strong>{values}{f'<ul>{listed}</ul>' if listed else ''}{table}</div>"


def grid(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table, or nothing where there is no row; under a head numbers stand below each other."""
    lines = [list(row) for row in rows]
    if not lines:
        return ""
    # What is not known stands where its column's numbers do.
    columns_of_cells = zip(*lines, strict=False) if columns else ()
    sides = [any(isinstance(cell, (int, float)) for cell in column) for column in columns_of_cells]
    head = "".join(_cell("th", column, is_right=right) for column, right in zip(columns, sides, strict=False))
    body = "".join(
        f"<tr>{''.join(_cell('td', show(cell), is_right=right) for cell, right in zip_longest(line, sides))}</tr>"
        for line in lines
    )
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def _cell(tag: str, shown: str, *, is_right: bool | None) -> str:
    return f'<{tag} style="text-align: {"right" if is_right else "left"}">{escape(shown)}</{tag}>'


def text(lines: str) -> str:
    """Return text whose columns stand below each other."""
    return f'<pre style="white-space: pre-wrap">{escape(lines)}</pre>'


def show(value: object) -> str:
    """Write a value in a few digits."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return "NaN" if value != value else f"{value:.4g}"
    return str(value)
