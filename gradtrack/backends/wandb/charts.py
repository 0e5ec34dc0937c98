"""The panels as W&B's own charts of several lines, made from what was recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gradtrack.backends.wandb.names import chart_name
from gradtrack.records import Panel, Record

_MOST_POINTS: Final = 1000
_MOST_ROWS: Final = 10_000


class Charts:
    """The curves of the panels with several lines; W&B itself draws every single metric.

    A curve keeps at most a thousand points, and of every four that are too many the lowest and the highest.
    """

    def __init__(self) -> None:
        self._panels: dict[Panel, None] = {}
        self._curves: dict[str, dict[int, float]] = {}
        self._wanted: dict[str, bool] = {}

    def take(self, records: Iterable[Record]) -> None:
        """Keep what the panels need; taking a record again changes nothing."""
        for record in records:
            if record.panels:
                found = (panel for panel in record.panels if panel.kind in ("multi-line", "band"))
                self._panels.update(dict.fromkeys(found))
                self._wanted.clear()
            for name, value in record.metrics.items():
                if self._is_wanted(name) and math.isfinite(value):
                    self._keep(name, record.step, value)

    def draw(self, package: Any) -> dict[str, Any]:
        """Return the charts by the names under which they are logged."""
        drawn = {}
        for panel in self._panels:
            lines = self._lines(panel)
            if len(lines) > 1:
                drawn[name_of(panel)] = package.plot.line_series(
                    xs=[list(points) for points in lines.values()],
                    ys=[list(points.values()) for points in lines.values()],
                    keys=list(lines),
                    title=f"{panel.title} (log10)" if panel.log_scale else panel.title,
                    xname="gradtrack/step",
                    split_table=True,
                )
        return drawn

    def _lines(self, panel: Panel) -> dict[str, Mapping[int, float]]:
        picked = [name for name in panel.pick(self._curves) if name in self._curves]
        limit = min(_MOST_POINTS, _MOST_ROWS // max(len(picked), 1))
        lines: dict[str, Mapping[int, float]] = {}
        for name in picked:
            points = self._curves[name]
            if panel.log_scale:
                points = {step: math.log10(value) for step, value in points.items() if value > 0}
            while len(points) > max(limit, 4):
                points = _halved(points)
            if points:
                lines[name] = dict(sorted(points.items()))
        return lines

    def _keep(self, name: str, step: int, value: float) -> None:
        curve = self._curves.setdefault(name, {})
        curve[step] = value
        if len(curve) > 2 * _MOST_POINTS:
            self._curves[name] = _halved(curve)

    def _is_wanted(self, name: str) -> bool:
        if name not in self._wanted:
            self._wanted[name] = any(name in panel.pick([name]) for panel in self._panels)
        return self._wanted[name]


def name_of(panel: Panel) -> str:
    """Return the name of a panel's chart, whose first part is its section of the page."""
    return chart_name(f"gradtrack {panel.section.replace(':', '')}/{panel.title}")


def _halved(points: Mapping[int, float]) -> dict[int, float]:
    """Keep the lowest and the highest of every four points."""
    steps = sorted(points)
    kept: dict[int, float] = {}
    for start in range(0, len(steps), 4):
        part = steps[start : start + 4]
        chosen = {min(part, key=points.__getitem__), max(part, key=points.__getitem__)}
        kept.update((step, points[step]) for step in part if step in chosen)
    return kept
