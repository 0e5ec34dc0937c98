"""Text from files of a run directory made fit for a terminal, which obeys the control characters in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


def one_line(text: str) -> str:
    """Keep a text on one line, and out of it what controls a terminal or turns round the direction of writing."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def printable(text: str) -> str:
    """Keep out of a text what controls a terminal; its lines stay."""
    return text if text.isprintable() else "\n".join(map(one_line, text.split("\n")))


class Printable:
    """Something that rich prints, without the control characters in its texts: only styles may become some."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        for found in console.render(self._shown, options):
            yield found if found.control else Segment(printable(found.text), found.style)
