"""The picture of gains: each transition between blocks, and how gains add up over depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.drawing import figures
from gradtrack.drawing.figures import BLUE, GREEN, GREY, RED, log_curve, panel, plain
from gradtrack.reports import StepReport

HEALTHY_GAIN: Final = (0.5, 2.0)


def pictures_of(reports: Sequence[StepReport]) -> Mapping[str, Callable[[Path], Path]]:
    """Draw the last gains that are known, named by their blocks without what all names begin with."""
    looks = [report.analyzers["gain"] for report in reports if "gain" in report.analyzers]
    gains, blocks = (looks[-1]["gains"], looks[-1]["blocks"]) if looks else ((), ())
    if not gains:
        return {}
    parts = [block.split(".") for block in blocks]
    shared = next((depth for depth, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1), 0)
    names = [f"{before} to {after}" for before, after in pairwise(".".join(names[shared:]) for names in parts)]
    return {"gradient_gain": lambda path: figures.save(draw_gain(gains, names=names), path)}


def draw_gain(gains: Sequence[float | None], *, names: Sequence[str] = ()) -> Any:
    """Return a figure with the gain of each transition between blocks, and how the gains add up over depth.

    A gain is the gradient norm of a block divided by that of the next one; None is a gain that is not known.
    """
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
