"""Curves as one line of characters."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_LOST, _INFINITE = "×", "∞"
WIDTH: Final = 28


def sparkline(
    values: NDArray[np.float64],
    *,
    log_scale: bool = False,
    width: int = WIDTH,
    scale: NDArray[np.float64] | None = None,
    lost: NDArray[np.bool_] | None = None,
) -> str:
    """Draw a line with block characters, each the highest value of its part, so that no spike is lost.

    The lowest and the highest block are the extremes of the line, or of the values in `scale`. A part that holds a
    value that is `lost`, as it was recorded and is not a number, is a cross; one without any value is like the last.
    """
    shown = _logs(values) if log_scale else values
    bounds = shown if scale is None else _logs(scale) if log_scale else scale
    bounds = bounds[np.isfinite(bounds)]
    if not np.isfinite(shown).any():
        return ""
    low, high = float(bounds.min()), float(bounds.max())
    steps = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    edges = np.linspace(0, len(shown), min(len(shown), width) + 1).astype(int)
    drawn = " "
    for start, end in pairwise(edges.tolist()):
        known = shown[start:end][~np.isnan(shown[start:end])]
        if lost is not None and lost[start:end].any():
            drawn += _LOST
        elif len(known):
            top = float(known.max())
            drawn += _INFINITE if top == math.inf else _BLOCKS[round((max(top, low) - low) * steps)]
        else:
            drawn += drawn[-1] if drawn[-1] != _LOST else " "
    return drawn[1:]


def _logs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values)
