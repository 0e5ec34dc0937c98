"""Draws the gradient flow: the gradient norm of each group, for one step or over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtrack.drawing import figures
from gradtrack.drawing.figures import BLUE, RED, panel, plain
from gradtrack.reports import StepReport
from gradtrack.reports.summary import has_finite


def flow_of(
    reports: Sequence[StepReport],
) -> tuple[list[int], dict[str, list[float | None]], list[tuple[int, str, str]]]:
    """Return steps, the norm of each group at each of them, and where an issue opened."""
    found = [report for report in reports if report.groups]
    names = dict.fromkeys(name for report in found for name in report.groups)
    parts = [{name: part.norm for name, part in report.groups.items() if has_finite(part)} for report in found]
    norms = {name: [part.get(name) for part in parts] for name in names}
    opened: dict[str, tuple[int, str, str]] = {}
    for report in found:
        for issue in report.health.issues:
            group = next((name for name in names if f"{issue.layer}.".startswith(f"{name}.")), None)
            if group is not None:
                opened.setdefault(issue.key, (report.step, group, issue.issue_type.value))
    return [report.step for report in found], norms, list(opened.values())


def draw_gradient_flow(
    norms: Mapping[str, Sequence[float | None]],
    *,
    steps: Sequence[int] = (),
    issues: Sequence[tuple[int, str, str]] = (),
    name: str = "",
) -> Any:
    """Draw the gradient norm of each layer: bars for one step, a heat map over time for several.

    `norms` holds the layers from the input to the output; `issues` are steps, layers and texts to be marked, and
    `name` is that of the pair.
    """
    names, of = list(norms), f" of {plain(name)}" if name else ""
    figure = figures.new_figure(11.0, min(3.0 + 0.22 * len(names), 14.0))
    table = np.array([figures.numbers(values) for values in norms.values()])
    if not table.size:
        figures.say(panel(figure, (1, 1, 1), f"Gradient flow{of}", "", ""), "No layer was measured.")
    elif table.shape[1] == 1:
        axes = panel(figure, (1, 1, 1), f"Gradient flow{of}, input at the top", "gradient norm", "")
        _flow_bars(axes, names, table[:, 0])
    else:
        axes = panel(figure, (1, 1, 1), f"Gradient flow{of} over time, input at the top", "step", "")
        shown = list(steps) or list(range(1, table.shape[1] + 1))
        _flow_map(figure, axes, names, table, shown)
        _mark_cells(axes, names, shown, issues)
    return figures.tidy(figure)


def _flow_bars(axes: Any, names: Sequence[str], norms: NDArray[np.float64]) -> None:
    drawable = np.where(np.isfinite(norms) & (norms > 0), norms, np.nan)
    at = np.arange(len(names))
    axes.barh(at, drawable, color=BLUE, height=0.7)
    if np.isfinite(drawable).any():
        axes.set_xscale("log")
        axes.set_xlim(left=np.nanmin(drawable) / 3)
    for position in np.flatnonzero(np.isnan(drawable)):
        text = "no gradient" if np.isnan(norms[position]) else f"{norms[position]:g}"
        axes.text(0.01, position, text, transform=axes.get_yaxis_transform(), color=RED, va="center", fontsize=8)
    figures.name_rows(axes, names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _flow_map(figure: Any, axes: Any, names: Sequence[str], table: NDArray[np.float64], steps: Sequence[int]) -> None:
    axes.grid(visible=False)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(table)
    finite = logs[np.isfinite(logs)]
    low, high = (finite.min(), finite.max()) if len(finite) else (-1.0, 0.0)
    # A zero is the darkest colour there is and an infinity the brightest; what was not measured is grey.
    clipped = np.where(np.isnan(table), np.nan, np.clip(logs, low - 1, high + 1))
    image = axes.imshow(
        clipped,
        cmap=figures.colours("cividis"),
        vmin=low,
        vmax=max(high, low + 1e-3),
        aspect="auto",
        interpolation="nearest",
    )
    _name_columns(axes, steps)
    figures.name_rows(axes, names)
    ticks = figures.log_ticks(10.0**low, 10.0 ** max(high, low + 1e-3))
    bar = figure.colorbar(image, ax=axes, label="gradient norm (log10 scale)", ticks=np.log10(ticks))
    bar.set_ticklabels([f"{value:.3g}" for value in ticks])


def _name_columns(axes: Any, steps: Sequence[int]) -> None:
    """Write round steps below the columns that are nearest to them."""
    from matplotlib.ticker import MaxNLocator

    wanted = MaxNLocator(8, steps=[1, 2, 5, 10], integer=True).tick_values(steps[0], steps[-1])
    near = {int(np.argmin(np.abs(np.asarray(steps) - step))): None for step in wanted if steps[0] <= step <= steps[-1]}
    axes.set_xticks(list(near), [str(steps[column]) for column in near])


def _mark_cells(axes: Any, names: Sequence[str], steps: Sequence[int], issues: Sequence[tuple[int, str, str]]) -> None:
    for step, layer, text in issues:
        if layer in names and len(steps):
            column = int(np.argmin(np.abs(np.asarray(steps) - step)))
            row = names.index(layer)
            axes.plot(column, row, "s", markerfacecolor="none", markeredgecolor=RED, markersize=9, markeredgewidth=1.8)
            right = column > 0.7 * len(steps)
            axes.annotate(
                plain(text),
                (column, row),
                xytext=(-8 if right else 8, 0),
                textcoords="offset points",
                ha="right" if right else "left",
                va="center",
                fontsize=8,
                color=RED,
                parse_math=False,
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            )
