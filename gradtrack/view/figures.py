"""What all pictures share: colours for every eye, log axes that survive zeros and NaN, marks of events, saving."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradtrack.errors import MissingExtraError

# The colours of Okabe and Ito, which stay apart for every common kind of colour vision.
BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
RED: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
SKY: Final = "#56B4E9"
GREY: Final = "#767676"
CYCLE: Final = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)

NAMES: Final = 40
"""So many rows have their names; of more, every so many."""

_TICKS: Final = 7
_ABOVE: Final = 1.02
_ENTRIES: Final = 4
_DRAWABLE: Final = (1e-99, 1e99)


def new_figure(width: float = 11.0, height: float = 7.5) -> Any:
    """Return an empty figure that belongs to nobody else: no window, no global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as fault:
        raise MissingExtraError("pictures", "matplotlib", "plots") from fault
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> Path:
    """Write a figure in the format of the path's suffix, PNG where it has none, and return where it is."""
    path = path if path.suffix else path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    figure.clear()
    return path


def panel(figure: Any, position: tuple[int, int, int], title: str, xlabel: str, ylabel: str) -> Any:
    """Add an axes with a title and labels, and a grid that stays in the background."""
    axes = figure.add_subplot(*position)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(visible=True, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def tidy(figure: Any) -> Any:
    """Write what is finished: numbers beside log axes that can be read and do not meet, and whole steps."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_locator(FixedLocator(log_ticks(*sorted(axis.get_view_interval()))))
                axis.set_minor_formatter(NullFormatter())
            if axis.get_scale() != "linear":
                axis.set_major_formatter(FuncFormatter(lambda value, _: _shortly(value)))
    return figure


def _shortly(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten within limits, and what lies between them where that would be fewer than three."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / _TICKS))
    powers = [10.0**power for power in range(first, last + 1, every)]
    if len(powers) > 2:
        return powers
    parts = [part * 10.0**power for power in range(first - 1, last + 1) for part in (1, 2, 5)]
    found = [value for value in parts if low <= value <= high]
    if len(found) > 2:
        return found
    from matplotlib.ticker import MaxNLocator

    return [float(value) for value in MaxNLocator(4).tick_values(low, high) if low <= value <= high]


def across(axes: Any, steps: ArrayLike) -> None:
    """Show all of these steps, whole ones, whatever is known of them."""
    axes.set_xlim(*spread(steps))
    axes.xaxis.get_major_locator().set_params(integer=True)


def numbers(values: Iterable[float | None]) -> NDArray[np.float64]:
    """Return values as an array in which None is NaN."""
    return np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)


def curve(axes: Any, x: ArrayLike, values: ArrayLike, *, label: str, colour: str, **style: Any) -> None:
    """Draw a line over its finite values and mark the others above it all, where they do not bend the scale."""
    x, values = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
    style = {"linewidth": 1.6, "marker": "." if len(values) < 3 else None} | style
    axes.plot(x, np.where(np.isfinite(values), values, np.nan), label=label, color=colour, **style)
    infinite = x[np.isinf(values)]
    if len(infinite):
        _at_edge(axes, infinite, _ABOVE, marker="x", colour=RED, label="infinite")


def log_curve(axes: Any, x: ArrayLike, values: ArrayLike, *, label: str, colour: str, **style: Any) -> None:
    """Draw a line of positive values on a log axis; zeros are marked at its lower edge, infinities above it all."""
    x, values = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
    zero, negative = values == 0.0, values < 0.0
    bounded = np.where(np.isfinite(values), np.clip(values, *_DRAWABLE), values)
    curve(axes, x, np.where(zero | negative, np.nan, bounded), label=label, colour=colour, **style)
    if zero.any():
        _at_edge(axes, x[zero], 0.03, marker="v", colour=colour, label=f"{label}: zero")
    if (np.isfinite(values) & (values > 0.0)).any():
        axes.set_yscale("log")


def _at_edge(axes: Any, x: NDArray[np.float64], height: float, *, marker: str, colour: str, label: str) -> None:
    edge = axes.get_xaxis_transform()
    axes.plot(
        x, np.full(len(x), height), marker, color=colour, transform=edge, label=label, markersize=5, clip_on=False
    )


def mark_lost(axes: Any, x: ArrayLike) -> None:
    """Mark above it all where a value was recorded that is not a number, so that no gap looks like an end."""
    if np.size(x):
        _at_edge(axes, np.asarray(x, dtype=np.float64), _ABOVE, marker="x", colour=RED, label="not a number")


def legend(axes: Any, *others: Any, below: bool = False) -> None:
    """Add a legend where more than one thing is drawn, with what `others` on the same place draw; many stand below."""
    handles, labels = axes.get_legend_handles_labels()
    for other in others:
        more = other.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    unique = dict(zip(labels, handles, strict=True))
    if len(unique) > 1:
        place: dict[str, Any] = {}
        if below or len(unique) > _ENTRIES:
            columns = 4 if below else 2
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": columns, "frameon": False}
        axes.legend(unique.values(), unique.keys(), fontsize=8, framealpha=0.85, **place)


def plain(text: str, *, length: int = 48) -> str:
    """Return a name in one short line, in characters that the font of the pictures has."""
    known = font()
    line = " ".join(text.split())
    drawable = "".join(letter if known.get_char_index(ord(letter)) else "□" for letter in line)
    return drawable if len(drawable) <= length else f"{drawable[: length // 2 - 1]}…{drawable[-length // 2 :]}"


def font() -> Any:
    """Return the font of the pictures."""
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont("DejaVu Sans"))


def say(axes: Any, text: str) -> None:
    """Write a sentence into the middle of an axes that has nothing to draw."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)


def spread(values: ArrayLike) -> tuple[float, float]:
    """Return limits that hold every finite value with some air around them."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    air = (high - low) * 0.05 or max(abs(high), 1.0) * 0.5
    return low - air, high + air


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Write the names of rows beside them, as many as there is room for."""
    every = math.ceil(len(names) / NAMES)
    axes.set_yticks(
        range(0, len(names), every), [plain(name, length=32) for name in names[::every]], fontsize=8, parse_math=False
    )


def colours(name: str) -> Any:
    """Return a colour map in which what is not known is grey."""
    from matplotlib import colormaps

    return colormaps[name].with_extremes(bad="#c8c8c8")
