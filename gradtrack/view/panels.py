"""Pictures of what analyzers find inside of a network: recurrent spectra, policies and attention.

They take plain numbers, so that they draw what any analyzer, file or notebook holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from gradtrack.view import figures
from gradtrack.view.figures import BLUE, GREEN, GREY, ORANGE, RED, curve, log_curve, panel
from gradtrack.view.marks import mark_events

_CELLS_WITH_TEXT: Final = 200


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
    # What is left is counted from lag 1 on, and so is how long it lasts.
    for length, first, colour, text in (
        (memory_length, 1, ORANGE, "memory"),
        (horizon, 0, GREEN, "horizon of the task"),
    ):
        if length is not None and math.isfinite(length):
            axes.axvline(first + length, color=colour, linewidth=1.4, label=f"{text}: {length:.4g} steps")
    figures.legend(axes)
    return figures.tidy(figure)


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
        others[0].spines["top"].set_visible(False)
        curve(others[0], steps, figures.numbers(returns), label="return (right)", colour=ORANGE, linestyle="--")
        others[0].set_ylabel("return")
    figures.across(axes, steps)
    mark_events(axes, events)
    figures.legend(axes, *others, below=True)
    return figures.tidy(figure)


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
    image = axes.imshow(table, cmap=figures.colours("cividis"), vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_xticks(range(width))
    if len(names) == len(entropy):
        figures.name_rows(axes, names)
    else:
        axes.set_yticks(range(len(entropy)))
    figure.colorbar(image, ax=axes, label="entropy / ln(visible keys)")
    if table.size <= _CELLS_WITH_TEXT:
        for row, column in np.ndindex(table.shape):
            value = table[row, column]
            text, colour = ("–", "black") if np.isnan(value) else (f"{value:.2f}", "white" if value < 0.55 else "black")
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    return figure


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
