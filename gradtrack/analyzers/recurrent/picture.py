"""The picture of a recurrent network: the spectrum of its state Jacobian, and how gradients decay back in time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradtrack.drawing import figures
from gradtrack.drawing.figures import BLUE, GREEN, GREY, ORANGE, RED, log_curve, panel
from gradtrack.reports import StepReport


def pictures_of(reports: Sequence[StepReport]) -> Mapping[str, Callable[[Path], Path]]:
    """Draw the cell of the last look that has the largest spectral radius."""
    looks = [report.analyzers["recurrent"] for report in reports if "recurrent" in report.analyzers]
    cells = [cell for cell in looks[-1]["cells"].values() if cell.spectral_radius is not None] if looks else []
    if not cells:
        return {}
    largest, horizon = max(cells, key=lambda cell: cell.spectral_radius), looks[-1]["horizon"]

    def plot(path: Path) -> Path:
        figure = draw_recurrent_spectrum(
            [complex(*value) for value in largest.eigenvalues],
            decay=largest.decay_profile[1:],
            memory_length=largest.effective_memory_length,
            horizon=horizon,
            state_size=largest.state_size,
            radius=largest.spectral_radius,
            num_states=largest.spectral_radius_count,
            censored=largest.censored,
        )
        return figures.save(figure, path)

    return {"recurrent_spectrum": plot}


def draw_recurrent_spectrum(
    eigenvalues: Sequence[complex],
    *,
    decay: Sequence[float] = (),
    memory_length: float | None = None,
    horizon: int | None = None,
    state_size: int | None = None,
    radius: float | None = None,
    num_states: int = 1,
    censored: bool = False,
) -> Any:
    """Draw the eigenvalues of a state Jacobian on the unit circle, and how gradients decay over the lags from 1 on.

    Where a `state_size` is given that is larger than their number, the title says that they are the outermost ones.
    `radius` is the median over `num_states` states, which the title names; the eigenvalues are those of the state that
    is nearest to it. A `censored` memory lasts for at least as long.
    """
    figure = figures.new_figure(11.0, 5.0)
    circle = panel(figure, (1, 2, 1), "Spectrum of the state Jacobian", "real", "imaginary")
    _unit_circle(circle, eigenvalues, state_size, radius)
    if radius is not None and num_states > 1:
        circle.set_xlabel(f"real (radius: median of {num_states} states; eigenvalues: the state nearest to it)")
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
        (memory_length, 1, ORANGE, "memory, at least" if censored else "memory"),
        (horizon, 0, GREEN, "horizon of the task"),
    ):
        if length is not None and math.isfinite(length):
            axes.axvline(first + length, color=colour, linewidth=1.4, label=f"{text}: {length:.4g} steps")
    figures.legend(axes)
    return figures.tidy(figure)


def _unit_circle(axes: Any, eigenvalues: Sequence[complex], state_size: int | None, radius: float | None) -> None:
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
        title = f"Spectrum, radius {np.abs(values).max() if radius is None else radius:.3g}{part}"
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_aspect("equal", adjustable="datalim")
    figures.legend(axes)
