"""The charts of two runs: each curve of both in one picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from gradtrack.view.charts import Chart, Line, spans_decades
from gradtrack.view.meanings import meaning_of
from gradtrack.view.track import Track

Sides = Sequence[tuple[str, Track]]
"""What the runs are called, with the track of a pair that both have."""
Events = Sequence[tuple[int, str, int]]

CURVES: Final = (
    ("Gradient norm", "train/grad_norm", True),
    ("Gradient norm after clipping", "train/grad_norm_clipped", True),
    ("Clip rate", "train/grad_clip_rate", False),
    ("Variance", "train/grad_variance", True),
)
_GROUP_CHARTS: Final = 8
_ANALYZER_CHARTS: Final = 8


def curves_of(sides: Sides, section: str, events: Events) -> Iterator[Chart]:
    """Yield the loss, the curves of the whole model and the norms of the groups that both runs have."""
    first, second = (track for _, track in sides)
    losses = [Line(name=name, steps=track.steps, values=track.loss, lost=track.nan_losses()) for name, track in sides]
    shared = [group for group in first.groups if group in second.groups][:_GROUP_CHARTS]
    groups = [(f"Norm of {group}", f"train/grad_norm/{group}", True) for group in shared]
    charts = [("Loss", losses, _spans_decades(losses))]
    charts += [(title, _lines(sides, metric), log_scale) for title, metric, log_scale in (*CURVES, *groups)]
    for title, lines, log_scale in charts:
        yield Chart(title=title, lines=lines, section=section, log_scale=log_scale, events=events)


def analyzer_curves(sides: Sides, source: str, events: Events) -> Iterator[Chart]:
    """Yield what analyzers say about the whole model in both runs, such as the gains, a chart for each metric."""
    first, second = (track for _, track in sides)
    found: Counter[str] = Counter()
    for metric in first.names:
        head, _, rest = metric.partition("/")
        if head == "train" or "/" in rest or metric not in second.names or found[head] == _ANALYZER_CHARTS:
            continue
        found[head] += 1
        lines = _lines(sides, metric)
        yield Chart(
            title=rest.replace("_", " ").capitalize(),
            lines=lines,
            section=f"{head}: {source}" if source else head,
            log_scale=_spans_decades(lines),
            about=meaning_of(metric),
            events=events,
        )


def _spans_decades(lines: Sequence[Line]) -> bool:
    return spans_decades(np.concatenate([line.values for line in lines]))


def _lines(sides: Sides, metric: str) -> list[Line]:
    return [
        Line(
            name=name,
            steps=track.steps,
            values=track.over_finite(metric),
            lost=track.nan_steps(metric) if metric == "train/grad_norm" else (),
        )
        for name, track in sides
    ]
