"""The norms of all groups over depth and time, as one picture that is as coarse as a screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.view.track import Track

_ROWS: Final = 80
_COLUMNS: Final = 120
_FEWEST: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Groups from the input to the output, each with the logarithm of its norm over time; None is no finite one.

    Column i holds the steps from `steps[i]` to the next one, the last one those to the `end`.
    """

    title: str
    rows: Sequence[str]
    steps: Sequence[int]
    end: int
    values: Sequence[Sequence[float | None]]
    section: str = "Training"
    about: str = ""
    events: Sequence[tuple[int, str, int]] = ()

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain data of bounded size."""
        return {
            "title": self.title,
            "section": self.section,
            "about": self.about,
            "events": [list(event) for event in self.events],
            "rows": list(self.rows),
            "x": list(self.steps),
            "end": self.end,
            "values": [[None if value is None else round(value, 2) for value in row] for row in self.values],
        }


def heat_of(track: Track, *, section: str, events: Sequence[tuple[int, str, int]]) -> HeatMap | None:
    """Return the picture of a pair's groups, or None where there are too few groups or steps for one."""
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


def _medians(norms: NDArray[np.float64], edges: NDArray[np.int64]) -> list[float | None]:
    with np.errstate(divide="ignore"):
        logs = np.log10(norms)
    found: list[float | None] = []
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        known = logs[start:end]
        known = known[~np.isnan(known)]
        value = float(np.median(known)) if len(known) else math.nan
        found.append(max(min(value, 99.0), -99.0) if not math.isnan(value) else None)
    return found
