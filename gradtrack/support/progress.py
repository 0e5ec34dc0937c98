"""Progress bars on a terminal for work that takes longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final, Self, TypeVar

_Item = TypeVar("_Item")
_PATIENCE_SECONDS: Final = 1.0


class Bar:
    """A progress bar on stderr that appears after a second and disappears at its end; silent without a terminal."""

    def __init__(self, what: str, *, total: float | None = None, unit: str = "") -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = 0.0
        self._shown: Any = None
        self._is_watched = sys.stderr is not None and sys.stderr.isatty()
        self._begin = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()

    def advance(self, amount: float = 1.0) -> None:
        """Count an amount of work as done."""
        self._done += amount
        if not self._is_watched:
            return
        if self._shown is None:
            if time.monotonic() - self._begin < _PATIENCE_SECONDS:
                return
            self._shown = self._show()
        self._shown.update(0, completed=self._done)

    def _show(self) -> Any:
        from rich import progress as rich
        from rich.console import Console

        count = rich.DownloadColumn() if self._unit == "bytes" else rich.MofNCompleteColumn()
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), count, rich.TimeRemainingColumn())
        shown = rich.Progress(*columns, console=Console(stderr=True), transient=True)
        shown.add_task(self._what, total=self._total)
        shown.start()
        return shown


def counted(items: Iterable[_Item], what: str, *, total: float | None = None) -> Iterator[_Item]:
    """Yield the items, with a progress bar that counts them."""
    with Bar(what, total=total) as bar:
        for item in items:
            yield item
            bar.advance()
