"""Marks of events in a picture: a line where each happened, and texts that meet neither a curve nor each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from gradtrack.view import figures

_LABELS: Final = 6
_ROWS: Final = 3
_ROW_SHARE: Final = 0.055
_NEAR: Final = 0.15
_MORE: Final = ", 99 more"
# Beyond this share of the width a text stands to the left of its line.
_TURN: Final = 0.5
_SIZE: Final = 7.5


def mark_events(axes: Any, events: Sequence[tuple[float, str]], *, texts: bool = True) -> None:
    """Mark where something happened: a line for every event, and above the curves a text for as many as fit."""
    for x, _ in events:
        axes.axvline(x, color=figures.RED, alpha=0.5, linewidth=0.9, linestyle=":", zorder=0.5)
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
            color=figures.RED,
            va="top",
            parse_math=False,
            in_layout=False,
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
        )


def _in_rows(texts: Sequence[tuple[float, str]], room: float) -> dict[int, tuple[int, str]]:
    """Return the row and the words of each text for which one is free; the nearest of them tells of the others."""
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
    """Return a text that fits into a share of so many points, and the share that it takes."""
    for length in range(48, 3, -4):
        words = figures.plain(text, length=length)
        wide = (_width(words + _MORE) + 8) / room
        if wide <= share:
            break
    return words, wide


def _width(text: str) -> float:
    """Return how wide the font of the pictures writes a text, in points."""
    font = figures.font()
    font.set_size(_SIZE, 72)
    font.set_text(text)
    return float(font.get_width_height()[0] / 64)


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
