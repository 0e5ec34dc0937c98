"""Pictures of gradients over the depth of a network: their flow from layer to layer, and the gain of each block.

They take plain numbers, so that they draw what any analyzer, file or notebook holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.view import figures
from gradtrack.view.figures import BLUE, GREEN, GREY, RED, log_curve, panel, plain

HEALTHY_GAIN: Final = (0.5, 2.0)


def plot_gradient_flow(
    norms: Mapping[str, Sequence[float | None]],
    path: Path,
    *,
    steps: Sequence[int] = (),
    issues: Sequence[tuple[int, str, str]] = (),
    name: str = "",
) -> Path:
    """Draw the gradient norm of each layer: bars for one step, a heat map over time for several.

    `norms` holds the layers from the input to the output; `issues` are steps, layers and texts to be marked, and
    `name` is that of the pair.
    """
    return figures.save(draw_gradient_flow(norms, steps=steps, issues=issues, name=name), path)


def plot_gain(gains: Sequence[float | None], path: Path, *, names: Sequence[str] = ()) -> Path:
    """Draw the gain of each transition between blocks, and how the gains add up over depth.

    A gain is the gradient norm of a block divided by that of the next one; None is a gain that is not known.
    """
    return figures.save(draw_gain(gains, names=names), path)


def draw_gradient_flow(
    norms: Mapping[str, Sequence[float | None]],
    *,
    steps: Sequence[int] = (),
    issues: Sequence[tuple[int, str, str]] = (),
    name: str = "",
) -> Any:
    """Return the figure of `plot_gradient_flow`."""
    names, of = list(norms), f" of {plain(name)}" if name else ""
    figure = figures.new_figure(11.0, min(3.0 + 0.22 * len(names), 14.0))
    table = np.array([figures.numbers(values) for values in norms.values()])
    if not table.size:
        figures.say(panel(figure, (1, 1, 1), f"Gradient flow{of}", "", ""), "No layer was measured.")
    elif table.shape[1] == 1:
        _flow_bars(
            panel(figure, (1, 1, 1), f"Gradient flow{of}, input at the top", "gradient norm", ""), names, table[:, 0]
        )
    else:
        axes = panel(figure, (1, 1, 1), f"Gradient flow{of} over time, input at the top", "step", "")
        shown = list(steps) or list(range(1, table.shape[1] + 1))
        _flow_map(figure, axes, names, table, shown)
        _mark_cells(axes, names, shown, issues)
    return figures.tidy(figure)


def draw_gain(gains: Sequence[float | None], *, names: Sequence[str] = ()) -> Any:
    """Return the figure of `plot_gain`."""
    figure = figures.new_figure(11.0, 4.8)
    values = figures.numbers(gains)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(values)
    at = np.arange(1, len(values) + 1)
    axes = panel(figure, (1, 2, 1), "Gain per transition", "transition", "ln gain")
    axes.axhspan(*np.log(HEALTHY_GAIN), color=GREEN, alpha=0.12, label="0.5 to 2")
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    _gain_bars(axes, at, values, logs)
    total = panel(
        figure, (1, 2, 2), "From the output back to the input", "transition", "gradient relative to the output"
    )
    _cumulative_gain(total, at, logs)
    axes.set_xlim(0.5, max(len(at), 1) + 0.5)
    for each in figure.axes:
        each.xaxis.get_major_locator().set_params(integer=True)
        if len(names) == len(values) <= figures.NAMES:
            each.set_xticks(at, [plain(name, length=20) for name in names], rotation=60, ha="right", parse_math=False)
        figures.legend(each)
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


def _gain_bars(axes: Any, at: NDArray[Any], values: NDArray[np.float64], logs: NDArray[np.float64]) -> None:
    finite = np.isfinite(logs)
    outside = (values < HEALTHY_GAIN[0]) | (values > HEALTHY_GAIN[1])
    for chosen, colour, label in ((finite & ~outside, BLUE, "healthy"), (finite & outside, RED, "outside")):
        if chosen.any():
            axes.bar(at[chosen], logs[chosen], color=colour, label=label)
    for position in np.flatnonzero(~finite):
        text = "unknown" if np.isnan(values[position]) else "blocked"
        axes.text(at[position], 0.55, text, transform=axes.get_xaxis_transform(), rotation=90, ha="center", color=RED)
    if not len(at):
        figures.say(axes, "Two blocks are needed.")


def _cumulative_gain(axes: Any, at: NDArray[Any], logs: NDArray[np.float64]) -> None:
    """Add up the logarithms from the output; behind a gain that is not known nothing is known."""
    with np.errstate(over="ignore", invalid="ignore"):
        summed = np.cumsum(logs[::-1])[::-1]
        total = np.exp(np.clip(summed, -200, 200))
    log_curve(
        axes,
        at,
        np.where(np.isfinite(summed), total, np.nan),
        label="total gain",
        colour=BLUE,
        marker=".",
    )
    axes.set_xlim(0.5, max(len(at), 1) + 0.5)
    if len(at) and not np.isfinite(summed).any():
        figures.say(axes, "No gradient is known to pass.")
        return
    axes.axhspan(1e-3, 1e3, color=GREEN, alpha=0.08, label="0.001 to 1000")
    axes.axhline(1.0, color=GREY, linewidth=0.8)
