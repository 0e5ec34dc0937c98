"""Small pieces of HTML for notebooks, in which every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def card(title: str, rows: Iterable[Sequence[object]] = (), *, items: Sequence[object] = (), table: str = "") -> str:
    """Return a title with a table of names and values, a list of texts, and another table."""
    values = grid((), rows)
    listed = "".join(f"<li>{escape(str(item))}</li>" for item in items)
    return f"<div><strong>{escape(title)}</strong>{values}{f'<ul>{listed}</ul>' if listed else ''}{table}</div>"


def grid(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table, or nothing where there is no row."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(show(cell))}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return ""
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def text(lines: str) -> str:
    """Return text whose columns stand below each other."""
    return f'<pre style="white-space: pre-wrap">{escape(lines)}</pre>'


def show(value: object) -> str:
    """Write a value in a few digits."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
