"""Figures in gradtrack's style: panels, curves, colours, and marks where something happened."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradtrack.errors import MissingExtraError
from gradtrack.reports import StepReport

# The colours of Okabe and Ito, which stay distinct for every common kind of colour vision.
BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
RED: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
SKY: Final = "#56B4E9"
GREY: Final = "#767676"
CYCLE: Final = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)

NAMES: Final = 40
"""The most rows that are all named; of more rows, evenly spaced ones are."""

_TICKS: Final = 7
_ABOVE: Final = 1.02
_ENTRIES: Final = 4
_DRAWABLE: Final = (1e-99, 1e99)


def new_figure(width: float = 11.0, height: float = 7.5) -> Any:
    """Return an empty figure that pyplot does not know: it opens no window and changes no global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as fault:
        raise MissingExtraError("pictures", "matplotlib", "plots") from fault
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


class Picture(type(Path())):  # type: ignore[misc]
    """The path of a picture, which a notebook shows as the picture."""

    def _repr_png_(self) -> bytes | None:
        return self.read_bytes() if self.suffix == ".png" and self.is_file() else None

    def _repr_svg_(self) -> str | None:
        return self.read_text(encoding="utf-8") if self.suffix == ".svg" and self.is_file() else None


def save(figure: Any, path: Path) -> Path:
    """Write a figure in the format of the path's suffix, PNG where it has none, and return where it is."""
    path = path if path.suffix else path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    figure.clear()
    return Picture(path)


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
    """Finish the axes: readable tick labels on log axes that do not overlap, and whole steps."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_locator(FixedLocator(log_ticks(*sorted(axis.get_view_interval()))))
                axis.set_minor_formatter(NullFormatter())
            if axis.get_scale() != "linear":
                shortly = FuncFormatter(lambda value, _: f"{value:g}".replace("e-0", "e-").replace("e+0", "e"))
                axis.set_major_formatter(shortly)
    return figure


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
    """Set the x-axis to cover all of these steps, with ticks at whole numbers, also where values are missing."""
    axes.set_xlim(*spread(steps))
    axes.xaxis.get_major_locator().set_params(integer=True)


def numbers(values: Iterable[float | None]) -> NDArray[np.float64]:
    """Return values as an array in which None is NaN."""
    return np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)


def curve(axes: Any, x: ArrayLike, values: ArrayLike, *, label: str, colour: str, **style: Any) -> None:
    """Draw a line over its finite values; mark the others at the upper edge, so that they do not change the scale."""
    x, values = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
    style = {"linewidth": 1.6, "marker": "." if len(values) < 3 else None} | style
    axes.plot(x, np.where(np.isfinite(values), values, np.nan), label=label, color=colour, **style)
    infinite = x[np.isinf(values)]
    if len(infinite):
        _at_edge(axes, infinite, _ABOVE, marker="x", colour=RED, label="infinite")


def log_curve(axes: Any, x: ArrayLike, values: ArrayLike, *, label: str, colour: str, **style: Any) -> None:
    """Draw a line of positive values on a log axis; mark zeros at its lower edge and infinities at its upper edge."""
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
    """Mark at the upper edge the steps whose value is NaN, so that no gap looks like the end of the line."""
    if np.size(x):
        _at_edge(axes, np.asarray(x, dtype=np.float64), _ABOVE, marker="x", colour=RED, label="not a number")


def legend(axes: Any, *others: Any, below: bool = False) -> None:
    """Add a legend for more than one line, those of `others` on the same place included; long ones go below."""
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
    """Return a name as one short line, in characters that the font has."""
    known = font()
    line = " ".join(text.split())
    drawable = "".join(letter if known.get_char_index(ord(letter)) else "□" for letter in line)
    return drawable if len(drawable) <= length else f"{drawable[: length // 2 - 1]}…{drawable[-length // 2 :]}"


def font() -> Any:
    """Return the font of the pictures."""
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont("DejaVu Sans"))


def say(axes: Any, text: str) -> None:
    """Write a sentence into the middle of empty axes."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)


