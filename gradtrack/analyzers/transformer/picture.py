"""The picture of attention: the entropy of every head in every layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from gradtrack.drawing import figures
from gradtrack.drawing.figures import panel
from gradtrack.reports import StepReport

_CELLS_WITH_TEXT: Final = 200


def pictures_of(reports: Sequence[StepReport]) -> Mapping[str, Callable[[Path], Path]]:
    """Draw the entropies of the last look."""
    looks = [report.analyzers["transformer"] for report in reports if "transformer" in report.analyzers]
    layers = looks[-1]["layers"] if looks else ()
    if not layers:
        return {}
    entropy, names = [[head.entropy for head in layer.heads] for layer in layers], [layer.name for layer in layers]
    return {"attention_entropy": lambda path: figures.save(draw_attention_entropy(entropy, names=names), path)}


def draw_attention_entropy(entropy: Sequence[Sequence[float | None]], *, names: Sequence[str] = ()) -> Any:
    """Draw the normalized attention entropy of every head (across) in every layer (down)."""
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
