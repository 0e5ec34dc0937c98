"""The dashboard of gradient health that every run gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from gradtrack.records import Panel, tail_of

_SECTION: Final = "gradients"

CORE_PANELS: Final = (
    Panel(
        title="Gradient norm before and after clipping",
        section=_SECTION,
        metrics=("train/grad_norm", "train/grad_norm_clipped", "train/grad_clip_threshold"),
        kind="multi-line",
        log_scale=True,
    ),
    Panel(
        title="Gradient norm of each group",
        section=_SECTION,
        metrics=("train/grad_norm/*",),
        kind="multi-line",
        log_scale=True,
    ),
    Panel(title="Share of steps that were clipped", section=_SECTION, metrics=("train/grad_clip_rate",)),
    Panel(
        title="Non-finite elements",
        section=_SECTION,
        metrics=("train/grad_nan_count", "train/grad_inf_count"),
        kind="multi-line",
    ),
    Panel(
        title="Mean gradient between the smallest and the largest",
        section=_SECTION,
        metrics=("train/grad_mean", "train/grad_min", "train/grad_max"),
        kind="band",
    ),
    Panel(
        title="Healthy and skipped steps",
        section=_SECTION,
        metrics=("train/grad_healthy", "train/grad_skipped"),
        kind="multi-line",
    ),
)


class Dashboard:
    """The panels of every (model, optimizer) pair, handed out once: with the first record of the pair."""

    def __init__(self) -> None:
        self.shown: set[str] = set()
        """Those whose panels were handed out."""

    def take(self, source: str, more: Iterable[Panel] = ()) -> tuple[Panel, ...]:
        """Return the panels of a pair and those of its analyzers, the first time only."""
        if source in self.shown:
            return ()
        self.shown.add(source)
        return panels_of((*CORE_PANELS, *more), source)


def panels_of(panels: Iterable[Panel], source: str) -> tuple[Panel, ...]:
    """Return panels for the metrics of one (model, optimizer) pair, in a section of its own where it has a name."""
    if not source:
        return tuple(panels)
    return tuple(
        dataclasses.replace(
            panel,
            section=f"{panel.section}: {source}",
            metrics=tuple(_metric_of(metric, source) for metric in panel.metrics),
        )
        for panel in panels
    )


def _metric_of(metric: str, source: str) -> str:
    star = "/*" if metric.endswith("/*") else ""
    return f"{metric.removesuffix(star)}{tail_of(source)}{star}"
