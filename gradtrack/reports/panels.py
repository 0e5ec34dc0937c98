"""The dashboard of gradient health that every run gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from gradtrack.records import Panel, PanelKind, tail_of


def _panel(title: str, *metrics: str, kind: PanelKind = "multi-line", log_scale: bool = False) -> Panel:
    return Panel(title=title, section="gradients", metrics=metrics, kind=kind, log_scale=log_scale)


CORE_PANELS: Final = (
    _panel(
        "Gradient norm before and after clipping",
        "train/grad_norm",
        "train/grad_norm_clipped",
        "train/grad_clip_threshold",
        log_scale=True,
    ),
    _panel("Gradient norm of each group", "train/grad_norm/*", log_scale=True),
    _panel("Share of steps that were clipped", "train/grad_clip_rate", kind="line"),
    _panel("Non-finite elements", "train/grad_nan_count", "train/grad_inf_count"),
    _panel(
        "Mean gradient between the smallest and the largest",
        "train/grad_mean",
        "train/grad_min",
        "train/grad_max",
        kind="band",
    ),
    _panel("Healthy and skipped steps", "train/grad_healthy", "train/grad_skipped"),
)


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