def spread(values: ArrayLike) -> tuple[float, float]:
    """Return axis limits that hold every finite value, with a margin."""
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
    """Return a colour map that draws masked values grey."""
    from matplotlib import colormaps

    return colormaps[name].with_extremes(bad="#c8c8c8")


_LABELS: Final = 6
_ROWS: Final = 3
_ROW_SHARE: Final = 0.055
_NEAR: Final = 0.15
_MORE: Final = ", 99 more"
# Beyond this share of the width a text stands to the left of its line.
_TURN: Final = 0.5
_SIZE: Final = 7.5


def mark_events(axes: Any, events: Sequence[tuple[float, str]], *, texts: bool = True) -> None:
    """Mark events: a vertical line for each, and a text above the curves for as many as fit."""
    for x, _ in events:
        axes.axvline(x, color=RED, alpha=0.5, linewidth=0.9, linestyle=":", zorder=0.5)
    if not (events and texts):
        return
    axes.figure.get_layout_engine().execute(axes.figure)
    low, high = axes.get_xlim()
    told = [((x - low) / (high - low), text) for x, text in _gathered(events, (high - low) * _NEAR)]
    placed = _in_rows(told, 72 / axes.figure.dpi * axes.get_window_extent().width)
    _make_room(axes, (1 + max(row for row, _ in placed.values())) * _ROW_SHARE)
    for index, (row, text) in placed.items():
        left = told[index][0] > _TURN
        axes.annotate(
            text,
            (low + told[index][0] * (high - low), 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-3 if left else 3, -3 - 11 * row),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=_SIZE,
            color=RED,
            va="top",
            parse_math=False,
            in_layout=False,
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
        )


def _in_rows(texts: Sequence[tuple[float, str]], room: float) -> dict[int, tuple[int, str]]:
    """Return row and text of each label that finds a free row; its neighbour counts those that do not."""
    taken: list[list[tuple[float, float]]] = [[] for _ in range(_ROWS)]
    placed: dict[int, tuple[int, str]] = {}
    for index, (share, text) in enumerate(texts):
        if len(placed) == _LABELS:
            break
        words, wide = _fitting(text, room, max(share, 1 - share))
        start, end = (share - wide, share) if share > _TURN else (share, share + wide)
        row = next((row for row in range(_ROWS) if all(end <= a or start >= b for a, b in taken[row])), None)
        if row is not None:
            taken[row].append((start, end))
            placed[index] = row, words
    left_out = [index for index in range(len(texts)) if index not in placed]
    others = Counter(min(placed, key=lambda one: (abs(texts[one][0] - texts[out][0]), -one)) for out in left_out)
    return {
        index: (row, f"{words}, {others[index]} more" if others[index] else words)
        for index, (row, words) in placed.items()
    }


def _fitting(text: str, room: float, share: float) -> tuple[str, float]:
    """Cut a text to a share of an axis of so many points; return it and the share that it takes."""
    written = font()
    written.set_size(_SIZE, 72)
    for length in range(48, 3, -4):
        words = plain(text, length=length)
        written.set_text(words + _MORE)
        wide = float(written.get_width_height()[0] / 64 + 8) / room
        if wide <= share:
            break
    return words, wide


def _gathered(events: Sequence[tuple[float, str]], near: float) -> list[tuple[float, str]]:
    """Merge events of the same text that follow each other closely into one, with their number."""
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
    """Raise the upper limit so that this share of the height stays free above the curves."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(low, high * (high / low) ** (share / (1 - share)))
    elif axes.get_yscale() == "symlog":
        axes.set_ylim(low, high * (1 + high) ** (share / (1 - share)))
    else:
        axes.set_ylim(low, high + (high - low) * share / (1 - share))


def events_of(reports: Sequence[StepReport]) -> list[tuple[float, str]]:
    """Return the steps on which an issue opened, each with its type and layer."""
    events: list[tuple[float, str]] = []
    before: dict[str, set[str]] = {}
    for report in reports:
        now = {issue.key for issue in report.health.issues}
        for issue in report.health.issues:
            if issue.key not in before.get(report.source, set()):
                words = (issue.issue_type.value, report.source, issue.layer)
                events.append((report.step, " ".join(filter(None, words))))
        before[report.source] = now
    return events
