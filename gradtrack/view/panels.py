"""Pictures of what analyzers find: flow over depth, gains, recurrent spectra, policies and attention.

They take plain numbers, so that they draw what any analyzer, file or notebook holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.view import figures
from gradtrack.view.figures import BLUE, GREEN, GREY, ORANGE, RED, curve, log_curve, panel, plain

_NAMES: Final = 40
_CELLS_WITH_TEXT: Final = 200
HEALTHY_GAIN: Final = (0.5, 2.0)


def plot_gradient_flow(
    norms: Mapping[str, Sequence[float | None]],
    path: Path,
    *,
    steps: Sequence[int] = (),
    issues: Sequence[tuple[int, str, str]] = (),
) -> Path:
    """Draw the gradient norm of each layer: bars for one step, a heat map over time for several.

    `norms` holds the layers from the input to the output; `issues` are steps, layers and texts to be marked.
    """
    return figures.save(draw_gradient_flow(norms, steps=steps, issues=issues), path)


def plot_gain(gains: Sequence[float | None], path: Path, *, names: Sequence[str] = ()) -> Path:
    """Draw the gain of each transition between blocks, and how the gains add up over depth.

    A gain is the gradient norm of a block divided by that of the next one; None is a gain that is not known.
    """
    return figures.save(draw_gain(gains, names=names), path)


def plot_recurrent_spectrum(
    eigenvalues: Sequence[complex],
    path: Path,
    *,
    decay: Sequence[float] = (),
    memory_length: float | None = None,
    horizon: int | None = None,
    state_size: int | None = None,
) -> Path:
    """Draw the eigenvalues of a state Jacobian on the unit circle, and how gradients decay over the lags from 1 on.

    Where a `state_size` is given that is larger than their number, the title says that they are the outermost ones.
    """
    figure = draw_recurrent_spectrum(
        eigenvalues, decay=decay, memory_length=memory_length, horizon=horizon, state_size=state_size
    )
    return figures.save(figure, path)


def plot_policy(
    steps: Sequence[int],
    entropy: Sequence[float | None],
    path: Path,
    *,
    returns: Sequence[float | None] = (),
    floor: float | None = None,
    events: Sequence[tuple[float, str]] = (),
) -> Path:
    """Draw the normalized entropy of a policy together with its returns, which tell a collapse from a conclusion.

    `events` are steps and texts to be marked.
    """
    return figures.save(draw_policy(steps, entropy, returns=returns, floor=floor, events=events), path)


def plot_attention_entropy(entropy: Sequence[Sequence[float | None]], path: Path, *, names: Sequence[str] = ()) -> Path:
    """Draw the normalized attention entropy of every head (across) in every layer (down)."""
    return figures.save(draw_attention_entropy(entropy, names=names), path)


def draw_gradient_flow(
    norms: Mapping[str, Sequence[float | None]],
    *,
    steps: Sequence[int] = (),
    issues: Sequence[tuple[int, str, str]] = (),
) -> Any:
    """Return the figure of `plot_gradient_flow`."""
    names = list(norms)
    figure = figures.new_figure(11.0, min(3.0 + 0.22 * len(names), 14.0))
    table = np.array([figures.numbers(values) for values in norms.values()])
    if not table.size:
        figures.say(panel(figure, (1, 1, 1), "Gradient flow", "", ""), "No layer was measured.")
    elif table.shape[1] == 1:
        _flow_bars(panel(figure, (1, 1, 1), "Gradient flow, input at the top", "gradient norm", ""), names, table[:, 0])
    else:
        axes = panel(figure, (1, 1, 1), "Gradient flow over time, input at the top", "step", "")
        shown = list(steps) or list(range(1, table.shape[1] + 1))
        _flow_map(figure, axes, names, table, shown)
        _mark_cells(axes, names, shown, issues)
    return figure


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
    if len(names) == len(values) <= _NAMES:
        axes.set_xticks(at, [plain(name, length=20) for name in names], rotation=60, ha="right", parse_math=False)
    total = panel(
        figure, (1, 2, 2), "From the output back to the input", "transition", "gradient relative to the output"
    )
    _cumulative_gain(total, at, logs)
    axes.set_xlim(0.5, max(len(at), 1) + 0.5)
    total.xaxis.get_major_locator().set_params(integer=True)
    for each in figure.axes:
        figures.legend(each)
    return figure


def draw_recurrent_spectrum(
    eigenvalues: Sequence[complex],
    *,
    decay: Sequence[float] = (),
    memory_length: float | None = None,
    horizon: int | None = None,
    state_size: int | None = None,
) -> Any:
    """Return the figure of `plot_recurrent_spectrum`."""
    figure = figures.new_figure(11.0, 5.0)
    circle = panel(figure, (1, 2, 1), "Spectrum of the state Jacobian", "real", "imaginary")
    _unit_circle(circle, eigenvalues, state_size)
    axes = panel(figure, (1, 2, 2), "Decay of gradients back in time", "lag (time steps)", "norm relative to lag 1")
    if not len(decay):
        figures.say(axes, "No decay profile was measured.")
        return figure
    values = figures.numbers(decay)
    relative = values / values[0] if values[0] else values
    log_curve(axes, np.arange(1, len(values) + 1), relative, label="decay", colour=BLUE, marker=".")
    axes.axhline(math.exp(-1), color=GREY, linestyle="--", linewidth=1.0, label="1/e")
    for position, colour, text in ((memory_length, ORANGE, "memory"), (horizon, GREEN, "horizon of the task")):
        if position is not None and math.isfinite(position):
            axes.axvline(position, color=colour, linewidth=1.4, label=f"{text}: {position:.4g} steps")
    figures.legend(axes)
    return figure


def draw_policy(
    steps: Sequence[int],
    entropy: Sequence[float | None],
    *,
    returns: Sequence[float | None] = (),
    floor: float | None = None,
    events: Sequence[tuple[float, str]] = (),
) -> Any:
    """Return the figure of `plot_policy`."""
    figure = figures.new_figure(10.0, 5.0)
    axes = panel(figure, (1, 1, 1), "Policy entropy and returns", "update", "normalized entropy")
    curve(axes, steps, figures.numbers(entropy), label="entropy", colour=BLUE)
    if floor is not None:
        axes.axhline(floor, color=RED, linestyle="--", linewidth=1.0, label=f"floor {floor:g}")
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), max(1.0, axes.get_ylim()[1]))
    others = []
    if np.isfinite(figures.numbers(returns)).any():
        others = [axes.twinx()]
        curve(others[0], steps, figures.numbers(returns), label="return (right)", colour=ORANGE, linestyle="--")
        others[0].set_ylabel("return")
    figures.mark_events(axes, events)
    figures.legend(axes, *others, below=True)
    return figure


def draw_attention_entropy(entropy: Sequence[Sequence[float | None]], *, names: Sequence[str] = ()) -> Any:
    """Return the figure of `plot_attention_entropy`."""
    width = max((len(layer) for layer in entropy), default=0)
    figure = figures.new_figure(min((6.0 if names else 3.5) + 0.6 * width, 14.0), min(2.4 + 0.45 * len(entropy), 14.0))
    axes = panel(figure, (1, 1, 1), "Attention entropy", "head", "layer")
    axes.grid(visible=False)
    if not width:
        figures.say(axes, "No attention was seen.")
        return figure
    table = np.full((len(entropy), width), np.nan)
    for row, layer in enumerate(entropy):
        table[row, : len(layer)] = figures.numbers(layer)
    image = axes.imshow(table, cmap=_colours("cividis"), vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_xticks(range(width))
    if len(names) == len(entropy):
        _name_rows(axes, names)
    else:
        axes.set_yticks(range(len(entropy)))
    figure.colorbar(image, ax=axes, label="entropy / ln(visible keys)")
    if table.size <= _CELLS_WITH_TEXT:
        for row, column in np.ndindex(table.shape):
            value = table[row, column]
            text, colour = ("–", "black") if np.isnan(value) else (f"{value:.2f}", "white" if value < 0.55 else "black")
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    return figure


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
    _name_rows(axes, names)
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
        clipped, cmap=_colours("cividis"), vmin=low, vmax=max(high, low + 1e-3), aspect="auto", interpolation="nearest"
    )
    shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 9)).astype(int))
    axes.set_xticks(shown, [str(steps[index]) for index in shown])
    _name_rows(axes, names)
    figure.colorbar(image, ax=axes, label="log10 of the gradient norm")


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


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    every = math.ceil(len(names) / _NAMES)
    axes.set_yticks(
        range(0, len(names), every), [plain(name, length=32) for name in names[::every]], fontsize=8, parse_math=False
    )


def _gain_bars(axes: Any, at: NDArray[Any], values: NDArray[np.float64], logs: NDArray[np.float64]) -> None:
    finite = np.isfinite(logs)
    outside = (values < HEALTHY_GAIN[0]) | (values > HEALTHY_GAIN[1])
    for chosen, colour, label in ((finite & ~outside, BLUE, "healthy"), (finite & outside, RED, "outside")):
        if chosen.any():
            axes.bar(at[chosen], logs[chosen], color=colour, label=label)
    for position in np.flatnonzero(~finite):
        text = "?" if np.isnan(values[position]) else "blocked"
        axes.text(at[position], 0.5, text, transform=axes.get_xaxis_transform(), rotation=90, ha="center", color=RED)
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


def _unit_circle(axes: Any, eigenvalues: Sequence[complex], state_size: int | None) -> None:
    angle = np.linspace(0, 2 * np.pi, 200)
    axes.plot(np.cos(angle), np.sin(angle), color=GREY, linewidth=1.2, label="unit circle")
    values = np.asarray(eigenvalues, dtype=np.complex128)
    values = values[np.isfinite(values)]
    inside = np.abs(values) <= 1.0
    for chosen, colour, marker, label in ((inside, BLUE, "o", "decays"), (~inside, RED, "^", "grows")):
        if chosen.any():
            axes.plot(values[chosen].real, values[chosen].imag, marker, color=colour, markersize=4.5, label=label)
    if len(values):
        partial = state_size is not None and len(values) < state_size
        part = f", outermost {len(values)} of {state_size}" if partial else ""
        title = f"Spectrum, radius {np.abs(values).max():.3g}{part}"
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_aspect("equal", adjustable="datalim")
    figures.legend(axes)


def _colours(name: str) -> Any:
    from matplotlib import colormaps

    return colormaps[name].with_extremes(bad="#c8c8c8")
