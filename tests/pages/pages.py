"""A page read back: its texts, its attributes, and the data of its charts."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """What a browser makes of a page, as far as the tests need it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._data: list[str] = []
        self._inside = ""
        self.feed(text)

    @property
    def charts(self) -> list[dict[str, Any]]:
        """Return the charts that the page draws."""
        found: list[dict[str, Any]] = json.loads("".join(self._data))
        return found

    @property
    def text(self) -> str:
        """Return what can be read on the page."""
        return " ".join(self.texts)

    def chart(self, title: str) -> dict[str, Any]:
        """Return the chart with a title."""
        return next(chart for chart in self.charts if chart["title"] == title)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take in an element."""
        self.tags.append((tag, dict(attrs)))
        self._inside = "data" if dict(attrs).get("id") == "data" else tag

    def handle_endtag(self, tag: str) -> None:
        """Leave an element."""
        self._inside = ""

    def handle_data(self, data: str) -> None:
        """Take in a text."""
        if self._inside == "data":
            self._data.append(data)
        elif self._inside not in ("style", "script") and data.strip():
            self.texts.append(data)
