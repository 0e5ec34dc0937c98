"""The panels as TensorBoard's custom scalars."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gradtrack.backends.tensorboard.events import Events
from gradtrack.records import Panel


def layout_event(events: Events, panels: Sequence[Panel], now: float) -> Any:
    """Return the event that arranges all panels; the newest one of a run counts."""
    shapes = events.shapes
    categories: dict[str, list[Any]] = {}
    for panel in panels:
        chart = _chart(shapes, panel)
        if chart is not None:
            categories.setdefault(panel.section, []).append(chart)
    found = [shapes.Category(title=name, chart=charts) for name, charts in categories.items()]
    value = events.layout(shapes.Layout(category=found).SerializeToString())
    return events.event(wall_time=now, summary=events.summary(value=[value]))


def _chart(shapes: Any, panel: Panel) -> Any:
    if panel.kind == "band" and len(panel.metrics) == 3:
        value, lower, upper = panel.metrics
        series = shapes.MarginChartContent.Series(value=value, lower=lower, upper=upper)
        return shapes.Chart(title=panel.title, margin=shapes.MarginChartContent(series=[series]))
    if panel.kind in ("line", "multi-line", "band"):
        tags = [_pattern(metric) for metric in panel.metrics]
        return shapes.Chart(title=panel.title, multiline=shapes.MultilineChartContent(tag=tags))
    return None


def _pattern(metric: str) -> str:
    """Return the regular expression of a metric, which may end in a star; TensorBoard matches from the start only."""
    return f"^{re.escape(metric[:-1])}.+$" if metric.endswith("/*") else f"^{re.escape(metric)}$"
