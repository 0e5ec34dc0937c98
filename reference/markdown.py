"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; columns without any entry are left out."""
    lines = [list(row) for row in rows]
    kept = [index for index in range(len(head)) if any(row[index] for row in lines)]
    shown = [[_cell(row[index]) for index in kept] for row in [list(head), *lines]]
    shown.insert(1, ["---"] * len(kept))
    return "".join(f"| {' | '.join(row)} |\n" for row in shown)


def code(text: object) -> str:
    """Return text as code, nothing for no text."""
    return f"`{text}`" if str(text) else ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
