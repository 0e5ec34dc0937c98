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

_LABELS: Final = 6
_ROWS: Final = 3
_ROW_SHARE: Final = 0.055
_NEAR: Final = 0.15
# Beyond this share of the width a text stands to the left of its line; a letter takes about this share.
_TURN: Final = 0.6
_LETTER: Final = 0.0125
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


def numbers(values: Iterable[float | None]) -> NDArray[np.float64]:
    """Return values as an array in which None is NaN."""
    return np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)


def curve(axes: Any, x: ArrayLike, values: ArrayLike, *, label: str, colour: str, **style: Any) -> None:
    """Draw a line over its finite values and mark the others at the upper edge, where they do not bend the scale."""
    x, values = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
    style = {"linewidth": 1.6, "marker": "." if len(values) < 3 else None} | style
    axes.plot(x, np.where(np.isfinite(values), values, np.nan), label=label, color=colour, **style)
    infinite = x[np.isinf(values)]
    if len(infinite):
        _at_edge(axes, infinite, 0.97, marker="x", colour=RED, label="infinite")


def log_curve(axes: Any, x: ArrayLike, values: ArrayLike, *, label: str, colour: str, **style: Any) -> None:
    """Draw a line of positive values on a log axis; zeros are marked at its lower edge, infinities at its upper."""
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
    axes.plot(x, np.full(len(x), height), marker, color=colour, transform=edge, label=label, markersize=6)


def mark_events(axes: Any, events: Sequence[tuple[float, str]], *, texts: bool = True) -> None:
    """Mark where something happened: a line for every event, and above the curves a text for as many as fit."""
    for x, _ in events:
        axes.axvline(x, color=RED, alpha=0.5, linewidth=0.9, linestyle=":", zorder=0.5)
    if not (events and texts):
        return
    low, high = axes.get_xlim()
    told = [((x - low) / (high - low), x, plain(text)) for x, text in _gathered(events, (high - low) * _NEAR)]
    placed, left_out = _in_rows([(share, text) for share, _, text in told])
    _make_room(axes, (1 + max(placed.values())) * _ROW_SHARE)
    for index, row in placed.items():
        share, x, text = told[index]
        left = share > _TURN
        axes.annotate(
            f"{text}, {left_out} more" if left_out and index == max(placed) else text,
            (x, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-3 if left else 3, -3 - 11 * row),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=7.5,
            color=RED,
            va="top",
            parse_math=False,
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
        )


def _in_rows(texts: Sequence[tuple[float, str]]) -> tuple[dict[int, int], int]:
    """Return the row of each text for which one is free at its place, and how many found none."""
    taken: list[list[tuple[float, float]]] = [[] for _ in range(_ROWS)]
    placed: dict[int, int] = {}
    for index, (share, text) in enumerate(texts[: _LABELS * _ROWS]):
        wide = _LETTER * (len(text) + 2)
        start, end = (share - wide, share) if share > _TURN else (share, share + wide)
        row = next((row for row in range(_ROWS) if all(end <= a or start >= b for a, b in taken[row])), None)
        if row is not None and len(placed) < _LABELS:
            taken[row].append((start, end))
            placed[index] = row
    return placed, len(texts) - len(placed)


def _gathered(events: Sequence[tuple[float, str]], near: float) -> list[tuple[float, str]]:
    """Tell events of the same text that follow each other closely once, with their number."""
    told: list[tuple[float, str, int]] = []
    last: dict[str, tuple[int, float]] = {}
    for x, text in events:
        index, before = last.get(text, (-1, -math.inf))
        if x - before <= near:
            first, _, count = told[index]
            told[index] = (first, text, count + 1)
        else:
            index = len(told)
            told.append((x, text, 1))
        last[text] = (index, x)
    return [(x, text if count == 1 else f"{text} ×{count}") for x, text, count in told]


def _make_room(axes: Any, share: float) -> None:
    """Raise the upper limit so that this share of the height lies above everything that is drawn."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(low, high * (high / low) ** (share / (1 - share)))
    elif axes.get_yscale() == "symlog":
        axes.set_ylim(low, high * (1 + high) ** (share / (1 - share)))
    else:
        axes.set_ylim(low, high + (high - low) * share / (1 - share))


def legend(axes: Any, *others: Any, below: bool = False) -> None:
    """Add a legend where more than one thing is drawn, with what `others` on the same place draw, or `below` it all."""
    handles, labels = axes.get_legend_handles_labels()
    for other in others:
        more = other.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    unique = dict(zip(labels, handles, strict=True))
    if len(unique) > 1:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 4, "frameon": False} if below else {}
        axes.legend(unique.values(), unique.keys(), fontsize=8, framealpha=0.85, **place)


def plain(text: str, *, length: int = 48) -> str:
    """Return a name in one short line, in characters that the font of the pictures has."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    line = " ".join(text.split())
    drawable = "".join(letter if font.get_char_index(ord(letter)) else "□" for letter in line)
    return drawable if len(drawable) <= length else f"{drawable[: length // 2 - 1]}…{drawable[-length // 2 :]}"


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
