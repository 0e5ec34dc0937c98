"""The heat map of a run: gradient norms over depth and time, reduced to the resolution of a screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.pages.run_data import Track

_ROWS: Final = 80
_COLUMNS: Final = 120
_FEWEST: Final = 3
_LIMIT: Final = 99.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Groups from the input to the output, each with the logarithm of its norm over time; None is no finite one.

    Column i holds the steps from `steps[i]` to the next one, the last one to the `end`. Colours go from the lowest
    value to the highest, or over the `scale` that several pictures share.
    """

    title: str
    rows: Sequence[str]
    steps: Sequence[int]
    end: int
    values: Sequence[Sequence[float | None]]
    section: str = "Training"
    about: str = ""
    events: Sequence[tuple[int, str, int]] = ()
    scale: tuple[float, float] | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the heat map as plain data of bounded size."""
        return {
            "title": self.title,
            "section": self.section,
            "about": self.about,
            "events": [list(event) for event in self.events],
            "rows": list(self.rows),
            "x": list(self.steps),
            "end": self.end,
            "scale": self.scale,
            "values": [[None if value is None else round(value, 2) for value in row] for row in self.values],
        }


def heat_of(track: Track, *, section: str, events: Sequence[tuple[int, str, int]]) -> HeatMap | None:
    """Return the heat map of a pair's groups, or None with too few groups or steps."""
    groups, every = track.groups, math.ceil(len(track.groups) / _ROWS)
    if len(groups) < _FEWEST or len(track.steps) < _FEWEST:
        return None
    shown = groups[::every]
    edges = np.unique(np.linspace(0, len(track.steps), min(_COLUMNS, len(track.steps)) + 1).astype(int))
    rows = [_medians(track.over_finite(f"train/grad_norm/{group}"), edges) for group in shown]
    if all(value is None for row in rows for value in row):
        return None
    about = "Input at the top. Grey: no finite gradient."
    return HeatMap(
        title="Gradient norm over depth and time",
        rows=shown,
        steps=[int(step) for step in track.steps[edges[:-1]]],
        end=int(track.steps[-1]),
        values=rows,
        section=section,
        about=about if every == 1 else f"{about} Every {every}. of {len(groups)} groups.",
        events=events,
    )


def on_one_scale(maps: Sequence[HeatMap]) -> list[HeatMap]:
    """Return the heat maps on one colour scale, so that they can be compared."""
    found = [value for one in maps for row in one.values for value in row if value is not None]
    values = [value for value in found if abs(value) < _LIMIT]  # zeros and infinities lie at the limits
    scale = (min(values), max(values)) if values else None
    return [replace(one, scale=scale) for one in maps]


def _medians(norms: NDArray[np.float64], edges: NDArray[np.int64]) -> list[float | None]:
    with np.errstate(divide="ignore"):
        logs = np.log10(norms)
    found: list[float | None] = []
    for start, end in pairwise(edges.tolist()):
        known = logs[start:end][~np.isnan(logs[start:end])]
        value = float(np.median(known)) if len(known) else math.nan
        found.append(None if math.isnan(value) else max(min(value, _LIMIT), -_LIMIT))
    return found
