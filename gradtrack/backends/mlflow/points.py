"""The points of metrics that a run of MLflow has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Points:
    """The points that were asked for, by metric: each history is fetched once, and what is written joins it.

    Only a write that failed leaves it open what a run has; then everything is asked for again.
    """

    def __init__(self) -> None:
        self._known: dict[str, set[tuple[int, int]]] = {}
        self._in_doubt = False

    def of(self, name: str, fetch: Callable[[str], Iterable[Any]]) -> set[tuple[int, int]]:
        """Return step and time of each point of a metric."""
        if name not in self._known:
            self._known[name] = {(point.step, point.timestamp) for point in fetch(name)}
        return self._known[name]

    def add(self, metrics: Iterable[Any]) -> None:
        """Note points that were written."""
        for metric in metrics:
            if metric.key in self._known:
                self._known[metric.key].add((metric.step, metric.timestamp))

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Forget everything where a write fails, and again when it has succeeded: a training seldom asks."""
        try:
            yield
        except BaseException:
            self._known.clear()
            self._in_doubt = True
            raise
        if self._in_doubt:
            self._known.clear()
            self._in_doubt = False
